"""Test blocks whose contents identify them, and helpers that save and load them."""

from __future__ import annotations

import functools
import hashlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ucm.store.base import BlockGeometry, BlockKey, BlockTransfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucm.store.base import KVStore, StoreError, TaskResult

T = TypeVar("T")

#: Sizes on both sides of every boundary that may matter to a store.
ODD = BlockGeometry((1, 4095, 4096, 4097, 10_000, 3), b"odd geometry 16B")
#: Like the KV cache of a small model: equal layer slices of whole pages.
EVEN = BlockGeometry((16_384,) * 8, b"even geometry 16", 2)
#: More layer slices than the system takes in one call.
MANY = BlockGeometry((40,) * 1_100, b"many slices 16 B", 4)


def key(number: int, nbytes: int = 32) -> BlockKey:
    return BlockKey(hashlib.blake2b(str(number).encode(), digest_size=nbytes).digest())


def content(block: BlockKey, geometry: BlockGeometry, version: int = 0) -> bytes:
    """Return a block's content; versions differ for the same key, and odd ones cannot be compressed."""
    return _content(block, geometry.nbytes, version)


@functools.lru_cache(maxsize=64)  # some tests compare the same blocks hundreds of times
def _content(block: BlockKey, nbytes: int, version: int) -> bytes:
    seed = int.from_bytes(hashlib.blake2b(block + bytes([version]), digest_size=8).digest(), "little")
    found = np.random.default_rng(seed).bytes(nbytes)
    return found if version % 2 else (np.frombuffer(found, np.uint8) & 0x1F).tobytes()


def pick(chance: np.random.Generator, items: Sequence[T], count: int | None = None) -> list[T]:
    """Return some or all of the items, in random order."""
    return [items[index] for index in chance.permutation(len(items))[:count]]


class Memory:
    """The caller's memory for one block."""

    def __init__(self, block: BlockKey, geometry: BlockGeometry, data: bytes | None = None) -> None:
        self.key = block
        self.data = bytearray(geometry.nbytes if data is None else data)
        whole = memoryview(self.data)
        ends = itertools.accumulate(geometry.slice_sizes)
        self.slices = [whole[end - size : end] for size, end in zip(geometry.slice_sizes, ends, strict=True)]

    def transfer(self, first: int = 0, count: int | None = None) -> BlockTransfer:
        slices = self.slices[first:] if count is None else self.slices[first : first + count]
        return BlockTransfer(self.key, slices, first)


#: The files of a root or a namespace as a whole.
OWN = frozenset({"NAMESPACE", "USED", "SEGMENTS"})


def files(root: str | Path) -> list[Path]:
    """Return all files below a root, except those that belong to the root or a namespace as a whole."""
    return sorted(path for path in Path(root).rglob("*") if path.is_file() and path.name not in OWN)


def filled(keys: Iterable[BlockKey], geometry: BlockGeometry, version: int = 0) -> list[Memory]:
    return [Memory(block, geometry, content(block, geometry, version)) for block in keys]


def in_order(keys: Iterable[BlockKey]) -> dict[BlockKey, int]:
    """Return the depths of blocks that follow each other in a chain, each a unit deeper than the one before it."""
    return {block: depth for depth, block in enumerate(keys)}


def save(store: KVStore, keys: Sequence[BlockKey], geometry: BlockGeometry, version: int = 0) -> TaskResult:
    """Save whole blocks, and wait for them."""
    return store.save([memory.transfer() for memory in filled(keys, geometry, version)]).wait()


def fetch(
    store: KVStore, keys: Sequence[BlockKey], geometry: BlockGeometry
) -> tuple[dict[BlockKey, bytes], dict[BlockKey, StoreError]]:
    """Load whole blocks; return the contents of the loaded ones and the errors of the others."""
    memories = [Memory(block, geometry) for block in keys]
    result = store.load([memory.transfer() for memory in memories]).wait()
    return {m.key: bytes(m.data) for m in memories if m.key in result.done}, dict(result.failed)
