"""The true share of each block."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from ucm.sparse.topk.samples import block_masses


def test_masses_are_those_of_attention() -> None:
    source = torch.Generator().manual_seed(0)
    query, keys = torch.randn((2, 4, 8), generator=source), torch.randn((2, 3, 5, 2, 8), generator=source)
    found = block_masses(query, keys, 13)
    torch.testing.assert_close(found.sum(-1), torch.ones(2))
    wanted = torch.zeros(3)
    for head in range(4):
        weights = (keys[1, :, :, head // 2].flatten(0, 1)[:13] @ query[1, head] * 8**-0.5).softmax(0)
        wanted += torch.stack([weights[:5].sum(), weights[5:10].sum(), weights[10:].sum()]) / 4
    torch.testing.assert_close(found[1], wanted)
