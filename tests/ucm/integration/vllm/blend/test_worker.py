"""The worker's part of a blend, and its messages to other ranks, with caches that show what was read."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from ucm.blend import Chunk
from ucm.config.settings import BlendSettings
from ucm.integration.vllm.blend.scheduler import Blend, BlendPlan, ChunkSave
from ucm.integration.vllm.blend.worker import BlendWorker
from ucm.integration.vllm.connector.metadata import StepPlan
from ucm.store.base import BlockKey, KVStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from ucm.blend import Run

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@dataclass
class Caches:
    """One layer, in which a token's KV is its id plus the sum of all KV before it; unwritten KV is NaN."""

    kv: Tensor = field(default_factory=lambda: torch.full((len(TOKENS),), torch.nan))
    asked: list[list[int]] = field(default_factory=list)
    names: tuple[str, ...] = ("layer.0",)
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    piece_shape: tuple[int, ...] = (2, 64, 1, 1)

    def blocks(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(block_ids))

    def rows(self, runs: Sequence[Run], blocks: Tensor) -> Any:
        del blocks
        return SimpleNamespace(positions=torch.cat([torch.arange(run.start, run.end) for run in runs]))

    def read_free(self, layer: int, blocks: Tensor, positions: Tensor) -> list[Tensor]:
        del layer, blocks
        return [torch.zeros(len(positions), 1, 1) for _ in range(2)]

    def context(self, rows: Any, attn_metadata: Any) -> AbstractContextManager[None]:
        del rows, attn_metadata
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
        self.stretches: list[tuple[int, int]] = []

    def blended(self, reused: int, computed: int) -> None:
        self.stretches.append((reused, computed))

    def gate_failed(self, chunks: int) -> None:
        raise AssertionError(chunks)

    def chunk_saved(self, tokens: int) -> None:
        assert tokens == len(TOKENS)


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


@pytest.mark.parametrize(("epoch", "outcome"), [(0, "commit"), (1, "discard")])
def test_a_chunk_is_visible_once_no_rank_has_seen_a_change_of_the_weights(epoch: int, outcome: str) -> None:
    caches, store, keys = Caches(), create_autospec(KVStore, instance=True), [BlockKey(bytes(16))]
    store.check.return_value = True
    store.wait.return_value.failed = {}
    worker: Any = BlendWorker(caches, caches.model, BlendSettings(), Counted(), most_tokens=3)  # type: ignore[arg-type]
    for step in (1, 2):
        plan = BlendPlan(saves=[ChunkSave(keys, len(TOKENS), [0])] if step == 1 else [])
        worker.begin(StepPlan(step, confirmed=0), plan, store)
        worker.save(plan)
    assert (store.save.call_count, store.commit.call_count) == (1, 0)
    worker.begin(StepPlan(3, confirmed=1, epoch=epoch), BlendPlan(), store)
    told = {"commit": store.commit, "discard": store.discard}
    told.pop(outcome).assert_called_once_with(keys)
    told.popitem()[1].assert_not_called()
