"""The Triton kernels choose what torch chooses, in a bounded number of launches. They run in Triton's interpreter.

`tests.e2e.test_inside` runs this file, and the tests of the whole method, in a process that interprets kernels.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")
pytest.importorskip("triton", reason="Triton is not installed; the end-to-end session runs these tests")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton interprets no kernels in this process", allow_module_level=True)

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ucm.sparse.fake_view import FakeView, metadata
from tests.ucm.sparse.steps import step
from tests.ucm.sparse.topk.test_block_topk import HEAD, HEADS, LAYERS, LONG, cache, method, run, view_of
from ucm.sparse.topk import kernels
from ucm.sparse.topk.codes import KeyCodes, turn
from ucm.sparse.topk.selection import (
    BlockBudget,
    RestrictedTables,
    SelectionPlan,
    SelectionPlanner,
    StepOnDevice,
    kernels_serve,
    step_tables,
)

if TYPE_CHECKING:
    from collections.abc import Callable


class Case:
    """A step of random requests: long and short decodes, chunks of prompts, budgets of their own, and padding."""

    def __init__(self, seed: int, size: int, group: int, head: int, dtype: torch.dtype = torch.float32) -> None:
        source, draw = torch.Generator().manual_seed(seed), random.Random(seed)  # noqa: S311 - no secret
        budget = BlockBudget(size, sinks=1, recent=2, total=8)
        planner = SelectionPlanner(budget)
        rows: list[Any] = [
            ("long", 20 * size + 3, 1, 5),
            ("short", 3 * size, 1, 2),
            ("chunk", size, 2 * size, 9 * size),
        ]
        for number in range(3):
            computed = draw.randrange(9 * size, 24 * size)
            rows.append((f"{number}", computed, 1, 7))
            if number:
                planner.give(f"{number}", BlockBudget(size, 1, 2, draw.randrange(4, 9)))
        draw.shuffle(rows)
        self.step = step(*rows)
        plan = planner.plan(self.step, set())
        assert plan is not None
        self.plan: SelectionPlan = plan
        blocks = -(-self.step.seq_lens // size)
        self.num_blocks, self.heads = int(blocks.sum()) + 3, 2 * group
        free = torch.randperm(self.num_blocks, generator=source).int()
        self.table = torch.zeros((len(rows) + 2, int(blocks.max()) + 5), dtype=torch.int32)  # padding behind both
        for row, count in enumerate(blocks.tolist()):
            self.table[row, :count], free = free[:count], free[count:]
        self.keys = torch.randn((self.num_blocks, size, 2, head), generator=source).to(dtype)
        tokens = int(self.step.num_new_tokens.sum())
        # A part of what a layer computes, as vLLM gives it.
        self.query = torch.randn((tokens, self.heads + 3, head), generator=source).to(dtype)[:, : self.heads]

    def made(self, heads: slice = slice(None)) -> KeyCodes:
        made = KeyCodes(self.num_blocks, self.keys[:1, :, heads])
        made.put(torch.arange(self.num_blocks), self.keys[:, :, heads])
        return made

    def rows_of(self, table: torch.Tensor) -> list[list[int]]:
        """What each row reads."""
        counts = -(-self.plan.seq_lens // self.plan.budget.block_size)
        return [table[row, :count].tolist() for row, count in enumerate(counts.tolist())]


def alone(counts: torch.Tensor) -> torch.Tensor:
    return counts


CASES = [
    *(
        (seed, size, group, 64, torch.float32)
        for seed, (size, group) in enumerate([(16, 1), (16, 4), (32, 3), (128, 2)])
    ),
    *((seed, 16, 2, 80, torch.float32) for seed in (10, 11)),
    *((seed, 32, 4, 64, torch.bfloat16) for seed in (20, 21)),
    (30, 16, 1, 128, torch.float16),
]


@pytest.mark.parametrize("given", CASES, ids=str)
def test_kernels_choose_what_torch_chooses(given: Any) -> None:
    case = Case(*given)
    made = case.made()
    chosen = StepOnDevice(case.plan, case.table).select(made, case.query, alone)[0]
    wanted = RestrictedTables(case.plan, case.table).select(made, case.query, alone)[0]
    assert case.rows_of(chosen) == case.rows_of(wanted)


def laid_out(keys: torch.Tensor, layout: str) -> torch.Tensor:
    """The same keys as a backend's cache has them: plain, ordered by head, or as halves of heads with the values."""
    if layout == "plain":
        return keys
    by_head = keys.transpose(1, 2).contiguous()
    whole = torch.cat((by_head, torch.full_like(by_head, 7.0)), -1) if layout == "halves" else by_head
    return whole.transpose(1, 2)[..., : keys.shape[-1]]


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        *((given, "plain") for given in (*CASES, (40, 4, 1, 8, torch.float32), (41, 16, 1, 192, torch.float32))),
        *((CASES[4], layout) for layout in ("by head", "halves")),
    ],
    ids=str,
)
def test_kernels_make_what_torch_makes(given: Any, layout: str) -> None:
    """Nearly all bits of codes, because sums have another order."""
    case = Case(*given)
    ids = torch.tensor([9, 2, case.num_blocks - 1, 4, 0])  # others are left as they are
    case.keys[2] = 1.0  # all keys of a block alike: nothing is beyond their mean
    keys = laid_out(case.keys, layout)
    codes, other = KeyCodes(case.num_blocks, keys[:1]), KeyCodes(case.num_blocks, keys[:1])
    for made in (codes, other):
        for tensor in (made._codes, made._scales, made._means):
            tensor.fill_(5)
    codes.update_in_place(ids, keys)
    other.put(ids, case.keys[ids])
    apart = (codes._codes ^ other._codes)[..., None] >> torch.arange(64) & 1
    assert float(apart.float().mean()) < 0.01
    torch.testing.assert_close(codes._means, other._means, rtol=0.01, atol=0.01)
    torch.testing.assert_close(codes._scales, other._scales, rtol=0.01, atol=0.01)


