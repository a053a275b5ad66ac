"""ReRoPE where FlashAttention computes the parts: its function is simulated, for its kernels need an accelerator.

What stands in for it does what its documentation says of the arguments that are given, and refuses others: masks and
windows are aligned to the last query and the last key, and the sums of rows without a key are infinite, one way or the
other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from tests.ucm.integration.vllm.sparse.rerope_truth import HEAD, STYLES, Style, Way, turned
from tests.ucm.sparse.steps import step
from ucm.errors import SparseMethodError
from ucm.integration.vllm.sparse.layers import AttentionLayers
from ucm.rotary import Rotary
from ucm.sparse.base import Role
from ucm.sparse.rerope import LeakyReRoPE, ReRoPE

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = "model.layers.3.self_attn.attn"
HEADS, KV_HEADS, SIZE, BLOCKS = 4, 2, 16, 80
#: How often the kernel was called.
calls: list[dict[str, Any]] = []


@dataclass
class FlashAttentionMetadata:
    """As much as is looked at."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    query_start_loc: torch.Tensor
    max_query_len: int
    slot_mapping: object = None
    num_actual_tokens: int = 0
    causal: bool = True


class FlashAttentionImpl:
    alibi_slopes = None
    logits_soft_cap = 0.0
    scale = HEAD**-0.5
    vllm_flash_attn_version = 2


class TritonAttentionImpl(FlashAttentionImpl):
    pass


