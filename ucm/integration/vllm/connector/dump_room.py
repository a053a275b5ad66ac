"""Host memory where blocks wait for being written, so that a medium keeps no block of the KV cache."""

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

#: Rows are cut from memory that is asked for in portions of about so many bytes.
EXTENT_BYTES = 8 << 20
#: Rows that were not needed for so many seconds, up to twice that, are given back to the system. The first use of a
#: page costs ten times what copying a page does.
KEEP_SECONDS = 60.0


class DumpRoom:
    """Lets blocks in until their bytes reach the limit, and remembers those that it turned away.

    One thread asks for room; any other takes rows and gives them back.

    Args:
        limit: Bytes that may wait or be under way.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = Lock()
        self._taken = 0
        self._refused: set[BlockKey] = set()
        self._free: dict[int, list[Buffer]] = {}  # by the rows' bytes
        self._free_bytes = 0
        self._since = time.monotonic()
        self._most = self._most_before = 0  # bytes taken at once since then, and in the time before

    @property
    def held_bytes(self) -> int:
        """Memory that was asked of the system and not given back."""
        with self._lock:
            return self._taken + self._free_bytes

    @property
    def taken_bytes(self) -> int:
        """What waits, or is being written."""
        with self._lock:
            return self._taken

    def take(self, keys: Sequence[BlockKey], nbytes: int) -> list[tuple[int, Buffer]]:
        """Rows for blocks of this many bytes each; something is let in whenever nothing waits.

        A block that one layer was refused of cannot become whole: its further layers leave their room to others.

        Returns:
            The places in ``keys`` of those that have room, each with its row.
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
        """These rows are read no longer, and what was in them waits no longer."""
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
        """Those of the keys that were refused; they may be dumped anew."""
        found = self._refused.intersection(keys)
        self._refused -= found
        return found

    def error(self) -> StoreFullError:
        """Why there was no room."""
        return too_far_behind(self._limit)

    def _row(self, nbytes: int) -> Buffer | None:
        """Memory for one block; None if the system has none."""
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
        """Let go of memory no row of which is in use, until so many bytes are left."""
        for nbytes, rows in self._free.items():
            whole = max(1, EXTENT_BYTES // nbytes)
            idle = {extent for extent, count in Counter(id(row.obj) for row in rows).items() if count == whole}
            while idle and self._free_bytes - whole * nbytes >= keep:
                gone = idle.pop()
                rows[:] = [row for row in rows if id(row.obj) != gone]
                self._free_bytes -= whole * nbytes