def test_with_keys_that_are_no_numbers_a_request_reads_its_own_blocks() -> None:
    """With one head, whose shares are then all NaN."""
    case = Case(3, 16, 1, 64)
    case.keys[:, 0, 0, 0] = float("nan")
    made, query = case.made(slice(1)), case.query[:, :1]
    chosen = StepOnDevice(case.plan, case.table).select(made, query, alone)[0]
    wanted = RestrictedTables(case.plan, case.table).select(made, query, alone)[0]
    assert case.rows_of(chosen) == case.rows_of(wanted)


@pytest.mark.parametrize("seed", range(6))
def test_from_the_same_shares_exactly_the_same_is_chosen(seed: int) -> None:
    """Few different shares, so there are many ties, and shares of the size that many heads have."""
    case = Case(seed, 16, 1, 64)
    tables = StepOnDevice(case.plan, case.table)
    torch_tables = RestrictedTables(case.plan, case.table)
    counts = case.plan.blocks - 3
    source = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 4, (len(counts), int(counts.max())), generator=source)
    drawn *= torch.tensor([1, 2**41])[seed % 2]
    ragged = torch.cat([row[:count] for row, count in zip(drawn, counts.tolist(), strict=True)])
    chosen = tables.select(case.made(), case.query, lambda _: ragged)[0]
    assert case.rows_of(chosen) == case.rows_of(torch_tables.choose(drawn)[0])


def test_more_candidates_than_a_program_looks_at_once() -> None:
    """Several chunks are scored, and several spans are searched; one chunk and one span would be easier."""
    blocks = int(kernels.SPAN.value) * 2 + 17
    plan = SelectionPlanner(BlockBudget(4, 1, 2, 40)).plan(step(("a", 4 * blocks - 1, 1, 9)), set())
    assert plan is not None
    source = torch.Generator().manual_seed(0)
    keys = torch.randn((blocks, 4, 1, 16), generator=source)
    made = KeyCodes(blocks, keys[:1])
    made.put(torch.arange(blocks), keys)
    table, query = torch.randperm(blocks, generator=source).int()[None], torch.randn((1, 2, 16), generator=source)
    chosen = StepOnDevice(plan, table).select(made, query, alone)[0]
    assert chosen.tolist() == RestrictedTables(plan, table).select(made, query, alone)[0].tolist()


