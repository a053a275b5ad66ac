"""The contexts hold what is asked for, as often as the task says; answers count as far as it says."""

from __future__ import annotations

import itertools

import pytest

from tests.e2e.judges.tasks import CHAINS, HOPS, OFTEN, SELDOM, TASKS, VALUE, VALUES
from tests.e2e.needle.task import FILLER, QUESTION, SYMBOLS

LENGTH = 4_096


def followers(prompt: list[int], token: int) -> list[int]:
    """What stands behind a token in a context."""
    return [after for before, after in itertools.pairwise(prompt) if before == token]


@pytest.mark.parametrize("name", TASKS)
def test_questions_are_of_one_length_end_with_a_question_and_are_the_same_each_time(name: str) -> None:
    asked = TASKS[name].questions(LENGTH, 5)
    assert asked == TASKS[name].questions(LENGTH, 5)
    assert asked != TASKS[name].questions(LENGTH, 5, seed=1)
    for question in asked:
        assert len(question.prompt) == LENGTH
        assert question.prompt[-2] == QUESTION
        assert question.prompt[-1] in SYMBOLS
        assert {QUESTION} == set(question.prompt) - set(FILLER) - set(SYMBOLS)


def test_a_needle_stands_there_once_among_others() -> None:
    for question in TASKS["needle"].questions(LENGTH, 5):
        place = question.prompt.index(question.prompt[-1])
        assert question.prompt[place + 1 : place + 1 + VALUE] == question.answer
        symbols = [token for token in question.prompt[:-1] if token in SYMBOLS]
        assert len(symbols) == len(set(symbols)) == (1 + VALUE) * 32


def test_needles_are_all_values_of_one_key() -> None:
    for question in TASKS["needles"].questions(LENGTH, 5):
        assert sorted(followers(question.prompt, question.prompt[-1])) == sorted(question.answer)
        assert len(set(question.answer)) == VALUES


@pytest.mark.parametrize(("name", "uses"), [("hops", 0), ("tracking", 1)])
def test_each_hop_leads_to_the_next_one(name: str, uses: int) -> None:
    for question in TASKS[name].questions(LENGTH, 5):
        for hop, token in enumerate([question.prompt[-1], *question.answer[:-1]]):
            behind = followers(question.prompt, token)
            assert question.answer[hop] in behind
            # Behind the place where it was led to, and behind each use, is filler, or the next record.
            assert len(behind) == 1 + (hop > 0) + uses
        assert len(question.answer) == HOPS
        pairs = sum(
            of in SYMBOLS and to in SYMBOLS for of, to in zip(question.prompt, question.prompt[1:], strict=False)
        )
        assert pairs >= CHAINS * HOPS


def test_the_aggregate_is_what_stands_there_most_often() -> None:
    for question in TASKS["aggregation"].questions(LENGTH, 5):
        behind = followers(question.prompt, question.prompt[-1])
        assert {behind.count(value) for value in set(behind)} == {OFTEN, SELDOM}
        assert behind.count(question.answer[0]) == OFTEN


def test_answers_count_as_far_as_the_task_says() -> None:
    questions = TASKS["hops"].questions(LENGTH, 2)
    first, second = (question.answer for question in questions)
    said = [[*first[:2], 3, *first[3:]], second]
    assert TASKS["hops"].score(questions, said, [[], []]) == (2 / HOPS + 1) / 2
    assert TASKS["needle"].score(questions, said, [[], []]) == 0.5
    assert TASKS["needles"].score(questions, [[], []], [first[::-1], [*second[:4], 3, 3, 3, 3]]) == 0.75
