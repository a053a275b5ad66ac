"""The worker's part of a blend, and its messages to other ranks, with caches that show what was read."""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from ucm.blend import Chunk
from ucm.config.settings import BlendSettings
from ucm.integration.vllm.blend.scheduler import OF_PIECES, Blend, BlendPlan
from ucm.integration.vllm.blend.worker import BlendWorker, ChunkSaves
from ucm.integration.vllm.connector.metadata import BlockMoves, StepPlan
from ucm.integration.vllm.connector.transfer_worker import TransferWorker
from ucm.integration.vllm.metrics import BLEND_COMPUTED_TOKENS, BLEND_GATE_FAILURES, BLEND_REUSED_TOKENS
from ucm.store.base import BlockGeometry, BlockKey, KVStore, Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from tests.clock import SimulatedClock
    from ucm.blend import Run
    from ucm.integration.vllm.metrics import Metric

pytest_plugins = ("tests.simulated",)

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
#: Keys and values of 64 tokens, in 32 bits each.
PIECE_BYTES = 2 * 64 * 4


@dataclass
class Caches:
    """One layer, in which a token's KV is its id plus the sum of all KV before it; unwritten KV is NaN."""

    kv: Tensor = field(default_factory=lambda: torch.full((len(TOKENS),), torch.nan))
    asked: list[list[int]] = field(default_factory=list)
    names: tuple[str, ...] = ("layer.0",)
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    piece_shape: tuple[int, ...] = (2, 64, 1, 1)
    geometry: BlockGeometry = field(default_factory=lambda: BlockGeometry((PIECE_BYTES,), b"geometry of test"))

    def blocks(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(block_ids))

    def rows(self, runs: Sequence[Run], blocks: Tensor) -> Any:
        del blocks
        return SimpleNamespace(positions=torch.cat([torch.arange(run.start, run.end) for run in runs]))

    def read_free(self, layer: int, blocks: Tensor, positions: Tensor) -> list[Tensor]:
        del layer, blocks
        return [torch.zeros(len(positions), 1, 1) for _ in range(2)]

    def context(self, rows: Any, attn_metadata: Any, *, by_modules: bool = False) -> AbstractContextManager[None]:
        del rows, attn_metadata, by_modules
        return nullcontext()

    def sum_over_ranks(self, counts: Tensor) -> Tensor:
        self.asked.append(counts.tolist())
        return counts

    def model(self, *, input_ids: Tensor, positions: Tensor) -> None:
        """Run a forward; a compiled one takes the dtypes of vLLM's runners, and reads others wrongly."""
        assert (input_ids.dtype, positions.dtype) == (torch.int32, torch.int64)
        for token, place in zip(input_ids.tolist(), positions.tolist(), strict=True):
            self.kv[place] = token + self.kv[:place].sum()


class Counted:
    """Counters that record the stretches' tokens."""

    def __init__(self) -> None:
        self.added: dict[Metric, list[float]] = {}
        self.failures: list[str] = []

    def failed(self, operation: str, cause: str, blocks: int = 1) -> None:
        self.failures += [f"{operation}.{cause}"] * blocks

    def add(self, metric: Metric, value: float = 1, key: str = "") -> None:
        assert key == ""
        assert metric is not BLEND_GATE_FAILURES
        self.added.setdefault(metric, []).append(value)

    @property
    def stretches(self) -> list[tuple[float, float]]:
        """The reused and the computed tokens of each."""
        return list(zip(self.added[BLEND_REUSED_TOKENS], self.added[BLEND_COMPUTED_TOKENS], strict=True))


def blend_of(start: int, unwritten: int, chunks: Sequence[Chunk] = ()) -> Blend:
    places = [[0] for _ in chunks]
    return Blend("r", start, len(TOKENS), TOKENS[unwritten:], [0], list(chunks), places, unwritten)


def filled(caches: Caches, blend: Blend, *, usable: bool = True) -> Counted:
    """Run a step with one blend; return its counters."""
    counted = Counted()
    worker: Any = BlendWorker(caches, caches.model, BlendSettings(), counted, most_tokens=3)  # type: ignore[arg-type]
    worker.blend(BlendPlan([blend], shares=(0,)), {}, usable=usable)
    return counted


def test_a_prefix_that_the_step_has_yet_to_write_is_computed_before_it_is_read() -> None:
    """Otherwise a stretch, filled before the forward, would read the blocks' old content."""
    everything = Caches()
    filled(everything, blend_of(0, 0))
    caches = Caches()
    caches.kv[:2] = everything.kv[:2]
    assert filled(caches, blend_of(4, 2)).stretches == [(0, 4)]  # of the stretch alone
    assert caches.kv.tolist() == everything.kv.tolist()
    assert not caches.kv.isnan().any()


def test_a_rank_whose_weights_have_changed_says_so_to_the_others() -> None:
    """The others wait for its all-reduce: without it they would hang, or use data of the forward instead."""
    chunk = Chunk(0, 6)
    others, changed = Caches(), Caches()
    filled(others, blend_of(0, 0, [chunk]))  # no slab is attached, so it has no part of the chunk either
    filled(changed, blend_of(0, 0, [chunk]), usable=False)
    assert changed.asked == others.asked == [[1]]