def test_the_sum_over_ranks_is_what_one_rank_finds() -> None:
    """The heads of each rank add the shares that they add on one rank, to the last bit."""
    case = Case(5, 16, 2, 64)
    found: list[torch.Tensor] = []

    def keep(counts: torch.Tensor) -> torch.Tensor:
        found.append(counts.clone())
        return counts

    for heads, made in ((slice(0, 4), slice(None)), (slice(0, 2), slice(0, 1)), (slice(2, 4), slice(1, 2))):
        tables = StepOnDevice(case.plan, case.table)
        tables.select(case.made(made), case.query[:, heads], keep)
    whole, first, second = found
    assert torch.equal(whole, first + second)
    assert whole.any()


def test_a_layer_finds_nothing_of_the_one_before() -> None:
    case = Case(0, 16, 1, 64)
    tables, made = StepOnDevice(case.plan, case.table), case.made()
    first, second = (tables.select(made, case.query, alone)[0] for _ in range(2))
    assert case.rows_of(first) == case.rows_of(second)
    assert tables._done is not None
    assert not tables._done.any()
    assert not tables._shares.any()


def test_what_the_kernels_do_not_serve_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = SelectionPlanner(BlockBudget(4, 1, 2, 5)).plan(step(("a", 30, 1, 8)), set())
    again = SelectionPlanner(BlockBudget(4, 1, 2, 5)).plan(step(("a", 28, 4, 8)), set())
    odd = SelectionPlanner(BlockBudget(6, 1, 2, 5)).plan(step(("a", 60, 1, 8)), set())
    assert plan is not None
    assert again is not None
    assert odd is not None
    table = torch.arange(20, dtype=torch.int32)[None]
    assert isinstance(step_tables(plan, table), StepOnDevice)
    some = SelectionPlanner(BlockBudget(4, 1, 2, 5, top_p=0.9)).plan(step(("a", 30, 1, 8)), set())
    assert some is not None
    for of in (again, odd, some):
        assert isinstance(step_tables(of, table), RestrictedTables)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert isinstance(step_tables(plan, table), RestrictedTables)


