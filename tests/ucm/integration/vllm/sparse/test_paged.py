"""Metadata and caches of FlashAttention's and Triton's kinds, by their fields; their kernels need an accelerator."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from ucm.errors import SparseMethodError
from ucm.integration.vllm.sparse import paged
from ucm.integration.vllm.sparse.layers import AttentionLayers

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "model.layers.3.self_attn.attn"
BLOCKS, SIZE, KV_HEADS, HEAD = 5, 4, 3, 8


@dataclass
class FlashAttentionMetadata:
    """With the fields of several releases."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    use_cascade: bool = False
    common_prefix_len: int = 0
    prefix_kv_lens: object = None
    scheduler_metadata: object = None
    max_num_splits: int = 0
    causal: bool = True
    mm_prefix_range: object = None
    rswa_prefix_lens: object = None


class FlashAttentionImpl:
    alibi_slopes = None


class FlashAttentionDiffKVImpl(FlashAttentionImpl):
    """Values of another size than keys: not one of those that are known."""


def layers(impl: object) -> AttentionLayers:
    layer = SimpleNamespace(impl=impl, num_kv_heads=KV_HEADS, head_size=HEAD, attn_type="decoder")
    context = SimpleNamespace(static_forward_context={NAME: layer})
    return AttentionLayers(SimpleNamespace(compilation_config=context))


def metadata(rows: int = 3, padding: int = 0) -> FlashAttentionMetadata:
    return FlashAttentionMetadata(
        num_actual_tokens=rows,
        max_query_len=1,
        query_start_loc=torch.arange(rows + 1),
        max_seq_len=30,
        seq_lens=torch.tensor([30, 20, 9][:rows] + [0] * padding, dtype=torch.int32),
        block_table=torch.arange((rows + padding) * 8, dtype=torch.int32).view(-1, 8),
        slot_mapping=torch.arange(rows),
    )


TABLE = torch.tensor([[1, 2], [9, 10], [17, 18]], dtype=torch.int32)
LENS = torch.tensor([6, 8, 5], dtype=torch.int32)


def test_blocks_and_lengths_are_replaced_and_what_was_planned_ahead_is_dropped() -> None:
    view = layers(FlashAttentionImpl())
    dense = replace(
        metadata(), use_cascade=True, common_prefix_len=16, prefix_kv_lens=object(), scheduler_metadata=object()
    )
    found = view.restricted(NAME, dense, TABLE, LENS, 8)
    assert found.block_table is TABLE
    assert found.seq_lens is LENS
    assert (found.max_seq_len, found.use_cascade, found.common_prefix_len) == (8, False, 0)
    assert found.prefix_kv_lens is found.scheduler_metadata is None
    assert dense.use_cascade
    assert dense.scheduler_metadata is not None
    kept = {field.name for field in fields(found)} - {"block_table", "seq_lens", "max_seq_len", *paged.AHEAD}
    assert all(getattr(found, name) is getattr(dense, name) for name in kept)


def test_rows_of_a_graph_are_kept() -> None:
    found = layers(FlashAttentionImpl()).restricted(NAME, metadata(padding=2), TABLE, LENS, 8)
    assert found.seq_lens.tolist() == [6, 8, 5, 0, 0]
    assert found.block_table.tolist() == [*TABLE.tolist(), [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mm_prefix_range", object()),
        ("rswa_prefix_lens", object()),
        ("causal", False),
        ("causal", torch.tensor([True])),
    ],
)
def test_what_reads_positions_is_refused(field: str, value: object) -> None:
    changes: dict[str, Any] = {field: value}
    dense = replace(metadata(), **changes)
    view = layers(FlashAttentionImpl())
    with pytest.raises(SparseMethodError, match=r"not causal|reads more") as caught:
        view.restricted(NAME, dense, TABLE, LENS, 8)
    assert caught.value.where.startswith("FlashAttentionMetadata")
    with pytest.raises(SparseMethodError, match=r"not causal|reads more"):
        view.block_table(dense)


def test_the_block_table_is_the_metadatas() -> None:
    dense = metadata()
    assert layers(FlashAttentionImpl()).block_table(dense) is dense.block_table


def test_a_relative_of_a_known_backend_is_refused() -> None:
    with pytest.raises(SparseMethodError, match="FlashAttentionDiffKVImpl has no block table"):
        layers(FlashAttentionDiffKVImpl()).require(NAME)


def keys() -> torch.Tensor:
    return torch.randn((BLOCKS, SIZE, KV_HEADS, HEAD), generator=torch.Generator().manual_seed(0))


def planes_first(wanted: torch.Tensor) -> torch.Tensor:
    return torch.stack((wanted, -wanted))


def planes_behind_blocks(wanted: torch.Tensor) -> torch.Tensor:
    return torch.stack((wanted, -wanted), 1)


def heads_first_in_memory(wanted: torch.Tensor) -> torch.Tensor:
    return torch.stack((wanted, -wanted)).transpose(2, 3).contiguous().transpose(2, 3)


def halves(wanted: torch.Tensor) -> torch.Tensor:
    return torch.cat((wanted, -wanted), -1).transpose(1, 2)


def halves_heads_first_in_memory(wanted: torch.Tensor) -> torch.Tensor:
    return halves(wanted).contiguous()


@pytest.mark.parametrize(
    "layout", [planes_first, planes_behind_blocks, heads_first_in_memory, halves, halves_heads_first_in_memory]
)
def test_keys_are_read_from_every_layout(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    view, wanted = layers(FlashAttentionImpl()), keys()
    cache = layout(wanted)
    assert view.block_size(NAME, cache) == SIZE
    assert torch.equal(view.read_keys(NAME, cache, torch.tensor([3, 0])), wanted[[3, 0]])


@pytest.mark.parametrize("shape", [(BLOCKS, SIZE, KV_HEADS, HEAD), (2, 2, SIZE, KV_HEADS, HEAD), (BLOCKS, 2, SIZE, 24)])
def test_an_unknown_layout_is_refused(shape: tuple[int, ...]) -> None:
    view: Any = layers(FlashAttentionImpl())
    with pytest.raises(SparseMethodError, match="are not known"):
        view.read_keys(NAME, torch.zeros(shape), torch.tensor([0]))


@pytest.mark.parametrize("stored", ["fp8", "fp8_e5m2", "int8"])
def test_quantised_keys_are_refused_where_they_are_read(stored: str) -> None:
    view = layers(FlashAttentionImpl())
    view._config.compilation_config.static_forward_context[NAME].kv_cache_dtype = stored
    view.require(NAME)
    with pytest.raises(SparseMethodError, match="cannot be read back") as caught:
        view.require(NAME, reads_keys=True)
    assert "--kv-cache-dtype auto" in caught.value.fix
