"""Questions about real text: facts lie where they should, and what is judged of an answer is what it says."""

from __future__ import annotations

import pytest

from tests.e2e.judges.real import (
    BUDGETS,
    CHAINED,
    DENSE,
    DOCUMENT,
    ESA,
    ONE,
    ROWS,
    SEVERAL,
    TASKS,
    Question,
    Verdict,
    chained,
    document,
    one,
    paragraphs_of,
    several,
    table,
    variants,
)
from tests.e2e.real.chat import HANDBOOK

LENGTH, COUNT = 900, 4
#: A token is a character here.
PARAGRAPHS = [[ord(c) for c in f"Paragraph {n} says nothing of interest.\n\n"] for n in range(40)]


def written(question: Question) -> tuple[str, list[str]]:
    """The prompt, and the judged parts of the answer, as text."""
    item = question.item(PARAGRAPHS, [[ord(c) for c in text] for text in question.texts])
    answer = "".join(map(chr, item.answer))
    assert len(item.prompt) <= question.length
    return "".join(map(chr, item.prompt)), [answer[begin:end] for begin, end in item.scored]


def test_a_code_lies_at_a_depth_of_its_own() -> None:
    depths = []
    for number in range(COUNT):
        prompt, [code] = written(one(LENGTH, number, COUNT))
        assert prompt.count(code) == 1
        depths.append(prompt.index(code) / len(prompt))
    assert depths == sorted(depths)
    assert depths[-1] - depths[0] > 0.4


def test_all_facts_of_an_answer_are_in_the_prompt() -> None:
    for number in range(COUNT):
        prompt, codes = written(several(2 * LENGTH, number, COUNT))
        assert len(set(codes)) == 4
        assert all(prompt.count(code) == 1 for code in codes)
        prompt, [door, code] = written(chained(2 * LENGTH, number, COUNT))
        assert f"has the same code as the{door} door" in prompt
        assert f"The code of the{door} door is {code}." in prompt


def test_the_handbook_says_each_answer_once_and_the_prompt_has_it_at_a_depth_of_its_own() -> None:
    count, whole = TASKS[DOCUMENT], "".join(paragraphs_of(HANDBOOK))
    depths = []
    for number in range(count):
        prompt, [answer] = written(document(4 * LENGTH, number, count))
        assert whole.count(answer.strip()) == prompt.count(answer.strip()) == 1
        depths.append(prompt.index(answer.strip()) / len(prompt))
    assert len({int(depth * 4) for depth in depths}) == 4


def test_questions_are_the_same_each_time_and_differ_from_each_other() -> None:
    for make in (one, several, chained, document):
        assert make(LENGTH, 1, COUNT) == make(LENGTH, 1, COUNT)
        assert make(LENGTH, 1, COUNT).answer != make(LENGTH, 2, COUNT).answer


@pytest.mark.parametrize("rows", [ROWS, (DENSE,), (ESA,)])
def test_every_row_is_compared_at_every_budget(rows: tuple[str, ...]) -> None:
    found = [(of["name"], of.get("budget")) for of in variants(2_000, 32, BUDGETS, rows)]
    wanted = {(row, None if row == DENSE else budget) for row in rows for budget in BUDGETS}
    assert set(found) == wanted
    assert len(found) == len(wanted)


def test_a_table_has_a_row_for_each_task_and_way_to_choose() -> None:
    verdicts = [
        Verdict(task, LENGTH, 32, budget, row, 0.5, 1.0)
        for task in (ONE, SEVERAL, CHAINED)
        for row, budget in ((DENSE, 1.0), ("codes", 0.1))
    ]
    assert table(verdicts, LENGTH, 32).row_count == 6
