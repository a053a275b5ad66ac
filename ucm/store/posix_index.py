"""What a process knows of which blocks are there, once it has asked often: their names, without asking again.

A test of a directory entry takes microseconds, and in a store of a million blocks several. So when enough keys have
been asked for one by one, a thread lists the names once, and from then on only keys that are not among them are asked
for. The log of removals says what to forget. A key that is known and yet gone, since somebody deleted files by hand,
is found out by loading it, or when the names are listed again.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from ucm.store.background import enter_background
from ucm.store.posix_layout import buckets, key_of
from ucm.store.posix_removals import PREFIX_BYTES, Position, read_removals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockKey
    from ucm.store.posix_layout import Layout
    from ucm.store.posix_removals import Prefixes

INDEX_THREAD = "ucm-index"
#: After so many tests of directory entries, listing the names is worth it.
WORTH = 2_000
#: How many keys are kept apart before they are merged into the sorted names.
_APART = 65_536
#: After so many seconds the names are listed again: somebody may have deleted files by hand.
_LISTED_SECONDS = 600.0


class NameIndex:
    """The names of the blocks of one namespace in some directories.

    Args:
        layouts: The directories.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self._layouts = layouts
        self._lock = threading.Lock()
        self._names: Prefixes | None = None  # sorted; the first 8 bytes of each key
        self._positions: list[Position] = []
        self._added: set[bytes] = set()
        self._dropped: set[bytes] = set()
        self._tests = 0
        self._listed = 0.0
        self._thread: threading.Thread | None = None
        self._closed = False

    def known(self, keys: Sequence[BlockKey]) -> list[bool] | None:
        """Whether each block is known to be there; None as long as nothing is known."""
        if self._names is None or (names := self._catch_up()) is None:
            return None
        if time.monotonic() - self._listed > _LISTED_SECONDS:
            self._start()
        wanted = np.frombuffer(b"".join([key[:PREFIX_BYTES] for key in keys]), dtype=np.uint64)
        found = _among(names, wanted)
        if self._added:
            for index in np.flatnonzero(~found).tolist():
                found[index] = keys[index][:PREFIX_BYTES] in self._added
        if self._dropped:
            for index in np.flatnonzero(found).tolist():
                found[index] = keys[index][:PREFIX_BYTES] not in self._dropped
        result: list[bool] = found.tolist()
        return result

    def add(self, keys: Sequence[BlockKey]) -> None:
        """Note blocks that are there."""
        if self._names is None:
            return
        with self._lock:
            prefixes = [key[:PREFIX_BYTES] for key in keys]
            self._added.update(prefixes)
            self._dropped.difference_update(prefixes)
            if len(self._added) > _APART:
                self._merge()

    def drop(self, key: BlockKey) -> None:
        """Note a block that is gone, or damaged."""
        if self._names is None:
            return
        with self._lock:
            self._added.discard(key[:PREFIX_BYTES])
            self._dropped.add(key[:PREFIX_BYTES])
            if len(self._dropped) > _APART:
                self._merge()

    def tested(self, keys: int) -> None:
        """Count keys that had to be asked for; the names are listed once there were many."""
        if self._names is None:
            self._tests += keys
            if self._tests >= WORTH:
                self._start()

    def forget(self) -> None:
        """Know nothing any more, until many keys have been asked for again."""
        with self._lock:
            self._names = None
            self._added, self._dropped = set(), set()
            self._tests = 0

    def close(self) -> None:
        """End the listing, should it be under way."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._list, name=INDEX_THREAD, daemon=True)
                self._thread.start()

    def _catch_up(self) -> Prefixes | None:
        """Read the logs: the names that are left, None if all is to be forgotten."""
        try:
            read = [read_removals(*pair) for pair in zip(self._layouts, self._positions, strict=True)]
        except OSError:
            read = [(Position(), None)]
        if any(removed is None for _, removed in read):
            self.forget()
            return None
        with self._lock:
            self._positions = [position for position, _ in read]
            for _, removed in read:
                if removed is not None and removed.size:
                    prefixes = [prefix.tobytes() for prefix in removed]
                    self._added.difference_update(prefixes)
                    self._dropped.update(prefixes)
            if len(self._dropped) > _APART:
                self._merge()
            return self._names

    def _merge(self) -> None:
        if self._names is None:
            return
        names = np.concatenate([self._names, _array(self._added)])
        names.sort()
        if self._dropped:
            names = names[~_among(np.sort(_array(self._dropped)), names)]
        self._names = names
        self._added, self._dropped = set(), set()

    def _list(self) -> None:
        """List all names, in a thread of its own; half of the time is left to others."""
        enter_background()
        try:
            positions = [read_removals(layout, None)[0] for layout in self._layouts]
            parts: list[Prefixes] = []
            names: Prefixes | None
            for layout in self._layouts:
                for bucket in buckets(layout):
                    if self._closed:
                        return  # and leave the thread to be joined
                    began = time.monotonic()
                    parts.append(_names_in(bucket))
                    time.sleep(time.monotonic() - began)
            names = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)
            names.sort()
        except OSError:
            names = None  # a directory that cannot be listed now may be when many keys have been asked for again
        with self._lock:
            self._thread = None
            self._tests = 0
            if names is not None:
                self._listed = time.monotonic()
                self._added = set()
                self._positions = positions
                self._names = names


def _names_in(bucket: str) -> Prefixes:
    names: list[str] = []
    with suppress(FileNotFoundError):
        names = os.listdir(bucket)  # noqa: PTH208 - names are all that is needed
    start, rest = bucket[-2:], 2 * PREFIX_BYTES - 2
    try:
        joined = bytes.fromhex("".join([start + name[:rest] for name in names]))
    except ValueError:
        joined = b""
    if len(joined) != PREFIX_BYTES * len(names):  # there is something else among the blocks
        keys = [key for key in (key_of(bucket, name) for name in names) if key is not None]
        joined = b"".join([key[:PREFIX_BYTES] for key in keys])
    return np.frombuffer(joined, dtype=np.uint64)


def _array(prefixes: set[bytes]) -> Prefixes:
    return np.frombuffer(b"".join(prefixes), dtype=np.uint64)


def _among(names: Prefixes, wanted: Prefixes) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of the wanted are among the names, which are sorted."""
    if not names.size:
        return np.zeros(wanted.size, dtype=np.bool_)
    places = np.minimum(names.searchsorted(wanted), names.size - 1)
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = names[places] == wanted
    return found
