"""The questions ask for what stands in their contexts, once, at every depth; budgets become the methods' options."""

from __future__ import annotations

import pytest

from tests.e2e.needle.asking import Result, settings_for
from tests.e2e.needle.settings import DENSE, Setting, class_of, known_methods, parse_options
from tests.e2e.needle.task import QUESTION, RECORD, SPACING, SYMBOLS, VALUE, accuracy, questions


@pytest.mark.parametrize("length", [1_000, 4_096])
def test_a_question_asks_for_one_record_of_many(length: int) -> None:
    for question in questions(length, 20):
        assert len(question.prompt) == length
        *context, mark, key = question.prompt
        assert mark == QUESTION
        place = context.index(key)
        assert context[place + 1 : place + RECORD] == question.answer
        assert question.behind == length - place - RECORD
        symbols = [token for token in context if token in SYMBOLS]
        # Every symbol is there once, so the answer stands nowhere else.
        assert len(symbols) == len(set(symbols)) == RECORD * ((length - 2) // SPACING)


def test_the_records_that_are_asked_for_lie_at_all_depths() -> None:
    behind = [question.behind for question in questions(4_096, 64)]
    for start in range(0, 4_096, 512):
        assert 6 <= sum(start <= one < start + 512 for one in behind) <= 10


def test_questions_are_the_same_each_time_and_other_ones_for_another_seed() -> None:
    assert questions(500, 3) == questions(500, 3)
    assert questions(500, 3) != questions(500, 3, seed=1)


def test_an_answer_is_right_if_all_of_it_is() -> None:
    asked = questions(500, 4)
    given = [question.answer for question in asked]
    assert accuracy(asked, given) == 1
    assert accuracy(asked, [*given[:3], [*given[3][: VALUE - 1], 3]]) == 0.75


def test_accuracy_is_told_by_how_far_back_the_record_lies() -> None:
    asked = questions(1_000, 4)
    setting = Setting(DENSE, 1_000, 1.0)
    result = Result(setting, asked, [asked[0].answer, asked[1].answer, [], []])
    assert result.accuracy == 0.5
    assert result.accuracy_of(asked[1].behind, 1_000) == 1
    assert result.accuracy_of(0, asked[2].behind) == 0


def test_every_method_is_asked_once_whatever_it_is_called() -> None:
    assert {"BlockTopK", "SinkWindow", "ESA"} <= set(known_methods())
    assert not {"Probe", "GSAOnDevice", "StreamingLLM", "BlockRetrieval"} & set(known_methods())
    assert class_of("GSAOnDevice") == "BlockTopK"


def test_a_budget_is_a_share_of_the_context() -> None:
    (dense, *others) = settings_for(["BlockTopK", "SinkWindow", "ESA"], [4_096], [0.25])
    assert dense.config({}) is None
    summed = {"BlockTopK": ["token_budget"], "SinkWindow": ["sink_tokens", "window_tokens"]}
    summed["ESA"] = [*summed["BlockTopK"], *summed["SinkWindow"]]
    for other in others:
        config = other.config({})
        assert config is not None
        assert sum(config[other.method][name] for name in summed[other.method]) == 1_024


def test_options_of_the_users_own_take_the_place_of_these() -> None:
    given = parse_options(['BlockTopK={"token_budget": "$budget", "sink_tokens": "$budget-1000", "dense_layers": 1}'])
    (_, setting) = settings_for(["BlockTopK"], [4_096], [0.25])
    assert setting.config(given) == {"BlockTopK": {"token_budget": 1_024, "sink_tokens": 24, "dense_layers": 1}}
    with pytest.raises(ValueError, match="write METHOD"):
        parse_options(["BlockTopK"])