def saving(store: Any, counted: Counted, clock: SimulatedClock, room: int = 1 << 20) -> TransferWorker:
    """Return a worker that saves chunks alone."""
    caches = Caches()
    blending: Any = BlendWorker(caches, caches.model, BlendSettings(), counted, most_tokens=3)  # type: ignore[arg-type]
    saves = ChunkSaves(caches, blending, store, room, clock=clock)  # type: ignore[arg-type]
    return TransferWorker({(OF_PIECES, 0): saves}, counted, clock=clock)  # type: ignore[arg-type]


def run(worker: TransferWorker, plan: StepPlan) -> None:
    worker.begin(plan)
    worker.save(plan)


@pytest.mark.parametrize(("epoch", "saves"), [(0, 1), (1, 0)])
def test_a_chunk_is_saved_once_no_rank_has_seen_a_change_of_the_weights(
    clock: SimulatedClock, epoch: int, saves: int
) -> None:
    store, keys = create_autospec(KVStore, instance=True), [BlockKey(bytes(16))]
    store.save.return_value.check.return_value = False
    worker = saving(store, Counted(), clock)
    run(worker, StepPlan(1, saves=[BlockMoves("r", OF_PIECES, keys, [0], [len(TOKENS)], step=1)], confirmed=0))
    run(worker, StepPlan(2, confirmed=0))
    assert store.save.call_count == 0
    worker.begin(StepPlan(3, confirmed=1, epoch=epoch))
    worker.begin(StepPlan(4, confirmed=3, epoch=epoch))
    assert [[block.key for block in call.args[0]] for call in store.save.call_args_list] == [keys] * saves


@pytest.mark.parametrize("call", ["save", "check", "wait"])
def test_a_store_that_raises_ends_no_engine(clock: SimulatedClock, call: str) -> None:
    store, keys = create_autospec(KVStore, instance=True), [BlockKey(bytes(16))]
    task = store.save.return_value = create_autospec(Task, instance=True)
    (store.save if call == "save" else getattr(task, call)).side_effect = OSError("broken")
    counted = Counted()
    worker = saving(store, counted, clock)
    run(worker, StepPlan(1, saves=[BlockMoves("r", OF_PIECES, keys, [0], [len(TOKENS)])]))
    assert store.save.call_count == 1
    run(worker, StepPlan(2))
    assert counted.failures == ["save.other"]


def test_a_chunk_for_which_there_is_no_room_is_not_saved_in_part(clock: SimulatedClock) -> None:
    store, keys = create_autospec(KVStore, instance=True), [BlockKey(bytes(16)), BlockKey(bytes(17))]
    counted = Counted()
    worker = saving(store, counted, clock, PIECE_BYTES)
    run(worker, StepPlan(1, saves=[BlockMoves("r", OF_PIECES, keys, [0], [64, 65])]))
    worker.begin(StepPlan(2))
    assert not store.save.called
    assert (worker.groups[OF_PIECES, 0].room.taken_bytes, counted.failures) == (0, ["save.full"])


# Choosing tokens by the question's attention

LAYERS = 4


