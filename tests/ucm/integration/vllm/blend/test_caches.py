"""`LayerCaches` over FlashAttention's layouts of a KV cache, on tensors of a CPU.

`FlashAttentionImpl` here is a test double: it has the names and fields by which the real one is recognised, and its
`do_kv_cache_update` writes each token's key and value to its slot, as `reshape_and_cache_flash` is documented to. It
simulates neither the kernel nor the strides that a GPU's cache may have, and computes no attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from ucm.blend import Run
from ucm.integration.vllm.blend.caches import LayerCaches
from ucm.integration.vllm.connector.failures import UnsupportedModelError

BLOCKS, SIZE, HEADS, HEAD, POSITIONS = 6, 4, 3, 8, 24
#: Keys and values before the blocks, behind them, and in the halves of each head.
SHAPES = [
    (2, BLOCKS, SIZE, HEADS, HEAD),
    (BLOCKS, 2, SIZE, HEADS, HEAD),
    (BLOCKS, HEADS, SIZE, 2 * HEAD),
]
IDS = ["planes", "planes of blocks", "halves"]


@dataclass
class FlashAttentionMetadata:
    """The fields by which it is recognised."""

    block_table: Any
    seq_lens: Any
    max_seq_len: int
    query_start_loc: Any
    max_query_len: int
    slot_mapping: Any
    num_actual_tokens: int


class Older:
    """FlashAttention before 0.16.0, which writes within its attention."""

    alibi_slopes = None
    sliding_window = (-1, -1)


class FlashAttentionImpl(Older):
    """FlashAttention from 0.16.0 on."""

    def do_kv_cache_update(self, _: object, key: Any, value: Any, kv_cache: Any, slots: Any) -> None:
        for place, slot in enumerate(slots.tolist()):
            block, at = divmod(slot, SIZE)
            if kv_cache.dim() == 4:
                kv_cache[block, :, at, :HEAD], kv_cache[block, :, at, HEAD:] = key[place], value[place]
            else:
                for plane, given in enumerate((key, value)):
                    of = kv_cache[plane, block] if kv_cache.shape[0] == 2 else kv_cache[block, plane]
                    of[at] = given[place]


Older.__name__ = "FlashAttentionImpl"


class Attention(torch.nn.Module):  # type: ignore[misc] # torch has no types here
    """As much of vLLM's layer as is looked at."""

    num_kv_heads, head_size, attn_type = HEADS, HEAD, "decoder"

    def __init__(self, impl: object) -> None:
        super().__init__()
        self.impl = impl
        self.ran = 0

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        del key, value
        self.ran += 1
        return query


class Model(torch.nn.Module):  # type: ignore[misc] # torch has no types here
    """Two layers, each with a rotary embedding beside its attention."""

    def __init__(self, impl: object) -> None:
        super().__init__()
        angles = torch.arange(POSITIONS)[:, None] * 10.0 ** -torch.arange(HEAD // 2)
        self.layers = torch.nn.ModuleList()
        for _ in range(2):
            layer = torch.nn.Module()
            layer.attn = Attention(impl)
            layer.rotary_emb = torch.nn.Module()
            layer.rotary_emb.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), 1)
            layer.rotary_emb.is_neox_style = True
            self.layers.append(layer)

    def forward(self, hidden: Any) -> Any:
        for layer in self.layers:
            # As vLLM's models do: projections are parts of one tensor, by position or by name.
            query, key, value = torch.cat((hidden, hidden + 1, hidden + 2), 1).split(HEADS * HEAD, 1)
            hidden = hidden + 10 + 0 * layer.attn(query, key, value=value)
        return hidden


def made(shape: tuple[int, ...], impl: object, block_size: int = SIZE) -> tuple[LayerCaches, Model]:
    model = Model(impl)
    names = [f"model.layers.{number}.attn" for number in range(2)]
    layers = {name: layer.attn for name, layer in zip(names, model.layers, strict=True)}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(block_size=block_size),
        model_config=SimpleNamespace(max_model_len=POSITIONS, dtype=torch.float32),
    )
    return LayerCaches(config, {name: torch.zeros(shape) for name in names}, model), model


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_chunks_are_written_to_any_position_and_read_back(shape: tuple[int, ...]) -> None:
    caches, _ = made(shape, FlashAttentionImpl())
    blocks, positions = caches.blocks([5, 2, 4]), torch.arange(2, 11)
    slots = caches.slots(blocks, positions)
    assert slots.tolist() == [22, 23, 8, 9, 10, 11, 16, 17, 18]
    free = torch.randn((2, len(positions), HEADS, HEAD), generator=torch.Generator().manual_seed(0))
    keys, values = caches.write(1, positions, slots, free)
    assert not torch.allclose(keys, free[0])  # rotated to their positions
    for found, wanted in zip(caches.read(1, blocks, positions), (keys, values), strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip(caches.read_free(1, blocks, positions), free, strict=True):
        torch.testing.assert_close(found, wanted)
    # Nothing else is written: not the other layer, not the tokens before.
    assert not any(of.any() for of in caches.read(0, blocks, torch.arange(12)))
    assert not any(of.any() for of in caches.read(1, blocks, torch.tensor([0, 1, 11])))


def test_a_kernel_s_blocks_may_be_smaller_than_the_manager_s() -> None:
    caches, _ = made(SHAPES[0], FlashAttentionImpl(), block_size=2 * SIZE)
    assert caches.blocks([2, 0]).tolist() == [4, 5, 0, 1]
    rows = caches.rows([Run(0, 2), Run(6, 9)], caches.blocks([2, 0]))
    assert rows.positions.tolist() == [0, 1, 6, 7, 8]
    assert rows.slots.tolist() == [16, 17, 22, 23, 0]
    assert rows.table.tolist() == [[4, 5, 0]] * 2
    assert (rows.seq_lens.tolist(), rows.starts.tolist()) == ([2, 9], [0, 2, 5])


def test_an_implementation_that_writes_within_its_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="writes KV within its attention in this release"):
        made(SHAPES[0], Older())


@pytest.mark.parametrize("asking", [0, 2])
def test_the_attention_of_a_row_is_that_of_a_model_which_sees_the_whole_prompt(asking: int) -> None:
    """As a mean over layers, heads and the tokens that count; two heads of queries share one of keys."""
    caches, model = made(SHAPES[2], FlashAttentionImpl())
    source = torch.Generator().manual_seed(0)
    blocks, reach, row = caches.blocks([5, 2, 4]), 7, 4
    keys, queries = torch.randn((2, reach + row, HEADS, HEAD), generator=source), torch.empty(0)
    wanted = torch.zeros(reach + row)
    with caches.attention(blocks, reach, asking) as paid:
        assert paid.isnan().all()
        for layer in range(2):
            positions = torch.arange(reach)
            name, known = caches.names[layer], keys[layer, :reach]
            caches._view.write(name, caches._caches[name], known, known, caches.slots(blocks, positions))
            queries = torch.randn((row, 2 * HEADS, HEAD), generator=source)
            own = keys[layer, reach:].flatten(1)
            model.layers[layer].attn(queries.flatten(1), own, value=own)
            for token in range(asking, row):
                for head in range(2 * HEADS):
                    scores = keys[layer, : reach + token + 1, head // 2] @ queries[token, head] / HEAD**0.5
                    wanted[: reach + token + 1] += scores.softmax(0) / (2 * 2 * HEADS * (row - asking))
    torch.testing.assert_close(paid, wanted[:reach])
    model.layers[0].attn(queries.flatten(1), queries.flatten(1), queries.flatten(1))
    torch.testing.assert_close(paid, wanted[:reach])  # the layers are as they were before
