"""What the machine can do with the same bytes: a plain read of files that are in the page cache, a plain copy."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class PlainBytes:
    """As many files of one block as the longest prompt has, and buffers that have been touched.

    Args:
        directory: An empty one on the disk that the stores are on.
        blocks: How many.
        block_bytes: The bytes of each.
    """

    def __init__(self, directory: Path, blocks: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self._files = [directory / f"{number}.block" for number in range(blocks)]
        self._buffer = memoryview(bytearray(os.urandom(block_bytes) * blocks))
        self._other = memoryview(bytearray(self._buffer))
        for number, file in enumerate(self._files):
            file.write_bytes(self._of(self._buffer, number))

    def read(self, nbytes: int) -> float:
        """Seconds for opening and reading files with so many bytes in all, each with one call, in one thread."""
        blocks = nbytes // self._block_bytes
        for file in self._files[:blocks]:
            file.read_bytes()
        begin = time.perf_counter()
        for number, file in enumerate(self._files[:blocks]):
            descriptor = os.open(file, os.O_RDONLY)
            got = os.readv(descriptor, [self._of(self._buffer, number)])
            os.close(descriptor)
            if got != self._block_bytes:
                raise OSError(f"{file} was read in part: {got} bytes")
        return time.perf_counter() - begin

    def copy(self, nbytes: int) -> float:
        """Seconds for copying so many bytes, block by block, in one thread."""
        begin = time.perf_counter()
        for number in range(nbytes // self._block_bytes):
            self._of(self._other, number)[:] = self._of(self._buffer, number)
        return time.perf_counter() - begin

    def _of(self, buffer: memoryview, number: int) -> memoryview:
        return buffer[number * self._block_bytes : (number + 1) * self._block_bytes]