def test_a_cpu_has_kernels_only_to_interpret_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_serve(torch.device("cpu"))
    monkeypatch.delenv("TRITON_INTERPRET")
    assert not kernels_serve(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert kernels_serve(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert not kernels_serve(torch.device("cuda"))


#: Operations of torch that launch nothing: they make views, allocate, or ask for sizes.
VIEWS = {"view", "slice", "select", "unsqueeze", "as_strided", "detach", "alias", "_unsafe_view", "expand", "permute"}
#: Tensors that are only allocated, or are numpy's.
ALLOCATIONS = {"empty", "new_empty", "lift_fresh"}


class Launches(TorchDispatchMode):  # type: ignore[misc] # torch is not there when types are checked
    """Counts what would be launched on a GPU: every operation of torch that is not a view, and every kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS | ALLOCATIONS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class TwoRanks(FakeView):
    @property
    def ranks(self) -> int:
        return 2

    def sum_over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        return counts.mul_(2)  # one launch, in place, as an all-reduce


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Launches]:
    """Return a function that gives a fresh counter, which the kernels tell of their launches instead of running."""
    counters = [Launches()]

    def counted(kernel: Any, name: str) -> Any:
        class Grid:
            def __getitem__(self, grid: Any) -> Any:
                def launch(*args: Any, **constants: Any) -> None:
                    counters[-1].found[name] += 1
                    with torch.utils._python_dispatch._disable_current_modes():
                        kernel[grid](*args, **constants)

                return launch

        return Grid()

    for name in ("make_codes", "score_codes", "choose"):
        monkeypatch.setattr(kernels, name, counted(getattr(kernels, name), name))

    def fresh() -> Launches:
        counters.append(Launches())
        return counters[-1]

    return fresh


@pytest.mark.parametrize("requests", [1, 5])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restricted_layer_has_at_most_four_launches(
    launches: Callable[[], Launches], requests: int, ranks: int
) -> None:
    """Score, choose, vLLM's attention, and the all-reduce if there are several ranks; for any number of requests."""
    made, kv = method(), cache()
    if ranks > 1:
        made.attention = TwoRanks()
    tables = [*([LONG] * requests), [30], [31, 32, 33]]
    for computed in (28, 29):  # the second makes what the first completes
        before = step(*((f"{n}", computed, 1, 8) for n in range(requests)), ("short", 2, 1, 2), ("chunk", 0, 5, 30))
        run(made, before, metadata(before, tables), kv)
    batch = step(*((f"{n}", 30, 1, 8) for n in range(requests)), ("short", 3, 1, 2), ("chunk", 5, 2, 30))
    query = torch.ones((int(batch.num_new_tokens.sum()), HEADS, HEAD))
    dense = metadata(batch, tables)
    made.execute_begin(None, None, batch)
    made.attention_begin(LAYERS[1], query, query, query, kv, dense)  # it prepares the step for all layers
    counter = launches()
    with counter:
        _, _, _, restricted = made.attention_begin(LAYERS[2], query, query, query, kv, dense)
        made.attention_finished(LAYERS[2], query, kv, restricted, query)
    assert counter.found == {"score_codes": 1, "choose": 1, **({"mul_": 1} if ranks > 1 else {})}
    assert counter.found.total() + 1 <= 4  # and vLLM's attention
    assert restricted is not dense
    assert restricted.block_table[:requests, 0].tolist() == [10] * requests


@pytest.mark.parametrize("requests", [1, 5])
def test_a_first_sparse_step_has_at_most_four_launches_per_layer(
    launches: Callable[[], Launches], requests: int
) -> None:
    """A layer makes the summaries of all blocks of all requests in one launch, also in the engine's first such step.

    The step has a constant more, whatever the number of layers and requests: the plan, its memory, and which blocks.
    Following steps have one launch less per layer, unless they complete blocks or get candidates.
    """
    made, kv = method(), cache()
    view_of(made).in_place = True
    turn(HEAD, torch.device("cpu"))  # computed on the host, once in a process
    tables = [LONG] * requests

    def total(computed: int) -> Counter[str]:
        batch = step(*((f"{n}", computed, 1, 8) for n in range(requests)))
        query, dense = torch.ones((requests, HEADS, HEAD)), metadata(batch, tables)
        made.execute_begin(None, None, batch)
        per_layer: list[Counter[str]] = []
        for name in LAYERS:
            with launches() as counter:
                _, _, _, used = made.attention_begin(name, query, query, query, kv, dense)
                made.attention_finished(name, query, kv, used, query)
            per_layer.append(counter.found)
        made.execute_finished(None, None, None)
        dense_layer, first, second = per_layer
        assert not dense_layer
        assert (first - second).total() <= 8
        assert second.total() + 1 <= 4  # and vLLM's attention
        assert first >= second
        return second

    chosen = {"score_codes": 1, "choose": 1}
    assert run(made, step(("0", 17, 2, 8)), metadata(step(("0", 17, 2, 8)), [LONG]), kv)  # fits: nothing is made
    assert not made.counts
    assert total(27) == {"make_codes": 1, **chosen}  # which also completes a block
    assert total(28) == {"make_codes": 1, **chosen}
    assert total(29) == total(30) == chosen
    assert not made.counts["failures"]


def test_a_method_reads_the_same_with_summaries_by_kernels_and_by_torch() -> None:
    """A prompt in chunks, then decodes over the ends of blocks; the keys differ clearly."""
    found = []
    for in_place in (False, True):
        made, kv = method(), cache(3)
        view_of(made).in_place = in_place
        read = []
        for computed, new in ((0, 14), (14, 10), (24, 2), *((26 + n, 1) for n in range(6))):
            batch = step(("a", computed, new, 26))
            query = torch.randn((new, HEADS, HEAD), generator=torch.Generator().manual_seed(computed))
            read += [of.block_table.tolist() for of in run(made, batch, metadata(batch, [LONG]), kv, query)]
        assert made.counts["rows"] > 0
        assert not made.counts["failures"]
        assert bool(view_of(made).reads) != in_place
        found.append(read)
    assert found[0] == found[1]


def test_the_counter_counts_what_torch_would_launch(launches: Callable[[], Launches]) -> None:
    """With torch alone, a layer has more launches than that."""
    case = Case(0, 16, 4, 64)
    tables, made, counter = RestrictedTables(case.plan, case.table), case.made(), launches()
    with counter:
        tables.select(made, case.query, alone)[0]
    assert counter.found.total() >= 15
