"""A worker's attention in plain torch: `AttentionView` over a cache in rows, and the attention that it restricts.

Imported only where torch is. It stands in for vLLM's layers where a method's own doing is tested; what those do is
tested on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ucm.sparse.attention import StepBatch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Metadata:
    """As much of a backend's metadata as is replaced."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int


@dataclass
class FakeView:
    """Keys in ``[num_blocks, block_size, num_kv_heads, head_size]``, whatever the layer.

    Attributes:
        reads: The block ids that keys were read of, by layer, in order.
        required: The layers that were asked for, with whether their keys will be read.
        unreadable: Layers whose keys cannot be read.
    """

    steps: list[StepBatch] = field(default_factory=list)
    reads: dict[str, list[int]] = field(default_factory=dict)
    required: set[tuple[str, bool]] = field(default_factory=set)
    unreadable: tuple[str, ...] = ()
    engine_required: bool = False

    def batch(self, runner: Any, scheduler_output: Any, input_batch: Any) -> StepBatch:
        del runner, scheduler_output
        self.steps.append(input_batch)
        found: StepBatch = input_batch
        return found

    def require_engine(self) -> None:
        self.engine_required = True

    def require(self, layer_name: str, *, reads_keys: bool = False) -> None:
        self.required.add((layer_name, reads_keys))

    def block_size(self, layer_name: str, kv_cache: torch.Tensor) -> int:
        del layer_name
        return int(kv_cache.shape[2])

    def block_table(self, attn_metadata: Metadata) -> torch.Tensor:
        return attn_metadata.block_table

    def restricted(
        self,
        layer_name: str,
        attn_metadata: Metadata,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
    ) -> Metadata:
        del layer_name
        return replace(attn_metadata, block_table=block_table, seq_lens=seq_lens, max_seq_len=max_seq_len)

    def read_keys(self, layer_name: str, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        if layer_name in self.unreadable:
            raise RuntimeError("no such keys")
        self.reads.setdefault(layer_name, []).extend(block_ids.tolist())
        return kv_cache[0][block_ids]


def step(*rows: tuple[str, int, int, int], admitted: Sequence[str] = ()) -> StepBatch:
    """A step from rows of id, tokens computed before, tokens of the step, and prompt."""
    ids, computed, new, prompt = zip(*rows, strict=True)
    return StepBatch(
        list(ids),
        np.array(new, np.int64),
        np.array(computed, np.int64),
        np.array(prompt, np.int64),
        np.array([i in admitted for i in ids], np.bool_),
    )


def metadata(batch: StepBatch, rows: Sequence[Sequence[int]], width: int | None = None) -> Metadata:
    """The dense metadata of a step, with block ids for each row."""
    width = width or max(len(row) for row in rows)
    table = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int32)
    lens = torch.from_numpy(batch.seq_lens).int()
    return Metadata(table, lens, int(lens.max()))
