"""A worker's attention in plain torch: `AttentionView` over a cache in rows, and the attention that it restricts.

Imported only if torch is installed. It replaces vLLM's layers in tests of a method's own logic; other tests
cover the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.sparse.attention import QuerySplit, StepBatch


@dataclass(frozen=True)
class Metadata:
    """The fields of a backend's metadata that are replaced."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    split: QuerySplit | None = None


@dataclass
class FakeView:
    """Keys in ``[num_blocks, block_size, num_kv_heads, head_size]``, whatever the layer.

    Attributes:
        reads: The ids of blocks whose keys were read, by layer, in order.
        required: The required layers, with whether their keys will be read.
        unreadable: Layers whose keys cannot be read.
        windowed: Layers with a sliding window of their own.
        bound: The KV cache of all layers, once it is allocated.
    """

    steps: list[StepBatch] = field(default_factory=list)
    reads: dict[str, list[int]] = field(default_factory=dict)
    required: set[tuple[str, bool]] = field(default_factory=set)
    unreadable: tuple[str, ...] = ()
    windowed: tuple[str, ...] = ()
    engine_required: bool = False
    bound: torch.Tensor | None = None

    def batch(self, runner: Any, scheduler_output: Any, input_batch: Any) -> StepBatch:
        del runner, scheduler_output
        self.steps.append(input_batch)
        found: StepBatch = input_batch
        return found

    @property
    def ranks(self) -> int:
        return 1

    def sum_over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        return counts

    def require_engine(self, *, latent: bool = False, drafts: bool = False, hybrid: bool = False) -> None:
        del latent
        self.engine_required = True

    def has_window(self, layer_name: str) -> bool:
        return layer_name in self.windowed

    def require(self, layer_name: str, *, reads_keys: bool = False) -> None:
        self.required.add((layer_name, reads_keys))

    def bound_cache(self, layer_name: str) -> torch.Tensor | None:
        del layer_name
        return self.bound

    def block_size(self, layer_name: str, kv_cache: torch.Tensor) -> int:
        del layer_name
        return int(kv_cache.shape[2])

    def num_blocks(self, layer_name: str, kv_cache: torch.Tensor) -> int:
        del layer_name
        return int(kv_cache.shape[1])

    def block_table(self, attn_metadata: Metadata) -> torch.Tensor:
        return attn_metadata.block_table

    def scored(self, layer_name: str, query: torch.Tensor, attn_metadata: Metadata) -> torch.Tensor:
        del layer_name, attn_metadata
        return query

    def restricted(
        self,
        layer_name: str,
        attn_metadata: Metadata,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
        split: QuerySplit | None = None,
    ) -> Metadata:
        del layer_name
        return replace(attn_metadata, block_table=block_table, seq_lens=seq_lens, max_seq_len=max_seq_len, split=split)

    def read_keys(self, layer_name: str, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        if layer_name in self.unreadable:
            raise RuntimeError("no such keys")
        self.reads.setdefault(layer_name, []).extend(block_ids.tolist())
        return kv_cache[0][block_ids]


def metadata(batch: StepBatch, rows: Sequence[Sequence[int]], width: int | None = None) -> Metadata:
    """Return the dense metadata of a step, with block ids for each row."""
    width = width or max(len(row) for row in rows)
    table = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int32)
    lens = torch.from_numpy(batch.seq_lens).int()
    return Metadata(table, lens, int(lens.max()))
