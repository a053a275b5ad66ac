"""Orders of elements in memory as sizes and strides."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from ucm.integration.vllm.sparse.cpu import Order


def places(shape: tuple[int, ...], axes: tuple[int, ...]) -> list[int]:
    """Of each element of an array, one after the other, its place in memory, where the axes lie in another order."""
    memory = np.arange(np.prod(shape)).reshape([shape[axis] for axis in axes])
    found: list[int] = memory.transpose(np.argsort(axes)).reshape(-1).tolist()
    return found


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((32, 64), (0, 1)),
        ((32, 64), (1, 0)),
        ((2, 16, 32, 2), (0, 2, 1, 3)),
        ((2, 16, 8, 4, 2), (3, 0, 2, 1, 4)),
        ((1, 8), (1, 0)),
        ((3, 5, 7), (2, 1, 0)),
    ],
)
def test_an_order_that_is_strides(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    wanted = torch.tensor(places(shape, axes))
    found = Order.of(wanted)
    assert found is not None
    memory = torch.arange(2 * len(wanted)).view(2, -1)
    assert torch.equal(found.view(memory).flatten(1), torch.stack((wanted, wanted + len(wanted))))


@pytest.mark.parametrize("order", [[0, 1, 3, 2], [0, 2, 1, 3, 5, 4], [1, 0, 2, 3], [0, 1, 2, 3, 4, 6, 5], [3, 2, 1, 0]])
def test_an_order_that_is_not(order: list[int]) -> None:
    assert Order.of(torch.tensor(order)) is None
