"""Which rows are sparse, which representatives are missing, and which blocks a row reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from tests.ucm.sparse.fake_view import metadata, step
from ucm.sparse.selection import BlockBudget, Planner, RestrictedTables, StepPlan

#: Blocks of 4 tokens: 1 sink, 2 recent (one whole, one with the newest token), 2 to choose.
BUDGET = BlockBudget(block_size=4, sinks=1, recent=2, total=5)


def plan_of(planner: Planner, *rows: Any, excluded: set[str] | None = None, admitted: Any = ()) -> StepPlan | None:
    return planner.plan(step(*rows, admitted=admitted), excluded or set())


@pytest.mark.parametrize(
    ("tokens", "sinks", "recent", "total"),
    [((64, 0, 0), 0, 1, 2), ((95, 1, 1), 1, 2, 2), ((96, 32, 32), 1, 2, 3), ((97, 33, 33), 2, 3, 3)],
)
def test_budgets_in_whole_blocks(tokens: tuple[int, int, int], sinks: int, recent: int, total: int) -> None:
    budget = BlockBudget.of_tokens(32, *tokens)
    assert budget == BlockBudget(32, sinks, recent, total)
    assert budget.least_tokens == 32 * (sinks + recent + 1)
    assert budget.chosen == total - sinks - recent


def test_rows_that_are_sparse() -> None:
    """A long decode, one that fits, one of exactly the budget, a chunk of a prompt, the prompt's last token."""
    rows = [("long", 25, 1, 8), ("short", 7, 1, 4), ("fits", 19, 1, 4), ("chunk", 24, 6, 60), ("last", 39, 1, 40)]
    plan = plan_of(Planner(BUDGET), *rows)
    assert plan is not None
    assert plan.rows.tolist() == [0]
    assert plan.tokens.tolist() == [0]
    assert plan.blocks.tolist() == [7]
    assert plan.seq_lens.tolist() == [18, 8, 20, 30, 40]
    assert plan.dense_blocks == 10
    assert not plan.all_rows


def test_queries_are_found_behind_chunks() -> None:
    plan = plan_of(Planner(BUDGET), ("chunk", 0, 6, 60), ("a", 25, 1, 8), ("chunk 2", 0, 3, 60), ("b", 40, 1, 8))
    assert plan is not None
    assert plan.tokens.tolist() == [6, 10]


def test_without_sparse_rows_there_is_no_plan() -> None:
    assert plan_of(Planner(BUDGET), ("short", 19, 1, 4), ("chunk", 24, 6, 60)) is None


def test_excluded_rows_are_dense() -> None:
    plan = plan_of(Planner(BUDGET), ("a", 25, 1, 8), ("b", 25, 1, 8), excluded={"a"})
    assert plan is not None
    assert plan.rows.tolist() == [1]
    assert plan_of(Planner(BUDGET), ("a", 25, 1, 8), excluded={"a"}) is None


def missing(plan: StepPlan | None) -> list[tuple[int, int]]:
    assert plan is not None
    return [(begin, end) for begin, end in plan.missing.tolist() if end > begin]


def test_a_block_gets_its_representative_once_and_when_it_is_no_longer_recent() -> None:
    planner = Planner(BUDGET)
    assert missing(plan_of(planner, ("a", 24, 1, 8))) == [(1, 5)]
    for computed in (25, 26, 27):
        assert missing(plan_of(planner, ("a", computed, 1, 8))) == []
    assert missing(plan_of(planner, ("a", 28, 1, 8))) == [(5, 6)]


def test_admitted_anew_a_request_starts_again() -> None:
    planner = Planner(BUDGET)
    plan_of(planner, ("a", 24, 1, 8))
    assert plan_of(planner, ("a", 16, 9, 8), admitted=["a"]) is None
    assert missing(plan_of(planner, ("a", 25, 1, 8))) == [(1, 5)]
    assert missing(plan_of(planner, ("a", 26, 1, 8), admitted=["a"])) == [(1, 5)]


def test_set_back_it_starts_again_where_it_is_computed_anew() -> None:
    planner = Planner(BUDGET)
    plan_of(planner, ("a", 40, 1, 8))
    assert plan_of(planner, ("a", 13, 28, 8)) is None
    assert missing(plan_of(planner, ("a", 41, 1, 8))) == [(3, 9)]


def test_an_ended_request_is_forgotten() -> None:
    planner = Planner(BUDGET)
    plan_of(planner, ("a", 24, 1, 8))
    planner.forget("a")
    planner.forget("never seen")
    assert missing(plan_of(planner, ("a", 24, 1, 8))) == [(1, 5)]


