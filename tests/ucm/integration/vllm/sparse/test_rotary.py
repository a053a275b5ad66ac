"""The rotary embedding beside a layer: found by the layer itself, and refused by name where it cannot be turned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch
from torch import nn

from tests.ucm.integration.vllm.sparse.rerope_truth import BASE, HEAD
from ucm.errors import SparseMethodError
from ucm.integration.vllm.sparse.layers import Rotaries

NAME = "model.layers.3.self_attn.attn"
LONGEST = 3000


class RotaryEmbedding(nn.Module):  # type: ignore[misc] # torch has no types here
    """vLLM's, by its name and its attributes."""

    cos_sin_cache: torch.Tensor

    def __init__(self, positions: int = LONGEST, base: float = BASE, scale: float = 1.0) -> None:
        super().__init__()
        self.base, self.is_neox_style = base, True
        angles = torch.arange(positions)[:, None] * scale * base ** (-torch.arange(HEAD // 2) / (HEAD // 2))
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), -1))


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    pass


class MRotaryEmbedding(RotaryEmbedding):
    pass


class Attention(nn.Module):  # type: ignore[misc]
    pass


class SelfAttention(nn.Module):  # type: ignore[misc]
    """As models have it: the layer and its rotary embedding are children of one module."""

    def __init__(self, rotary: nn.Module | None) -> None:
        super().__init__()
        self.attn = Attention()
        if rotary is not None:
            self.rotary_emb = rotary

    def forward(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


class NormsBehind(SelfAttention):
    def forward(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = self.rotary_emb(positions, q, k)
        q, k = self.query_layernorm(q), self.key_layernorm(k)
        return self.attn(q, k, v)


class NormsBefore(SelfAttention):
    def forward(self, positions: Any, q: Any, k: Any, v: Any) -> Any:
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary_emb(positions, q, k)
        v = self.v_norm(v)
        return self.attn(q, k, v)


class Runner:
    """With the model beneath a module that captures graphs."""

    def __init__(self, *blocks: SelfAttention) -> None:
        self.model = object()
        self._blocks = nn.ModuleList(blocks)

    def get_model(self) -> nn.Module:
        return self._blocks


def rotaries(runner: Runner, **config: Any) -> Rotaries:
    about = {"max_model_len": LONGEST, "dtype": torch.bfloat16, "hf_config": 1, "hf_text_config": 1}
    return Rotaries(lambda: runner, SimpleNamespace(model_config=SimpleNamespace(**{**about, **config})))


def test_a_shared_one_is_found_for_each_layer_and_is_one() -> None:
    shared, other = RotaryEmbedding(), RotaryEmbedding(base=5e5)
    runner = Runner(SelfAttention(shared), NormsBefore(shared), SelfAttention(other))
    known = rotaries(runner)
    first, second, third = (known.of(f"layers.{n}", block.attn) for n, block in enumerate(runner._blocks))
    assert first is second is not third
    assert first.table.dtype == torch.bfloat16
    assert torch.equal(first.table, shared.cos_sin_cache.bfloat16())
    assert float(third.frequencies[-1]) == pytest.approx(5e5 ** -(31 / 32))


def test_the_table_is_as_flashinfer_has_it_where_it_rotates() -> None:
    rotary = RotaryEmbedding()
    rotary.use_flashinfer = True
    runner = Runner(SelfAttention(rotary))
    assert rotaries(runner).of(NAME, runner._blocks[0].attn).table.dtype == torch.float32


@pytest.mark.parametrize(
    ("block", "what", "fix"),
    [
        (SelfAttention(YaRNScalingRotaryEmbedding()), "is a YaRNScalingRotaryEmbedding; only a plain", "rope_scaling"),
        (SelfAttention(MRotaryEmbedding()), "is a MRotaryEmbedding; only a plain", "rope_parameters"),
        (SelfAttention(None), "no rotary embedding was found for", "without this method"),
        (NormsBehind(RotaryEmbedding()), "normalises its keys after their rotation", "without this method"),
        (SelfAttention(RotaryEmbedding(scale=0.5)), "is not that of its base", "without this method"),
    ],
)
def test_what_cannot_be_turned_is_refused(block: SelfAttention, what: str, fix: str) -> None:
    with pytest.raises(SparseMethodError, match=what) as caught:
        rotaries(Runner(block)).of(NAME, block.attn)
    assert caught.value.where == f"layer {NAME}"
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("text", "written"),
    [(1, '{"max_position_embeddings": 4000}'), (2, '{"text_config": {"max_position_embeddings": 4000}}')],
)
def test_a_table_that_is_too_short_is_refused_with_what_lengthens_it(text: int, written: str) -> None:
    block = SelfAttention(RotaryEmbedding())
    with pytest.raises(
        SparseMethodError, match=f"table has {LONGEST} positions, and a context may have 4000"
    ) as caught:
        rotaries(Runner(block), max_model_len=4000, hf_text_config=text).of(NAME, block.attn)
    assert f"--hf-overrides '{written}'" in caught.value.fix


def test_a_layer_that_is_not_in_the_model_is_refused() -> None:
    with pytest.raises(SparseMethodError, match="no rotary embedding was found"):
        rotaries(Runner(SelfAttention(RotaryEmbedding()))).of(NAME, Attention())