class Deep(Caches):
    """Several layers of attention over all tokens before; chunks come out of ``stored``, by their tokens."""

    def __init__(self, prompt: Sequence[int]) -> None:
        names = tuple(f"layer.{number}" for number in range(LAYERS))
        super().__init__(torch.full((LAYERS, len(prompt)), torch.nan), names=names)
        self.prompt = list(prompt)
        #: Of each pass: the positions whose attention each layer computed.
        self.attended: list[list[list[int]]] = []
        #: The attention that a question pays to each token, and the first of its tokens that counts, in each pass.
        self.paid = torch.zeros(len(prompt))
        self.asking: list[int] = []

    def rows(self, runs: Sequence[Run], blocks: Tensor) -> Any:
        rows = super().rows(runs, blocks)
        rows.slots = rows.positions
        return rows

    def slots(self, blocks: Tensor, positions: Tensor) -> Tensor:
        del blocks
        return positions

    def write(self, layer: int, positions: Tensor, slots: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = free
        assert torch.equal(keys, values)
        assert len(positions) == len(keys)
        self.kv[layer, slots] = keys.flatten()
        return keys, values

    def read(self, layer: int, blocks: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        del blocks
        found = self.kv[layer, positions].view(-1, 1, 1)
        return found, found

    @contextmanager
    def attention(self, blocks: Tensor, reach: int, asking: int) -> Iterator[Tensor]:
        del blocks
        self.asking.append(asking)
        yield self.paid[:reach]

    def model(self, *, input_ids: Tensor, positions: Tensor) -> None:
        assert input_ids.tolist() == [self.prompt[place] for place in positions.tolist()]
        hidden = input_ids.float()
        self.attended.append([])
        for layer in range(LAYERS):
            self.kv[layer, positions] = hidden
            self.attended[-1].append(positions.tolist())
            hidden = hidden + torch.stack([self.kv[layer, : place + 1].mean() for place in positions.tolist()])

    def computed(self, tokens: Sequence[int]) -> Tensor:
        """``[LAYERS, tokens]``: the KV of tokens that nothing precedes."""
        alone = Deep(tokens)
        alone.model(input_ids=torch.tensor(tokens, dtype=torch.int32), positions=torch.arange(len(tokens)))
        return alone.kv


class Unreachable(Deep):
    """A model that does not call its layers as modules."""

    @contextmanager
    def attention(self, blocks: Tensor, reach: int, asking: int) -> Iterator[Tensor]:
        del blocks, asking
        yield torch.full((reach,), torch.nan)


def chosen_of(
    caches: Deep,
    chunks: Sequence[Chunk],
    monkeypatch: pytest.MonkeyPatch,
    most_tokens: int = 1000,
    asked: int = 1,
    **settings: Any,
) -> Counted:
    """Fill all but the last ``asked`` tokens of a prompt, by what these attend to; return the counters."""

    def copied(self: BlendWorker, chunk: Chunk, places: Sequence[int], shares: tuple[int, ...]) -> Tensor:
        del self, places, shares
        kv = torch.zeros(2, LAYERS, chunk.pieces * 64)
        kv[..., : chunk.tokens] = caches.computed(caches.prompt[chunk.start : chunk.end])
        return kv.view(2, LAYERS, chunk.pieces, 64, 1, 1).permute(2, 1, 0, 3, 4, 5)

    monkeypatch.setattr(BlendWorker, "_copy", copied)
    counted, end = Counted(), len(caches.prompt) - asked
    using = BlendSettings(select="question", **settings)
    worker: Any = BlendWorker(caches, caches.model, using, counted, most_tokens=most_tokens)  # type: ignore[arg-type]
    blend = Blend("r", 0, end, caches.prompt[:end], [0], list(chunks), [[0]] * len(chunks), 0, caches.prompt[end:])
    worker.blend(BlendPlan([blend], shares=(0,)), {})
    assert not caches.kv[:, :end].isnan().any()
    return counted


def a_prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)  # noqa: S311 - prompts, no secrets
    return [source.randrange(1, 50) for _ in range(length)]


def test_what_the_question_attends_to_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except what is exact already: gaps, edges, and the chunk that begins the prompt."""
    caches = Deep(a_prompt(260))
    caches.paid[[7, 43, 46, 110, 131]] = torch.tensor([0.9, 0.8, 0.7, 0.5, 0.3])
    chunks = [Chunk(0, 40), Chunk(45, 145), Chunk(145, 255)]
    counted = chosen_of(caches, chunks, monkeypatch, asked=10, edge_tokens=4, ratio=0.04)
    first, asked, second = (attended[0] for attended in caches.attended)
    assert first == [20, 39, *range(40, 49), 95, 144, *range(145, 149), 197, 249]
    assert asked == list(range(250, 260))
    # Five tokens of the last chunk are behind the stretch; they ask nothing.
    assert caches.asking == [5]
    # The edge of the second chunk and the gap before it precede all that is chosen, so they are not computed again.
    assert second == [*range(109, 113), *range(129, 133), 144, *range(145, 149), 197, 249]
    ((reused, computed),) = counted.stretches
    assert (reused, computed) == (250 - len(first) - 8, len(first) + 8)


@pytest.mark.parametrize("seed", range(20))
def test_with_all_tokens_asked_about_the_result_is_exact(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(seed)  # noqa: S311 - layouts, no secrets
    length, asked = source.randrange(12, 90), source.randrange(1, 9)
    cuts = sorted(source.sample(range(length - asked + 1), source.randrange(2, 8 if length - asked > 8 else 3)))
    chunks = [Chunk(*pair) for pair in pairwise(cuts) if source.random() < 0.8]
    prompt = a_prompt(length, seed)
    if len(chunks) > 1:  # one chunk twice, as far as there is room for it
        one, other = chunks[0], chunks[-1]
        same = min(one.tokens, other.tokens)
        prompt[other.start : other.start + same] = prompt[one.start : one.start + same]
    caches = Deep(prompt)
    caches.paid = torch.rand(length, generator=torch.Generator().manual_seed(seed))
    edge, most = source.choice([0, 1, 16]), source.choice([1, 7, 64])
    chosen_of(caches, chunks, monkeypatch, most, asked, ratio=1.0, edge_tokens=edge)
    exact = caches.computed(caches.prompt)
    torch.testing.assert_close(caches.kv[:, :-asked], exact[:, :-asked])


def test_a_question_that_cannot_be_seen_leaves_the_edges(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caches = Unreachable(a_prompt(151))
    counted = chosen_of(caches, [Chunk(0, 40), Chunk(45, 150)], monkeypatch, edge_tokens=4)
    assert counted.stretches == [(150 - 2 - 5 - 4 - 2, 2 + 5 + 4 + 2)]
    assert "select: question" in caplog.text


def test_a_step_without_a_question_or_a_share_for_it_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for chunks, ratio in (([Chunk(0, 150)], 0.5), ([Chunk(0, 40), Chunk(45, 150)], 0.0)):
        caches = Deep(a_prompt(151))
        chosen_of(caches, chunks, monkeypatch, ratio=ratio)
        assert not caches.asking
