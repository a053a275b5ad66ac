"""vLLM Ascend's metadata by its fields; `tests/e2e/test_ascend.py` runs its own implementation."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from ucm.errors import SparseMethodError
from ucm.integration.vllm.sparse.layers import AttentionLayers
from ucm.sparse.attention import QuerySplit

NAME = "model.layers.3.self_attn.attn"
BLOCKS, SIZE, KV_HEADS, HEAD = 5, 4, 3, 8


class State(Enum):
    """What a step does, by vLLM Ascend's names."""

    PrefillNoCache = 0
    DecodeOnly = 2
    ChunkedPrefill = 3


@dataclass
class AscendMetadata:
    """With the fields of several releases."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    actual_seq_lengths_q: list[int]
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor | None
    seq_lens_list: list[int]
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    attn_state: State = State.DecodeOnly
    causal: bool = True
    prefill: object = None
    decode_meta: object = None
    kvcomp_metadata: object = None
    seq_lens_gpu: torch.Tensor | None = None
    query_start_loc_gpu: torch.Tensor | None = None


class AscendAttentionBackendImpl:
    alibi_slopes = None

    def forward_fused_infer_attention(self) -> None:
        raise NotImplementedError


class Older:
    """As until 0.11.0."""

    alibi_slopes = None


Older.__name__ = "AscendAttentionBackendImpl"


def layers(impl: object) -> AttentionLayers:
    layer = SimpleNamespace(impl=impl, num_kv_heads=KV_HEADS, head_size=HEAD, attn_type="decoder")
    context = SimpleNamespace(static_forward_context={NAME: layer})
    return AttentionLayers(SimpleNamespace(compilation_config=context))


def metadata(padding: int = 0) -> AscendMetadata:
    lens = torch.tensor([30, 20, 9] + [1] * padding, dtype=torch.int32)
    rows = len(lens)
    return AscendMetadata(
        num_actual_tokens=3,
        max_query_len=1,
        query_start_loc=torch.arange(rows + 1),
        actual_seq_lengths_q=list(range(1, rows + 1)),
        seq_lens=lens,
        seq_lens_cpu=lens,
        seq_lens_list=lens.tolist(),
        block_tables=torch.arange(rows * 8, dtype=torch.int32).view(-1, 8),
        slot_mapping=torch.arange(3),
    )


TABLE = torch.tensor([[1, 2], [9, 10], [17, 18]], dtype=torch.int32)
LENS = torch.tensor([6, 8, 5], dtype=torch.int32)
REPLACED = {"block_tables", "seq_lens", "seq_lens_cpu", "seq_lens_list"}


def test_every_copy_of_the_lengths_is_replaced() -> None:
    dense = replace(metadata(), seq_lens_gpu=torch.tensor([30, 20, 9]))
    found = layers(AscendAttentionBackendImpl()).restricted(NAME, dense, TABLE, LENS, 8)
    assert found.block_tables is TABLE
    assert found.seq_lens_list == [6, 8, 5]
    assert all(of.tolist() == [6, 8, 5] for of in (found.seq_lens, found.seq_lens_cpu, found.seq_lens_gpu))
    kept = {field.name for field in fields(found)} - REPLACED - {"seq_lens_gpu"}
    assert all(getattr(found, name) is getattr(dense, name) for name in kept)
    assert dense.seq_lens_list == [30, 20, 9]


def test_a_row_that_pads_the_step_is_kept() -> None:
    found = layers(AscendAttentionBackendImpl()).restricted(NAME, metadata(padding=1), TABLE, LENS, 8)
    assert found.seq_lens_list == [6, 8, 5, 1]
    assert found.block_tables.tolist() == [*TABLE.tolist(), [0, 0]]
    assert found.actual_seq_lengths_q == [1, 2, 3, 4]


def test_rows_that_are_not_requests_have_queries_of_their_own() -> None:
    split = QuerySplit(torch.tensor([0, 2, 4, 5], dtype=torch.int32), 2)
    dense = replace(metadata(), query_start_loc_gpu=torch.arange(4))
    found = layers(AscendAttentionBackendImpl()).restricted(NAME, dense, TABLE, LENS, 8, split)
    assert found.actual_seq_lengths_q == [2, 4, 5]
    assert found.query_start_loc is split.starts
    assert found.query_start_loc_gpu.tolist() == [0, 2, 4, 5]
    assert found.max_query_len == 2
    assert found.attn_state is State.ChunkedPrefill  # a decode step's kernel takes one query of each row


def test_a_step_that_reads_no_table_becomes_one_that_does() -> None:
    view = layers(AscendAttentionBackendImpl())
    for state, wanted in ((State.PrefillNoCache, State.ChunkedPrefill), (State.DecodeOnly, State.DecodeOnly)):
        assert view.restricted(NAME, replace(metadata(), attn_state=state), TABLE, LENS, 8).attn_state is wanted


def test_lengths_are_copied_to_the_host_once_for_all_layers_of_a_step() -> None:
    view, dense = layers(AscendAttentionBackendImpl()), metadata()
    first, second = (view.restricted(NAME, dense, TABLE, LENS, 8) for _ in range(2))
    assert first.seq_lens is second.seq_lens
    other = view.restricted(NAME, dense, TABLE, LENS + 1, 9)
    assert other.seq_lens_list == [7, 9, 6]
    assert view.restricted(NAME, metadata(), TABLE, LENS, 8).seq_lens_list == [6, 8, 5]


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("prefill", object(), "reads more"),
        ("decode_meta", object(), "reads more"),
        ("kvcomp_metadata", object(), "reads more"),
        ("causal", False, "not causal"),
    ],
)
def test_what_reads_more_is_refused(field: str, value: object, what: str) -> None:
    changes: dict[str, Any] = {field: value}
    dense = replace(metadata(), **changes)
    view = layers(AscendAttentionBackendImpl())
    with pytest.raises(SparseMethodError, match=what) as caught:
        view.restricted(NAME, dense, TABLE, LENS, 8)
    assert "AscendMetadata" in caught.value.where
    with pytest.raises(SparseMethodError, match=what):
        view.block_table(dense)


def test_what_vllm_ascend_restricts_itself_is_refused() -> None:
    impl: Any = AscendAttentionBackendImpl()
    impl.enable_hamming_sparse = True
    with pytest.raises(SparseMethodError, match="chooses the blocks of this layer itself"):
        layers(impl).restricted(NAME, metadata(), TABLE, LENS, 8)


def test_older_releases_and_parts_are_refused() -> None:
    with pytest.raises(SparseMethodError, match="has no block table"):
        layers(Older()).require(NAME)
    with pytest.raises(SparseMethodError, match="from parts do not run on vLLM Ascend"):
        layers(AscendAttentionBackendImpl()).require_parts(NAME)


def test_keys_are_read_of_a_pair_and_of_one_tensor() -> None:
    view = layers(AscendAttentionBackendImpl())
    whole = torch.randn((2, BLOCKS, SIZE, KV_HEADS, HEAD), generator=torch.Generator().manual_seed(0))
    wanted = whole[0][[3, 1]]
    pair: Any = (whole[0].clone(), whole[1].clone())
    for cache in (whole, pair, list(pair)):
        assert torch.equal(view.read_keys(NAME, cache, torch.tensor([3, 1])), wanted)
        assert view.block_size(NAME, cache) == SIZE
        assert view.num_blocks(NAME, cache) == BLOCKS


class Written(AscendAttentionBackendImpl):
    """As from 0.23.0 on."""

    def do_kv_cache_update(self, _: object, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
        assert slots.dtype is torch.int32  # as the NPU's operation wants them
        for plane, given in zip(cache, (key, value), strict=True):
            plane.view(-1, KV_HEADS, HEAD)[slots.long()] = given


Written.__name__ = "AscendAttentionBackendImpl"


def test_tokens_are_written_to_a_pair_from_0_23_0_on() -> None:
    view = layers(Written())
    view.require_write(NAME)
    pair: Any = tuple(torch.zeros(BLOCKS, SIZE, KV_HEADS, HEAD) for _ in range(2))
    keys, values = torch.randn(2, 3, KV_HEADS, HEAD, generator=torch.Generator().manual_seed(0))
    view.write(NAME, pair, keys, values, torch.tensor([7, 4, 18]))
    found = view.read(NAME, pair, torch.tensor([1, 4]))
    for plane, wanted in zip(found, (keys, values), strict=True):
        assert torch.equal(plane.flatten(0, 1)[[3, 0, 6]], wanted)
    with pytest.raises(SparseMethodError, match="writes KV within its attention in this release"):
        layers(AscendAttentionBackendImpl()).require_write(NAME)


def test_another_cache_is_refused() -> None:
    view = layers(AscendAttentionBackendImpl())
    for cache in (torch.zeros(2, BLOCKS, KV_HEADS, SIZE, HEAD), (torch.zeros(BLOCKS, SIZE, 1),) * 3):
        with pytest.raises(SparseMethodError, match="a KV cache of the shape"):
            view.block_size(NAME, cache)
