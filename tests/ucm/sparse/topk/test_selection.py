"""Sparse rows, missing representatives, and the blocks that a row reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from tests.ucm.sparse.fake_view import metadata
from tests.ucm.sparse.steps import step
from ucm.errors import SparseMethodError
from ucm.sparse.topk import selection
from ucm.sparse.topk.selection import (
    BlockBudget,
    MissingBlocks,
    RestrictedTables,
    SelectionPlan,
    SelectionPlanner,
)

#: Blocks of 4 tokens: 1 sink, 2 recent (one whole, one with the newest token), 2 to choose.
BUDGET = BlockBudget(block_size=4, sinks=1, recent=2, total=5)


def plan_of(
    planner: SelectionPlanner, *rows: Any, excluded: set[str] | None = None, admitted: Any = ()
) -> SelectionPlan | None:
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
    plan = plan_of(SelectionPlanner(BUDGET), *rows)
    assert plan is not None
    assert plan.rows.tolist() == [0]
    assert plan.tokens.tolist() == [0]
    assert plan.blocks.tolist() == [7]
    assert plan.seq_lens.tolist() == [18, 8, 20, 30, 40]


def test_queries_are_found_behind_chunks() -> None:
    plan = plan_of(
        SelectionPlanner(BUDGET), ("chunk", 0, 6, 60), ("a", 25, 1, 8), ("chunk 2", 0, 3, 60), ("b", 40, 1, 8)
    )
    assert plan is not None
    assert plan.tokens.tolist() == [6, 10]


def test_without_sparse_rows_there_is_no_plan() -> None:
    assert plan_of(SelectionPlanner(BUDGET), ("short", 19, 1, 4), ("chunk", 24, 6, 60)) is None


def test_excluded_rows_are_dense() -> None:
    plan = plan_of(SelectionPlanner(BUDGET), ("a", 25, 1, 8), ("b", 25, 1, 8), excluded={"a"})
    assert plan is not None
    assert plan.rows.tolist() == [1]
    assert plan_of(SelectionPlanner(BUDGET), ("a", 25, 1, 8), excluded={"a"}) is None


def missing(planner: SelectionPlanner, *rows: Any, admitted: Any = ()) -> list[tuple[str, int, int, int]]:
    """Requests, rows, and ranges of blocks."""
    found = planner.missing(step(*rows, admitted=admitted), {"dense"})
    if found is None:
        return []
    return list(zip(found.request_ids, *(of.tolist() for of in (found.rows, found.begins, found.ends)), strict=True))


def test_a_block_gets_its_representative_once_and_before_the_first_step_that_follows_it() -> None:
    """Except blocks of sinks, of prompts that fit, and of dense requests."""
    planner = SelectionPlanner(BUDGET)
    first = ("fits", 0, 20, 20), ("long", 9, 6, 40), ("dense", 20, 20, 60)
    assert missing(planner, *first, admitted=["long"]) == [("long", 1, 1, 2)]
    assert missing(planner, ("long", 15, 6, 40), ("fits", 20, 1, 20)) == [("long", 0, 2, 3), ("fits", 1, 1, 5)]
    assert missing(planner, ("long", 21, 19, 40)) == [("long", 0, 3, 5)]
    assert missing(planner, ("long", 40, 1, 40)) == [("long", 0, 5, 10)]
    assert missing(planner, ("long", 43, 1, 40)) == []
    assert missing(planner, ("long", 44, 1, 40)) == [("long", 0, 10, 11)]


def test_admitted_anew_a_request_starts_again() -> None:
    planner = SelectionPlanner(BUDGET)
    assert missing(planner, ("a", 24, 1, 8)) == [("a", 0, 1, 6)]
    assert missing(planner, ("a", 16, 9, 25), admitted=["a"]) == [("a", 0, 1, 4)]
    assert missing(planner, ("a", 0, 9, 8), admitted=["a"]) == []
    assert missing(planner, ("a", 26, 1, 8)) == [("a", 0, 1, 6)]


def test_set_back_it_starts_again_where_it_is_computed_anew() -> None:
    planner = SelectionPlanner(BUDGET)
    missing(planner, ("a", 40, 1, 8))
    assert missing(planner, ("a", 13, 28, 41)) == []
    assert missing(planner, ("a", 41, 1, 8)) == [("a", 0, 3, 10)]


def test_a_block_whose_drafts_were_rejected_gets_its_representative_when_it_is_full() -> None:
    """A step verifies four drafts, which fill a block, and only the first of them is right."""
    planner = SelectionPlanner(BUDGET)
    assert missing(planner, ("a", 37, 5, 8)) == [("a", 0, 1, 9)]
    assert missing(planner, ("a", 39, 5, 8)) == []
    assert missing(planner, ("a", 44, 1, 8)) == [("a", 0, 9, 11)]


def test_an_ended_request_is_forgotten() -> None:
    planner = SelectionPlanner(BUDGET)
    missing(planner, ("a", 24, 1, 8))
    planner.forget("a")
    planner.forget("never seen")
    assert missing(planner, ("a", 24, 1, 8)) == [("a", 0, 1, 6)]


def test_ids_of_missing_blocks() -> None:
    table = torch.tensor([[3, 4, 5, 0], [9, 8, 7, 6]], dtype=torch.int32)
    ids = MissingBlocks(["a", "b"], np.array([1, 0]), np.array([1, 2]), np.array([3, 3])).ids(table)
    assert (ids.tolist(), ids.dtype) == ([8, 7, 5], torch.int64)


def tables_of(rows: list[Any], blocks: list[list[int]], width: int | None = None) -> RestrictedTables:
    batch = step(*rows)
    plan = SelectionPlanner(BUDGET).plan(batch, set())
    assert plan is not None
    return RestrictedTables(plan, metadata(batch, blocks, width).block_table)


def test_a_table_has_sinks_the_best_and_the_recent_blocks_in_order() -> None:
    tables = tables_of([("a", 30, 1, 8)], [[10, 11, 12, 13, 14, 15, 16, 17]])
    assert tables.candidates.tolist() == [[11, 12, 13, 14, 15]]
    assert tables.choose(torch.tensor([[1, 9, 2, 3, 8]])).tolist() == [[10, 12, 15, 16, 17]]
    assert tables.choose(torch.tensor([[50, 9, 40, 3, 8]])).tolist() == [[10, 11, 13, 16, 17]]
    assert tables.seq_lens.tolist() == [19]
    assert tables.longest == 19


def test_candidates_beyond_a_shorter_row_are_never_chosen() -> None:
    rows = [("a", 34, 1, 8), ("b", 21, 1, 8)]
    tables = tables_of(rows, [[10, 11, 12, 13, 14, 15, 16, 17, 18], [20, 21, 22, 23, 24, 25]])
    assert tables.candidates.shape == (2, 6)
    found = tables.choose(torch.tensor([[0, 0, 0, 0, 8, 9], [0, 1, 0, 7, 8, 9]]))
    assert found.tolist() == [[10, 15, 16, 17, 18], [20, 22, 23, 24, 25]]


def test_of_blocks_that_are_wanted_alike_the_later_ones_are_read() -> None:
    tables = tables_of([("a", 30, 1, 8)], [[10, 11, 12, 13, 14, 15, 16, 17]])
    assert tables.choose(torch.tensor([[3, 7, 3, 3, 3]])).tolist() == [[10, 12, 15, 16, 17]]
    assert tables.choose(torch.zeros(1, 5, dtype=torch.int64)).tolist() == [[10, 14, 15, 16, 17]]


def test_generated_tokens_that_are_computed_at_once_each_choose_for_themselves() -> None:
    """As after a preemption; short contexts are dense."""
    rows = [("a", 30, 1, 8), ("back", 18, 5, 14)]
    batch = step(*rows)
    plan = SelectionPlanner(BUDGET).plan(batch, set())
    assert plan is not None
    tables = RestrictedTables(plan, metadata(batch, [list(range(10, 18)), list(range(20, 28))]).block_table)
    assert list(zip(plan.pieces.rows, plan.pieces.begins, plan.pieces.ends, strict=True)) == [
        (0, 30, 31),
        (1, 18, 20),
        *((1, position, position + 1) for position in range(20, 23)),
    ]
    assert plan.rows.tolist() == [0, *range(2, 5)]
    assert plan.tokens.tolist() == [0, *range(3, 6)]
    assert plan.request_ids == ("a", *["back"] * 3)
    assert tables.split is not None
    assert tables.split.starts.tolist() == [0, 1, *range(3, 7)]
    assert tables.split.longest == 2
    found = tables.choose(torch.zeros(4, 5, dtype=torch.int64))
    assert found[1].tolist()[:5] == [20, 21, 22, 23, 24]
    assert found[2].tolist()[:5] == [20, 22, 23, 24, 25]
    assert tables.seq_lens.tolist()[1:4] == [20, 17, 18]


def test_no_token_chooses_among_blocks_that_its_own_step_completes() -> None:
    """The scheduler's side sees to it; a step of which it was not told is no dense one."""
    planner = SelectionPlanner(BUDGET)
    assert planner.plan(step(("a", 19, 5, 8)), set()) is not None
    with pytest.raises(SparseMethodError, match="more tokens of an answer") as caught:
        planner.plan(step(("a", 19, 6, 8)), set())
    assert "limit_new_tokens" in caught.value.where


