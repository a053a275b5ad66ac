"""Undoing and redoing the rotation of keys, and detecting a wrong rotation."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from ucm.rotary import Rotation, differs, tolerance

HEADS, HEAD, POSITIONS = 3, 32, 512


def rotation(size: int, *, neox: bool, dtype: torch.dtype, base: float = 1e4, scale: float = 1.0) -> Rotation:
    """Return a rotation with a table like vLLM's: cosines and sines, in the model's dtype."""
    turns = base ** (-torch.arange(0, size, 2).float() / size)
    angles = torch.arange(POSITIONS).float()[:, None] * turns
    return Rotation((torch.cat((angles.cos(), angles.sin()), dim=-1) * scale).to(dtype), neox)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("size", [HEAD, HEAD // 2])
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_a_key_moves_to_another_place(dtype: torch.dtype, neox: bool, size: int, scale: float) -> None:
    """Including partial rotation, and a table that scales, like YaRN's."""
    keys = torch.randn(20, HEADS, HEAD, generator=torch.Generator().manual_seed(0)).to(dtype)
    turn = rotation(size, neox=neox, dtype=dtype, scale=scale)
    stored_at, wanted_at = torch.arange(20) + 7, torch.arange(20) * 11 + 200
    cached = turn.done(keys, stored_at)
    assert bool((differs(cached, keys) > 0.1).all())
    moved = turn.done(turn.taken_back(cached, stored_at), wanted_at)
    assert float(differs(moved, turn.done(keys, wanted_at)).max()) < tolerance(dtype)
    assert torch.equal(moved[..., size:], keys[..., size:])


def test_both_styles_are_vllms() -> None:
    """Checked by hand on one pair: NeoX rotates elements of the two halves of a head, GPT-J neighbours."""
    keys = torch.zeros(1, 1, 4)
    keys[..., 0] = 1.0
    angle = torch.tensor([[0.25, 0.5]])
    table = torch.cat((angle.cos(), angle.sin()), dim=-1)
    place = torch.tensor([0])
    cosine, sine = float(torch.tensor(0.25).cos()), float(torch.tensor(0.25).sin())
    assert Rotation(table, neox=True).done(keys, place).flatten().tolist() == pytest.approx([cosine, 0, sine, 0])
    assert Rotation(table, neox=False).done(keys, place).flatten().tolist() == pytest.approx([cosine, sine, 0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_gate_sees(dtype: torch.dtype) -> None:
    """Another base, a shift by one token, and garbage differ by far more than rounding."""
    keys = torch.randn(20, HEADS, HEAD, generator=torch.Generator().manual_seed(1)).to(dtype)
    right = rotation(HEAD, neox=True, dtype=dtype)
    at = torch.arange(20) + 100
    wanted = right.done(keys, at)
    wrong = [
        rotation(HEAD, neox=True, dtype=dtype, base=5e5).done(keys, at),
        right.done(keys, at + 1),
        rotation(HEAD, neox=False, dtype=dtype).done(keys, at),
        keys,
        torch.full_like(keys, torch.nan),
        torch.zeros_like(keys),
    ]
    for one in wrong:
        assert float(differs(one, wanted).min()) > tolerance(dtype)
    assert float(differs(wanted, wanted).max()) == 0.0