def flash_attn_varlen_func(  # noqa: PLR0913 - its own arguments
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: list[int],
    block_table: torch.Tensor,
    return_softmax_lse: bool,
    fa_version: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention over blocks, in double precision."""
    calls.append({"rows": len(seqused_k), "window": window_size, "causal": causal})
    assert return_softmax_lse
    assert fa_version == 2
    assert q.is_contiguous()
    assert k.stride(-1) == v.stride(-1) == 1
    assert all(of.dtype == torch.int32 for of in (cu_seqlens_q, seqused_k, block_table))
    assert k.shape == v.shape
    assert k.shape[1:] == (SIZE, KV_HEADS, HEAD)
    lengths = cu_seqlens_q.diff()
    assert len(lengths) == len(seqused_k) == len(block_table)
    assert (int(lengths.max()), int(seqused_k.max())) == (max_seqlen_q, max_seqlen_k)
    assert int(cu_seqlens_q[-1]) == len(q)
    outputs, sums = [], []
    for own, row, count in zip(q.split(lengths.tolist()), block_table, seqused_k.tolist(), strict=True):
        blocks = row[: -(-count // SIZE)].long()
        keys, values = (of[blocks].flatten(0, 1)[:count].double().repeat_interleave(2, 1) for of in (k, v))
        scores = torch.einsum("qhd,khd->hqk", own.double(), keys) * softmax_scale
        aligned = torch.arange(len(own))[:, None] + count - len(own)
        places = torch.arange(count)
        hidden = torch.zeros(len(own), count, dtype=torch.bool)
        if causal or window_size[1] >= 0:
            hidden |= places > aligned + max(window_size[1], 0)
        if window_size[0] >= 0:
            hidden |= places < aligned - window_size[0]
        scores = scores.masked_fill(hidden, -math.inf)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(), values).to(q.dtype))
        total = scores.logsumexp(-1)
        sums.append(total.masked_fill(total == -math.inf, math.inf).float())
    return torch.cat(outputs), torch.cat(sums, -1)


def planes(blocks: torch.Tensor) -> torch.Tensor:
    """FlashAttention to 0.25: ``[2, blocks, size, heads, head]``."""
    return blocks


def planes_behind(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.transpose(0, 1).contiguous()


def halves(blocks: torch.Tensor) -> torch.Tensor:
    """From 0.26 on: ``[blocks, heads, size, 2 * head]``."""
    return torch.cat((blocks[0], blocks[1]), -1).transpose(1, 2).contiguous()


def layers(impl: object) -> AttentionLayers:
    layer = SimpleNamespace(impl=impl, num_kv_heads=KV_HEADS, head_size=HEAD, attn_type="decoder")
    parallel = SimpleNamespace(tensor_parallel_size=1)
    context = SimpleNamespace(static_forward_context={NAME: layer})
    return AttentionLayers(SimpleNamespace(compilation_config=context, parallel_config=parallel))


def rotary(style: Style) -> Rotary:
    half = style.rotated // 2
    frequencies = 10_000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(600)[:, None] * frequencies
    return Rotary(torch.cat((angles.cos(), angles.sin()), -1), style.neox, frequencies)


STEPS = [
    [(300, 1), (99, 1), (100, 1), (7, 1), (512, 1)],
    [(0, 400)],
    [(90, 30), (0, 20), (200, 90), (150, 1)],
]


@pytest.mark.parametrize("layout", [planes, planes_behind, halves])
@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize(
    ("way", "style"), zip((Way(100), Way(33, 4.0), Way(64, 2.0, 128), Way(1)), STYLES, strict=True)
)
def test_attention_is_the_reference_s(
    monkeypatch: pytest.MonkeyPatch,
    layout: Callable[[torch.Tensor], torch.Tensor],
    rows: list[tuple[int, int]],
    way: Way,
    style: Style,
) -> None:
    source = torch.Generator().manual_seed(2)
    cache = torch.full((2, BLOCKS, SIZE, KV_HEADS, HEAD), 1000.0)
    free = torch.randperm(BLOCKS - 1, generator=source).add(1).tolist()
    kept, queries, table = [], [], torch.zeros((len(rows), 40), dtype=torch.int32)
    for number, (computed, new) in enumerate(rows):
        length = computed + new
        query, keys, values = (torch.randn((length, n, HEAD), generator=source) for n in (HEADS, KV_HEADS, KV_HEADS))
        places = torch.arange(length)
        blocks = torch.tensor([free.pop() for _ in range(-(-length // SIZE))])
        table[number, : len(blocks)] = blocks
        cache[0, blocks[places // SIZE], places % SIZE] = turned(keys, places, style).float()
        cache[1, blocks[places // SIZE], places % SIZE] = values
        kept.append((query[computed:], keys, values))
        queries.append(turned(query, places, style)[computed:].float())
    kind: type[ReRoPE] = ReRoPE if way.leak == math.inf else LeakyReRoPE
    method = kind(None, Role.WORKER, way.options)
    view = layers(FlashAttentionImpl())
    batch = step(*[(f"{n}", *row, sum(row)) for n, row in enumerate(rows)])
    monkeypatch.setattr(view, "batch", lambda runner, scheduler_output, input_batch: batch)
    of_style = rotary(style)
    monkeypatch.setattr(view, "rotary", lambda layer_name: of_style)
    method.attention = view
    counts = [new for _, new in rows]
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor([sum(row) for row in rows], dtype=torch.int32)
    dense = FlashAttentionMetadata(table, lens, int(lens.max()), starts, max(counts))
    query, kv_cache, output = torch.cat(queries), layout(cache), torch.full((sum(counts), HEADS * HEAD), 7.0)
    calls.clear()
    method.execute_begin(None, None, None)
    used = method.attention_begin(NAME, query, query, query, kv_cache, dense)[3]
    method.attention_finished(NAME, query, kv_cache, used, output)
    method.execute_finished(None, None, None)
    # Of each request one call for what is near, and one or two for what is far.
    beyond = sum(computed + new > way.window for computed, new in rows)
    near, far = ([call["window"] for call in part] for part in (calls[:beyond], calls[beyond:]))
    assert near == [[way.window - 1, 0]] * beyond
    assert far == [[-1, -1]] * len(far)
    assert 0 < len(far) <= 2 * beyond
    parts = zip(rows, kept, output.view(-1, HEADS, HEAD).split(counts), strict=True)
    for (computed, _), of, found in parts:
        within = max(0, way.window - computed)
        assert bool((found[:within] == 7.0).all())
        wanted = way.attention(*of, computed, style)
        torch.testing.assert_close(found[within:].double(), wanted[within:], rtol=3e-5, atol=3e-5)


def test_what_vllm_computes_for_these_tokens_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    method = ReRoPE(None, Role.WORKER, {"window": 100})
    view = layers(FlashAttentionImpl())
    batch = step(("a", 50, 350, 400), ("b", 20, 1, 5))
    monkeypatch.setattr(view, "batch", lambda runner, scheduler_output, input_batch: batch)
    monkeypatch.setattr(view, "rotary", lambda layer_name: None)
    method.attention = view
    table = torch.arange(80, dtype=torch.int32).view(2, 40)
    lens, starts = torch.tensor([400, 21], dtype=torch.int32), torch.tensor([0, 350, 351], dtype=torch.int32)
    dense = FlashAttentionMetadata(table, lens, 400, starts, 350)
    method.execute_begin(None, None, None)
    query = torch.zeros(351, HEADS, HEAD)
    used = method.attention_begin(NAME, query, query, query, torch.zeros(2, 1, SIZE, KV_HEADS, HEAD), dense)[3]
    assert used.seq_lens.tolist() == [100, 64, 64, 64, 64, 44, 21]
    assert used.query_start_loc.tolist() == [0, 50, 114, 178, 242, 306, 350, 351]
    assert (used.max_query_len, used.max_seq_len) == (64, 100)
    assert torch.equal(used.block_table, table[[0, 0, 0, 0, 0, 0, 1]])


@pytest.mark.parametrize(
    ("impl", "what", "fix"),
    [
        (TritonAttentionImpl(), "TritonAttentionImpl does not return log-sum-exps", "--attention-backend FLASH_ATTN"),
        (
            type("FlashAttentionImpl", (FlashAttentionImpl,), {"logits_soft_cap": 30.0})(),
            "caps its scores, at 30.0",
            "",
        ),
        (type("FlashAttentionImpl", (FlashAttentionImpl,), {"sinks": torch.zeros(2)})(), "has learned sinks", ""),
    ],
)
def test_what_parts_cannot_be_put_together_of_is_refused(impl: object, what: str, fix: str) -> None:
    with pytest.raises(SparseMethodError, match=what) as caught:
        layers(impl).require_parts(NAME)
    assert fix in caught.value.fix


def test_quantised_keys_are_refused() -> None:
    view = layers(FlashAttentionImpl())
    view._config.compilation_config.static_forward_context[NAME].kv_cache_dtype = "fp8"
    with pytest.raises(SparseMethodError, match="cannot be read back"):
        view.require_parts(NAME)