def test_dense_rows_keep_their_whole_row_and_rows_of_a_graph_are_left_out() -> None:
    rows = [("chunk", 24, 6, 60), ("a", 30, 1, 8), ("short", 3, 1, 2)]
    tables = tables_of(rows, [list(range(40, 48)), list(range(10, 18)), [30], [0], [0]], width=20)
    found = tables.choose(torch.tensor([[1, 9, 2, 3, 8]]))
    assert [found[0].tolist(), found[1, :5].tolist(), found[2, 0]] == [list(range(40, 48)), [10, 12, 15, 16, 17], 30]
    assert found.dtype == torch.int32
    assert tables.seq_lens.tolist() == [30, 19, 4]


def test_shorter_dense_rows_make_room_for_the_budget() -> None:
    tables = tables_of([("short", 3, 1, 2), ("a", 30, 1, 8)], [[30], list(range(10, 18))])
    assert tables.choose(torch.zeros(1, 5, dtype=torch.int64)).shape == (2, 5)


def test_a_plan_of_random_steps_reads_what_it_says() -> None:
    """Each sparse row has the tokens of its blocks, its newest block last, no block twice, and no other request's."""
    chance = np.random.default_rng(0)
    planner = SelectionPlanner(BUDGET)
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
        scores = torch.from_numpy(chance.integers(0, 99, (len(plan.rows), tables.candidates.shape[1])))
        found = tables.choose(scores)
        for row, n in enumerate(lens.tolist()):
            read = found[row, : -(-int(tables.seq_lens[row]) // 4)].tolist()
            assert read == sorted(set(read))
            assert set(read) <= set(blocks[row])
            assert read[-1] == blocks[row][-1]
            assert read[0] == blocks[row][0]
            assert int(tables.seq_lens[row]) % 4 == n % 4
            assert len(read) == min(5, len(blocks[row]))


def test_below_the_least_context_all_is_dense() -> None:
    """By a token's position alone, even if several are computed at once."""
    planner = SelectionPlanner(BUDGET, min_context=31)
    assert plan_of(planner, ("a", 29, 1, 8)) is None
    assert missing(planner, ("a", 29, 1, 8)) == []
    plan = plan_of(planner, ("a", 30, 1, 8), ("short", 25, 1, 4))
    assert plan is not None
    assert plan.rows.tolist() == [0]
    plan = plan_of(SelectionPlanner(BUDGET, min_context=31), ("back", 28, 5, 14))
    assert plan is not None
    assert plan.pieces.ends[plan.rows].tolist() == [31, 32, 33]
    assert plan_of(SelectionPlanner(BUDGET, min_context=5), ("a", 19, 1, 8)) is None, "the budget holds as well"


def test_a_request_that_could_leave_out_too_little_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tokens more than five blocks of four, or than the request's own six."""
    monkeypatch.setattr(selection, "WORTHWHILE", 10)
    planner = SelectionPlanner(BUDGET, None)
    planner.give("own", BlockBudget(4, 1, 2, 6))
    rows = [("less", 28, 1, 8), ("enough", 29, 1, 8), ("own", 32, 1, 8)]
    plan = plan_of(planner, *rows)
    assert plan is not None
    assert plan.request_ids == ("enough",)
    assert [request_id for request_id, *_ in missing(planner, *rows)] == ["enough"]
    plan = plan_of(planner, ("own", 33, 1, 8))
    assert plan is not None
    assert plan.totals.tolist() == [6]


def test_a_request_may_have_a_budget_of_its_own() -> None:
    planner = SelectionPlanner(BUDGET)
    planner.give("a", BlockBudget(4, 1, 2, 7))
    planner.give("b", BlockBudget(4, 1, 2, 4))
    rows = [("a", 25, 1, 8), ("b", 17, 1, 8), ("c", 25, 1, 8), ("d", 17, 1, 8)]
    plan = plan_of(planner, *rows)
    assert plan is not None
    assert (plan.rows.tolist(), plan.totals.tolist()) == ([1, 2], [4, 5])
    assert plan.seq_lens.tolist() == [26, 14, 18, 18]
    assert [request_id for request_id, *_ in missing(planner, *rows)] == ["b", "c"]
    planner.forget("b")
    plan = plan_of(planner, *rows)
    assert plan is not None
    assert plan.totals.tolist() == [5]


def test_rows_with_different_budgets_read_what_each_reads_alone() -> None:
    """In random steps, with rows of different lengths."""
    chance = np.random.default_rng(7)
    for _ in range(50):
        rows, totals, ids = [], {}, iter(range(10, 10_000))
        for number in range(int(chance.integers(2, 6))):
            totals[f"{number}"] = int(chance.integers(4, 9))
            rows.append((f"{number}", 4 * totals[f"{number}"] + int(chance.integers(0, 30)), 1, 3))
        blocks = [[next(ids) for _ in range(-(-(row[1] + 1) // 4))] for row in rows]
        wanted = [torch.from_numpy(chance.integers(0, 9, len(row) - 3)) for row in blocks]

        def chosen(places: list[int], rows: Any, totals: Any, blocks: Any, wanted: Any) -> list[list[int]]:
            planner = SelectionPlanner(BUDGET)
            for request_id, total in totals.items():
                planner.give(request_id, BlockBudget(4, 1, 2, total))
            batch = step(*(rows[place] for place in places))
            plan = planner.plan(batch, set())
            assert plan is not None
            tables = RestrictedTables(plan, metadata(batch, [blocks[place] for place in places]).block_table)
            scores = torch.zeros(tables.candidates.shape, dtype=torch.int64)
            for row, place in enumerate(places):
                scores[row, : len(wanted[place])] = wanted[place]
            table = tables.choose(scores)
            assert table.max() < 10_000
            return [table[row, : -(-int(length) // 4)].tolist() for row, length in enumerate(plan.seq_lens)]

        together = chosen(list(range(len(rows))), rows, totals, blocks, wanted)
        alone = [chosen([place], rows, totals, blocks, wanted)[0] for place in range(len(rows))]
        assert together == alone
        assert [len(row) for row in together] == list(totals.values())


def test_a_share_of_the_context_is_read_where_it_is_more() -> None:
    """Half of 7, 12 and 21 blocks; of its own request, a quarter; at any length something is left out."""
    planner = SelectionPlanner(BlockBudget(4, 1, 2, 5, share=0.5))
    planner.give("own", BlockBudget(4, 1, 2, 5, share=0.25))
    planner.give("tokens", BlockBudget(4, 1, 2, 6))
    rows = [("a", 25, 1, 8), ("b", 45, 1, 8), ("c", 81, 1, 8), ("own", 95, 1, 8), ("tokens", 95, 1, 8), ("d", 19, 1, 8)]
    plan = plan_of(planner, *rows)
    assert plan is not None
    assert plan.totals.tolist() == [5, 6, 10, 6, 6]
    assert plan.seq_lens.tolist() == [18, 22, 38, 24, 24, 20]


def test_a_share_depends_on_the_position_alone() -> None:
    """Tokens that a step computes again after a preemption read what each read before."""
    budget = BlockBudget(4, 1, 2, 5, share=0.5)
    again = [plan_of(SelectionPlanner(budget), ("a", 30 + 5 * number, 5, 20)) for number in range(8)]
    each = [plan_of(SelectionPlanner(budget), ("a", 30 + number, 1, 20)) for number in range(40)]
    totals = [total for plan in again if plan is not None for total in plan.totals.tolist()]
    assert totals == [int(plan.totals[0]) for plan in each if plan is not None]
    assert len(set(totals)) > 1
