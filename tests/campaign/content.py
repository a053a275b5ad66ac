"""Blocks with known content: a block's key determines its bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numpy.random import SFC64, Generator

from ucm.store.base import BlockGeometry, BlockKey, BlockTransfer

if TYPE_CHECKING:
    import random

_KIB = 1024


@dataclass(frozen=True)
class Corpus:
    """A set of blocks.

    Args:
        seed: Determines the keys and the bytes.
        count: The number of blocks.
        slice_sizes: The bytes of each block's layer slices.
    """

    seed: int
    count: int
    slice_sizes: tuple[int, ...]

    @property
    def geometry(self) -> BlockGeometry:
        """The geometry of a block."""
        name = repr((self.seed, self.slice_sizes)).encode()
        return BlockGeometry(self.slice_sizes, hashlib.blake2b(name, digest_size=16).digest())

    def key(self, index: int) -> BlockKey:
        """Return a block's key."""
        return BlockKey(hashlib.blake2b(f"{self.seed}/{index}".encode(), digest_size=32).digest())

    def slices(self, index: int, edition: int = 0) -> list[bytes]:
        """Return a block's layer slices; another edition has other bytes under the same key."""
        generator = Generator(SFC64([self.seed, index, edition]))
        return [generator.bytes(size) for size in self.slice_sizes]

    def transfer(self, index: int, edition: int = 0) -> BlockTransfer:
        """Return a transfer that saves a whole block."""
        return BlockTransfer(self.key(index), [memoryview(layer_slice) for layer_slice in self.slices(index, edition)])

    def room(self, index: int) -> BlockTransfer:
        """Return memory to load a block into, filled with bytes that no block has."""
        return BlockTransfer(self.key(index), [memoryview(bytearray(b"\xa5" * size)) for size in self.slice_sizes])

    def edition_of(self, index: int, loaded: BlockTransfer, editions: int = 1) -> int | None:
        """Return the edition of a loaded block; None if its bytes are those of no edition."""
        found = [bytes(layer_slice) for layer_slice in loaded.slices]
        return next((edition for edition in range(editions) if self.slices(index, edition) == found), None)


def random_corpus(rng: random.Random, count: int) -> Corpus:
    """Return a corpus with blocks of a random shape, of about 20 to 500 KiB."""
    shapes = (
        tuple(rng.randrange(1, 24 * _KIB) for _ in range(rng.randrange(2, 24))),
        (4 * _KIB,) * rng.randrange(4, 40),
        (128 * _KIB,) * rng.randrange(2, 5),
        tuple(rng.choice((64 * _KIB, 100_000, 130_001)) for _ in range(rng.randrange(1, 4))),
    )
    return Corpus(rng.getrandbits(48), count, rng.choice(shapes))
