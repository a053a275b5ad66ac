"""Copies of blocks between a device and staging memory, with torch's CPU as the device."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.ucm.integration.vllm.connector.tensors import LAYOUTS, layer_views, tensor
from ucm.integration.vllm.connector.kv_cache import CacheGroup, DeviceMemory, HostMemory, tensors_of

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests beside vLLM")

from tests.ucm.integration.vllm.connector.torch_tensors import all_as_torch

BLOCKS = 6

#: KV caches by name: one layer or several, one byte range per block or more, of a multiple of eight bytes or not.
CACHES: dict[str, dict[str, Any]] = {
    "blocks first": {"a": tensor((BLOCKS, 4, 8, 2)), "b": tensor((BLOCKS, 4, 8, 2), dtype="float32")},
    "planes first": {"a": tensor((2, BLOCKS, 8, 4)), "b": tensor((2, BLOCKS, 8, 4), (0, 1, 3, 2))},
    "split for the kernels": {"a": tensor((2 * BLOCKS, 4, 8)), "b": tensor((2, 2 * BLOCKS, 4, 8))},
    "odd sizes": {"a": tensor((BLOCKS, 3, 5), dtype="uint8"), "b": tensor((2, BLOCKS, 7), dtype="uint8", offset=3)},
    "with gaps": {"a": tensor((BLOCKS, 4, 8), gaps=(4, 0, 0)), "b": tensor((BLOCKS, 3, 4), gaps=(0, 8, 0), offset=4)},
    "keys apart from values": {
        "a": (tensor((BLOCKS, 4, 8)), tensor((BLOCKS, 4, 8))),
        "b": (tensor((BLOCKS, 4, 8)), tensor((BLOCKS, 3, 5), dtype="uint8")),
    },
    **{name: dict(zip("abc", layer_views(name, (3, BLOCKS, 2, 4, 4)), strict=True)) for name in LAYOUTS},
}


@pytest.fixture(params=CACHES)
def caches(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = CACHES[request.param]
    return found


def memory_of(kind: type[Any], caches: dict[str, Any]) -> Any:
    pages = {
        name: sum(prod(part.shape) // BLOCKS * part.element_size() for part in tensors_of(found))
        for name, found in caches.items()
    }
    return kind(CacheGroup(0, 8, None, pages, tuple(caches)), all_as_torch(caches), BLOCKS, {})


def bytes_of(host: HostMemory, block: int, layer: int) -> bytes:
    return b"".join(host.buffers([block], range(layer, layer + 1)))


def test_a_gathered_row_is_what_the_host_would_read_in_place(caches: dict[str, Any]) -> None:
    device, host = memory_of(DeviceMemory, caches), memory_of(HostMemory, caches)
    assert device.geometry.nbytes == host.geometry.nbytes
    assert device.geometry.element_size == host.geometry.element_size
    assert device.geometry.fingerprint != host.geometry.fingerprint
    staging = device.staging(4)
    assert [tuple(rows.shape) for rows in staging] == [(4, layout.block_bytes) for layout in device.layouts]
    for blocks in ([4, 0, 3], [5], [0, 1, 2, 3]):
        device.gather(blocks, range(len(caches)), staging)
        for layer in range(len(caches)):
            found = [bytes(row) for row in staging[layer].numpy()[: len(blocks)]]
            assert found == [bytes_of(host, block, layer) for block in blocks]


def test_only_the_layers_asked_for_are_gathered(caches: dict[str, Any]) -> None:
    device = memory_of(DeviceMemory, caches)
    staging = device.staging(2)
    for rows in staging:
        rows.fill_(7)
    device.gather([1, 2], range(1, 2), staging)
    assert [bool((rows == 7).all()) for rows in staging] == [layer != 1 for layer in range(len(caches))]


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 2], [1], [2, 0]])
def test_scattered_rows_reach_their_blocks_and_nothing_else(caches: dict[str, Any], rows: list[int]) -> None:
    device, host = memory_of(DeviceMemory, caches), memory_of(HostMemory, caches)
    every = [part for found in caches.values() for part in tensors_of(found)]
    before = [part.raw.copy() for part in every]
    were = [[bytes_of(host, block, layer) for block in range(BLOCKS)] for layer in range(len(caches))]
    staging = device.staging(3)
    for layer, given in enumerate(staging):
        given.copy_(given.new_tensor(np.random.default_rng(layer).integers(0, 256, tuple(given.shape), np.uint8)))
    blocks = [5, 0, 2][: len(rows)]
    device.scatter(rows, blocks, range(len(caches)), staging)
    for layer in range(len(caches)):
        expected = list(were[layer])
        for row, block in zip(rows, blocks, strict=True):
            expected[block] = bytes(staging[layer].numpy()[row])
        assert [bytes_of(host, block, layer) for block in range(BLOCKS)] == expected
    # Neither the gaps nor the memory between the layers of one allocation has changed.
    for part, was in zip(every, before, strict=True):
        touched = np.zeros(part.raw.size, bool)
        for other in every:
            if other.raw is part.raw:
                for start in other.places().flat:
                    touched[start : start + other.element_size()] = True
        assert (part.raw[~touched] == was[~touched]).all()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_slice_of_heads_moves_between_ranks_of_any_number(name: str) -> None:
    """What one rank of two gathers, a rank alone scatters into its half of the heads, and gathers again."""
    whole, half = (dict(zip("abc", layer_views(name, (3, BLOCKS, heads, 4, 4)), strict=True)) for heads in (4, 2))
    heads, pages = SimpleNamespace(num_kv_heads=2), dict.fromkeys("abc", 2 * 4 * 4 * 2)
    alone = CacheGroup(0, 4, None, pages, tuple("abc"), spec=heads, slices=2)
    (own,) = replace(alone, slices=1).parts
    source = DeviceMemory(own, all_as_torch(half), BLOCKS, {})
    staging = source.staging(2)
    source.gather([1, 4], range(3), staging)
    for part in alone.parts:
        before = {layer: view.view().copy() for layer, view in whole.items()}
        target = DeviceMemory(part, all_as_torch(whole), BLOCKS, {})
        assert target.geometry == source.geometry
        target.scatter([0, 1], [3, 0], range(3), staging)
        own_heads = slice(2 * part.place, 2 * part.place + 2)
        for layer, was in before.items():
            was[[3, 0], own_heads] = half[layer].view()[[1, 4]]
            assert np.array_equal(whole[layer].view().view(np.uint16), was.view(np.uint16)), "and nothing else"
        again = target.staging(2)
        target.gather([3, 0], range(3), again)
        assert all(bool((rows == given).all()) for rows, given in zip(again, staging, strict=True))


def test_the_host_reads_and_writes_torchs_own_memory() -> None:
    caches = {"a": tensor((2, BLOCKS, 8, 4))}
    host = memory_of(HostMemory, caches)
    for buffer in host.buffers([3], range(1)):
        buffer[:] = b"\x01" * buffer.nbytes
    assert (caches["a"].view()[:, 3].view(np.uint8) == 1).all()
