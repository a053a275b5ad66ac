"""Provide host memory for blocks that wait to be written, so that slow media do not hold blocks of the KV cache."""

from __future__ import annotations

import mmap
import time
from collections import Counter
from threading import Lock
from typing import TYPE_CHECKING

from ucm.store.errors import too_far_behind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockKey, Buffer
    from ucm.store.errors import StoreFullError

#: Rows are cut from allocations of about this many bytes.
EXTENT_BYTES = 8 << 20
#: Rows that were not needed for this many seconds, at most twice as many, are given back to the system. The first use
#: of a page costs ten times as much as copying it.
KEEP_SECONDS = 60.0


class DumpRoom:
    """Allocates rows up to a limit of bytes, and remembers the blocks that it refused.

    One thread takes rows; any thread gives them back.

    Args:
        limit: Bytes of blocks that may wait or be in progress.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = Lock()
        self._taken = 0
        self._refused: set[BlockKey] = set()
        self._free: dict[int, list[Buffer]] = {}  # by the size of the rows in bytes
        self._free_bytes = 0
        self._since = time.monotonic()
        self._most = self._most_before = 0  # peak of taken bytes in this period and in the last one

    @property
    def held_bytes(self) -> int:
        """The memory allocated from the system, in bytes."""
        with self._lock:
            return self._taken + self._free_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes of blocks that wait or are being written."""
        with self._lock:
            return self._taken

    def take(self, keys: Sequence[BlockKey], nbytes: int) -> list[tuple[int, Buffer]]:
        """Take rows for blocks of ``nbytes`` each; at least one row is granted if none is in use.

        Once a layer of a block was refused, the block cannot become complete: its further layers are refused as well.

        Returns:
            The indexes in ``keys`` of the accepted blocks, each with its row.
        """
        found = []
        with self._lock:
            for place, key in enumerate(keys):
                if key in self._refused:
                    continue
                row = None if self._taken and self._taken + nbytes > self._limit else self._row(nbytes)
                if row is None:
                    self._refused.add(key)
                    continue
                self._taken += nbytes
                found.append((place, row))
            self._most = max(self._most, self._taken)
        return found

    def give_back(self, rows: Sequence[Buffer]) -> None:
        """Return rows that are no longer read."""
        with self._lock:
            for row in rows:
                self._free.setdefault(row.nbytes, []).append(row)
                self._free_bytes += row.nbytes
                self._taken -= row.nbytes
            now = time.monotonic()
            if now - self._since >= KEEP_SECONDS:
                self._trim(max(self._most, self._most_before) - self._taken)
                self._since, self._most_before, self._most = now, self._most, self._taken

    def forget(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Forget which of the keys were refused, so that they can be dumped again; return them."""
        found = self._refused.intersection(keys)
        self._refused -= found
        return found

    def error(self) -> StoreFullError:
        """Return the error for refused blocks."""
        return too_far_behind(self._limit)

    def _row(self, nbytes: int) -> Buffer | None:
        """Return memory for one block; None if the system has none."""
        rows = self._free.setdefault(nbytes, [])
        if not rows:
            count = max(1, EXTENT_BYTES // nbytes)
            try:
                extent = memoryview(mmap.mmap(-1, count * nbytes))
            except OSError:
                return None
            rows.extend(extent[at * nbytes : (at + 1) * nbytes] for at in range(count))
            self._free_bytes += extent.nbytes
        self._free_bytes -= nbytes
        return rows.pop()

    def _trim(self, keep: int) -> None:
        """Free allocations without used rows, until ``keep`` free bytes are left."""
        for nbytes, rows in self._free.items():
            whole = max(1, EXTENT_BYTES // nbytes)
            idle = {extent for extent, count in Counter(id(row.obj) for row in rows).items() if count == whole}
            while idle and self._free_bytes - whole * nbytes >= keep:
                gone = idle.pop()
                rows[:] = [row for row in rows if id(row.obj) != gone]
                self._free_bytes -= whole * nbytes