def tables_of(rows: list[Any], blocks: list[list[int]], width: int | None = None) -> RestrictedTables:
    batch = step(*rows)
    plan = Planner(BUDGET).plan(batch, set())
    assert plan is not None
    return RestrictedTables(plan, metadata(batch, blocks, width).block_table)


def test_a_table_has_sinks_the_best_and_the_recent_blocks_in_order() -> None:
    tables = tables_of([("a", 30, 1, 8)], [[10, 11, 12, 13, 14, 15, 16, 17]])
    assert tables.candidates.tolist() == [[11, 12, 13, 14, 15]]
    assert tables.missing is not None
    assert tables.missing.tolist() == [11, 12, 13, 14, 15]
    assert tables.choose(torch.tensor([[0.1, 0.9, 0.2, 0.3, 0.8]])).tolist() == [[10, 12, 15, 16, 17]]
    assert tables.choose(torch.tensor([[5.0, 0.9, 4.0, 0.3, 0.8]])).tolist() == [[10, 11, 13, 16, 17]]
    assert tables.seq_lens.tolist() == [19]
    assert tables.max_seq_len == 19


def test_candidates_beyond_a_shorter_row_are_never_chosen() -> None:
    rows = [("a", 34, 1, 8), ("b", 21, 1, 8)]
    tables = tables_of(rows, [[10, 11, 12, 13, 14, 15, 16, 17, 18], [20, 21, 22, 23, 24, 25]])
    assert tables.candidates.shape == (2, 6)
    found = tables.choose(torch.tensor([[0.0, 0, 0, 0, 8, 9], [0.0, 1, 0, 7, 8, 9]]))
    assert found.tolist() == [[10, 15, 16, 17, 18], [20, 21, 22, 24, 25]] or found.tolist() == [
        [10, 15, 16, 17, 18],
        [20, 22, 23, 24, 25],
    ]
    assert set(found[1].tolist()) <= {20, 21, 22, 23, 24, 25}


def test_dense_rows_keep_their_whole_row_and_rows_of_a_graph_are_left_out() -> None:
    rows = [("chunk", 24, 6, 60), ("a", 30, 1, 8), ("short", 3, 1, 2)]
    tables = tables_of(rows, [list(range(40, 48)), list(range(10, 18)), [30], [0], [0]], width=20)
    found = tables.choose(torch.tensor([[0.1, 0.9, 0.2, 0.3, 0.8]]))
    assert found.tolist() == [list(range(40, 48)), [10, 12, 15, 16, 17, 15, 16, 17], [30, 0, 0, 0, 0, 0, 0, 0]]
    assert found.dtype == torch.int32
    assert tables.seq_lens.tolist() == [30, 19, 4]


def test_shorter_dense_rows_make_room_for_the_budget() -> None:
    tables = tables_of([("short", 3, 1, 2), ("a", 30, 1, 8)], [[30], list(range(10, 18))])
    assert tables.choose(torch.zeros(1, 5)).shape == (2, 5)


def test_a_plan_of_random_steps_reads_what_it_says() -> None:
    """Each sparse row: as many tokens as its blocks hold, its newest block last, no block twice, none of another."""
    chance = np.random.default_rng(0)
    planner = Planner(BUDGET)
    for _ in range(100):
        count = int(chance.integers(1, 6))
        lens = chance.integers(1, 60, count)
        rows = [(f"{i}", int(n) - 1, 1, 1) for i, n in enumerate(lens)]
        blocks = [[100 * i + b for b in range(-(-int(n) // 4))] for i, n in enumerate(lens)]
        batch = step(*rows, admitted=[row[0] for row in rows])
        plan = planner.plan(batch, set())
        if plan is None:
            assert (lens <= 20).all()
            continue
        tables = RestrictedTables(plan, metadata(batch, blocks).block_table)
        found = tables.choose(torch.from_numpy(chance.random((len(plan.rows), tables.candidates.shape[1]))))
        for row, n in enumerate(lens.tolist()):
            read = found[row, : -(-int(tables.seq_lens[row]) // 4)].tolist()
            assert read == sorted(set(read))
            assert set(read) <= set(blocks[row])
            assert read[-1] == blocks[row][-1]
            assert read[0] == blocks[row][0]
            assert int(tables.seq_lens[row]) % 4 == n % 4
            assert len(read) == min(5, len(blocks[row]))
