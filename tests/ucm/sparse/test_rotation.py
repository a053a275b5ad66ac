"""Turning back what was rotated: exactly, and with less of an error than a key that was stored as it was."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from tests.ucm.integration.vllm.sparse.rerope_truth import BASE, HEAD, STYLES, Style, turned
from ucm.rotary import Rotary
from ucm.rotary import turned as turned_by

LENGTH, HEADS = 4096, 4


def rotary(style: Style, dtype: torch.dtype) -> Rotary:
    half = style.rotated // 2
    frequencies = BASE ** (-torch.arange(half) / half)
    angles = torch.arange(LENGTH)[:, None] * frequencies
    return Rotary(torch.cat((angles.cos(), angles.sin()), -1).to(dtype), style.neox, frequencies)


def as_vllm_does(keys: torch.Tensor, by: Rotary) -> torch.Tensor:
    """Rotated by the rounded table, in float32, and rounded."""
    cosines, sines = (part[:, None] for part in by.table.float().chunk(2, -1))
    half = cosines.shape[-1]
    found = keys.float().clone()
    for place in range(half):
        pair = (place, place + half) if by.neox else (2 * place, 2 * place + 1)
        one, other = (keys[..., number].float() for number in pair)
        cosine, sine = cosines[..., place], sines[..., place]
        found[..., pair[0]], found[..., pair[1]] = one * cosine - other * sine, other * cosine + one * sine
    return found.to(keys.dtype)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).square().mean().sqrt())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_turned_back_is_the_key(style: Style, dtype: torch.dtype) -> None:
    exact = torch.randn((LENGTH, HEADS, HEAD), generator=torch.Generator().manual_seed(0))
    keys, by = exact.to(dtype), rotary(style, dtype)
    factors = by.factors(torch.arange(LENGTH), torch.zeros(1))
    stored = as_vllm_does(keys, by)
    assert error(stored, keys) > 0.3
    found = turned_by(stored, factors, neox=by.neox)
    assert found.dtype == dtype
    assert torch.equal(found[..., style.rotated :], keys[..., style.rotated :])
    if dtype == torch.float32:
        torch.testing.assert_close(found, keys, rtol=0, atol=2e-6)
    else:
        # What storing this key in this dtype has cost: turning back costs less, and mostly nothing.
        assert error(found, keys) < 0.8 * error(keys, exact)
        assert float((found == keys).float().mean()) > 0.75


@pytest.mark.parametrize("style", STYLES)
def test_it_is_turned_to_any_position(style: Style) -> None:
    keys = torch.randn((LENGTH, HEADS, HEAD), generator=torch.Generator().manual_seed(0))
    by = rotary(style, torch.float32)
    at = torch.arange(LENGTH) / 3.5 + 100
    found = turned_by(as_vllm_does(keys, by), by.factors(torch.arange(LENGTH), at), neox=by.neox)
    torch.testing.assert_close(found.double(), turned(keys, at, style), rtol=0, atol=2e-3)
