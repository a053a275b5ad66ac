"""The view of attention layers on the installed vLLM's own CPU backend: its cache, its metadata, its kernel."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")
pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests")

import torch
from vllm import _custom_ops

from ucm.errors import SparseMethodError
from ucm.integration.vllm.sparse.layers import AttentionLayers
from ucm.testing.attention_layer import HEADS, KV_HEADS, NAME, RealLayer, real_layer

#: dtype, block size, head size: AMX tiles, AVX-512 columns, heads that only the 16-column packing takes.
KINDS = [
    ("bfloat16", 32, 64),
    ("bfloat16", 128, 128),
    ("float32", 32, 64),
    ("float16", 64, 32),
    ("bfloat16", 32, 80),
    ("float32", 128, 256),
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RealLayer:
    return real_layer(tmp_path_factory.mktemp("model"), *request.param)


def filled(real: RealLayer, block_ids: list[int], tokens: int) -> tuple[Any, Any]:
    """Random keys and values of a request, written into its blocks."""
    source = torch.Generator().manual_seed(tokens)
    shape = (tokens, KV_HEADS, real.head_size)
    keys, values = (torch.randn(shape, generator=source).to(real.kv_cache.dtype) for _ in range(2))
    positions = torch.arange(tokens)
    slots = torch.tensor(block_ids)[positions // real.block_size] * real.block_size + positions % real.block_size
    real.write(keys, values, slots)
    return keys, values


def queries(real: RealLayer, tokens: int) -> Any:
    shape = (tokens, HEADS, real.head_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(real.kv_cache.dtype)


def reference(query: Any, keys: Any, values: Any) -> Any:
    """Attention of the last tokens over some keys, in 64 bits: ``[num_tokens, num_heads, head_size]``."""
    query, keys, values = (part.double() for part in (query, keys, values))
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(keys.shape[0] - query.shape[0] + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def assert_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=TOLERANCE[found.dtype])


def test_the_block_size_is_the_caches(real: RealLayer) -> None:
    assert real.view.block_size(NAME, real.kv_cache) == real.block_size


def test_keys_are_read_as_they_were_written(real: RealLayer) -> None:
    blocks = [7, 2, 11, 4]
    keys, _ = filled(real, blocks, 4 * real.block_size)
    found = real.view.read_keys(NAME, real.kv_cache, torch.tensor(blocks))
    assert found.shape == (4, real.block_size, KV_HEADS, real.head_size)
    assert torch.equal(found.flatten(0, 1), keys)
    assert torch.equal(real.view.read_keys(NAME, real.kv_cache, torch.tensor([11]))[0], found[2])


def test_restricted_to_all_of_its_blocks_attention_is_the_same_to_the_bit(real: RealLayer) -> None:
    size = real.block_size
    rows, lens, new = [[1, 2, 3], [4], [5, 6]], [2 * size + 5, size - 1, size + 9], [1, 1, 7]
    for row, length in zip(rows, lens, strict=True):
        filled(real, row, length)
    metadata = real.metadata(rows, lens, new)
    query = queries(real, sum(new))
    dense = real.attend(query, metadata)
    table = real.view.block_table(metadata)
    whole = real.view.restricted(NAME, metadata, table.clone(), metadata.seq_lens.clone(), max(lens))
    assert whole is not metadata
    assert torch.equal(real.attend(query, whole), dense)


def test_restricted_attention_reads_exactly_the_named_blocks(real: RealLayer) -> None:
    """A decode over three of its five blocks, a short decode, and a prompt's second chunk, in one step."""
    size = real.block_size
    rows, lens, new = [[1, 2, 3, 4, 5], [6], [7, 8]], [4 * size + 3, 9, size + 6], [1, 1, 8]
    contents = [filled(real, row, length) for row, length in zip(rows, lens, strict=True)]
    metadata = real.metadata(rows, lens, new)
    query = queries(real, sum(new))
    table = torch.tensor([[1, 4, 5], [6, 0, 0], [7, 8, 0]], dtype=torch.int32)
    fewer = torch.tensor([2 * size + 3, 9, size + 6], dtype=torch.int32)
    before = {name: value for name, value in vars(metadata).items() if isinstance(value, torch.Tensor)}
    copies = {name: value.clone() for name, value in before.items()}
    found = real.attend(query, real.view.restricted(NAME, metadata, table, fewer, 2 * size + 3))
    keys, values = contents[0]
    read = torch.cat([torch.arange(size), torch.arange(3 * size, 4 * size + 3)])
    wanted = [
        reference(query[:1], keys[read], values[read]),
        reference(query[1:2], *contents[1]),
        reference(query[2:], *contents[2]),
    ]
    assert_close(found, torch.cat(wanted))
    for name, value in before.items():
        assert getattr(metadata, name) is value
        assert torch.equal(value, copies[name])


def test_a_schedule_is_made_once_for_all_layers_of_a_step(real: RealLayer) -> None:
    filled(real, [1, 2], real.block_size + 1)
    metadata = real.metadata([[1, 2]], [real.block_size + 1], [1])
    table, fewer = torch.tensor([[2]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    first = real.view.restricted(NAME, metadata, table, fewer, 1)
    again = real.view.restricted(NAME, metadata, table.clone(), fewer, 1)
    other = real.view.restricted(NAME, metadata, table, fewer.clone(), 1)
    assert again.scheduler_metadata is first.scheduler_metadata
    assert other.scheduler_metadata is not first.scheduler_metadata


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("use_sdpa_prefill", True, "no rows for its prompts"),
        ("dynamic_causal", torch.tensor([True]), "reads more"),
        ("causal", False, "not causal"),
    ],
)
def test_metadata_of_another_kind_is_refused(real: RealLayer, field: str, value: object, what: str) -> None:
    metadata = real.metadata([[1, 2]], [real.block_size + 1], [1])
    assert hasattr(metadata, field)
    setattr(metadata, field, value)
    table, fewer = torch.tensor([[2]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    with pytest.raises(SparseMethodError, match=what) as caught:
        real.view.restricted(NAME, metadata, table, fewer, 1)
    assert "CPUAttentionMetadata" in caught.value.where
    assert caught.value.fix


@pytest.mark.parametrize("shape", [(4, 3, 32, 64), (4, 2, 2, 32, 64)])
def test_a_cache_of_another_shape_is_refused(real: RealLayer, shape: tuple[int, ...]) -> None:
    cache = torch.zeros(shape, dtype=real.kv_cache.dtype)
    with pytest.raises(SparseMethodError, match="are not known"):
        real.view.read_keys(NAME, cache, torch.tensor([0]))


def test_keys_that_are_not_where_they_were_written_are_refused(
    real: RealLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that rounds, or writes a key twice, as none does: nothing is guessed then."""
    right = _custom_ops.cpu_attn_reshape_and_cache

    def rounding(key: torch.Tensor, **others: Any) -> None:
        right(key=(key / 2).floor() * 2, **others)

    @functools.wraps(right)
    def wrong(**arguments: Any) -> None:
        rounding(**arguments)

    monkeypatch.setattr(_custom_ops, "cpu_attn_reshape_and_cache", wrong)
    with pytest.raises(SparseMethodError, match="cannot be determined") as caught:
        AttentionLayers(real.config).read_keys(NAME, real.kv_cache, torch.tensor([0]))
    assert "method that reads no keys" in caught.value.fix


def test_a_layer_of_the_model_is_served(real: RealLayer) -> None:
    real.view.require_engine()
    real.view.require(NAME, reads_keys=True)
