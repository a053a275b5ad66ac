"""What each selector lets a model find that was not trained to favour any of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.judges.measuring import DENSE, ORACLE, SELECTORS, Plan, Verdict, judge
from tests.e2e.needle.model import PLAIN

if TYPE_CHECKING:
    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

TASKS = ("needle", "hops")
BLOCK, BUDGET = 32, 0.1
Verdicts = dict[tuple[str, str], Verdict]


@pytest.fixture(scope="module")
def verdicts(environments: Environments) -> Verdicts:
    plan = Plan({PLAIN: TASKS}, blocks=[BLOCK], budgets=[BUDGET], count=12)
    return {(verdict.task, verdict.selector): verdict for verdict in judge(environments.overlay, plan)}


@pytest.mark.parametrize("task", TASKS)
def test_the_model_can_answer(verdicts: Verdicts, task: str) -> None:
    assert verdicts[task, DENSE].score >= 0.95


@pytest.mark.parametrize("task", TASKS)
def test_the_budget_suffices_for_who_knows_what_to_read(verdicts: Verdicts, task: str) -> None:
    assert verdicts[task, ORACLE].score >= 0.98 * verdicts[task, DENSE].score


@pytest.mark.parametrize("task", TASKS)
def test_codes_find_what_the_oracle_finds(verdicts: Verdicts, task: str) -> None:
    assert verdicts[task, "hash"].score >= 0.95 * verdicts[task, ORACLE].score
    assert min(verdicts[task, "hash"].recall) >= 0.95


@pytest.mark.parametrize("selector", ["mean", "random"])
@pytest.mark.parametrize("task", TASKS)
def test_the_tasks_cannot_be_answered_from_a_summary_or_by_chance(verdicts: Verdicts, task: str, selector: str) -> None:
    """Otherwise they would test nothing, as with the first of these models."""
    assert verdicts[task, selector].score <= 0.5


def test_every_row_is_there(verdicts: Verdicts) -> None:
    assert set(verdicts) == {(task, selector) for task in TASKS for selector in (DENSE, *SELECTORS)}
