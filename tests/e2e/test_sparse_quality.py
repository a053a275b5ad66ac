"""The accuracy that sparse methods lose on retrieval from long contexts, with a capable model in a real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.needle.asking import ask
from tests.e2e.needle.settings import BLOCK, DENSE, Setting, class_of, known_methods
from tests.e2e.needle.task import RECORD, VALUE

if TYPE_CHECKING:
    from tests.e2e.needle.asking import Result
    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

#: Questions where answers are counted, and where they must be those of dense attention one by one.
COUNT, SAME = 64, 16
LENGTHS = (1_024, 4_096)
LONG, BUDGET = LENGTHS[-1], 0.1
METHODS = known_methods()
#: Methods that cannot find what is outside their window.
WINDOWS = {"SinkWindow"}
#: The minimum share of dense attention's right answers.
GOAL = 0.95
RETRIEVING = [method for method in METHODS if class_of(method) not in WINDOWS]


@pytest.fixture(scope="module")
def results(environments: Environments) -> dict[Setting, Result]:
    settings = [Setting(DENSE, length, 1.0) for length in LENGTHS]
    settings += [Setting(method, LONG, budget) for method in METHODS for budget in (1.0, BUDGET)]
    return {result.setting: result for result in ask(environments.overlay, settings, count=COUNT, of_full=SAME)}


@pytest.mark.parametrize("length", LENGTHS)
def test_dense_attention_retrieves(results: dict[Setting, Result], length: int) -> None:
    result = results[Setting(DENSE, length, 1.0)]
    assert not result.error
    assert result.accuracy >= 0.98


@pytest.mark.parametrize("method", METHODS)
def test_with_a_full_budget_the_answers_are_those_of_dense_attention(
    results: dict[Setting, Result], method: str
) -> None:
    result = results[Setting(method, LONG, 1.0)]
    dense = results[Setting(DENSE, LONG, 1.0)]
    assert not result.error
    assert len(result.answers) == SAME
    pairs = zip(dense.questions, dense.answers, strict=True)
    assert result.answers == [answer for question, answer in pairs if question in result.questions]


@pytest.mark.parametrize("method", RETRIEVING)
def test_a_tenth_of_the_context_is_enough_for_what_the_query_wants(results: dict[Setting, Result], method: str) -> None:
    result = results[Setting(method, LONG, BUDGET)]
    assert not result.error
    assert result.accuracy >= GOAL * results[Setting(DENSE, LONG, 1.0)].accuracy


@pytest.mark.parametrize("method", [method for method in METHODS if class_of(method) in WINDOWS])
def test_a_window_finds_what_lies_within_it_and_nothing_else(results: dict[Setting, Result], method: str) -> None:
    result = results[Setting(method, LONG, BUDGET)]
    assert not result.error
    window = result.setting.tokens - BLOCK  # the budget without the sinks' block
    # The answer's tokens move the window; full blocks are read, up to one beyond it, and one for the sinks.
    assert result.accuracy_of(0, window - RECORD - VALUE) >= 0.95
    assert result.accuracy_of(window + BLOCK, LONG - 2 * BLOCK) < 0.1
    assert result.accuracy < 0.5 * results[Setting(DENSE, LONG, 1.0)].accuracy
