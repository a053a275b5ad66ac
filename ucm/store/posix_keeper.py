"""The thread that looks after a tier's directories: times of last use, capacity, left-over files.

Any number of engines and hosts may keep one directory: all that a keeper does is deleting single files, and finding one
deleted already is normal to it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from os import utime
from typing import TYPE_CHECKING

from ucm.logger import get_logger
from ucm.store.background import enter_background
from ucm.store.posix_survey import evict, survey
from ucm.store.posix_tidy import tidy

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucm.store.posix_directory import Directory

#: Down to which part of the capacity blocks are deleted, once there are more.
_EVICT_TO = 0.95
#: A directory is looked at again after this part of the capacity was written to it, and not twice within a moment.
_SURVEY_STEP = 0.01
_SURVEY_PAUSE = 0.1
#: A directory that we write to is looked at again after so many seconds, as others write too; any other one seldom.
_SURVEY_SECONDS = 60.0
_IDLE_SECONDS = 600.0
#: The first look, unless much is written at once, waits until an engine that starts is through with its first requests.
_FIRST_SECONDS = 5.0
_NICEST = 19


class Keeper:
    """One thread, started when the tier is first used for a transfer.

    Args:
        directories: The tier's.
        capacity_bytes: What all of them may use together; each has an equal share.
        stale_seconds: See ``StoreConfig``.
        evicted: Called with the path of each block that was deleted to make room.
    """

    def __init__(
        self,
        directories: list[Directory],
        capacity_bytes: int | None,
        stale_seconds: float,
        evicted: Callable[[str], None],
    ) -> None:
        self._directories = directories
        self._share = None if capacity_bytes is None else capacity_bytes / len(directories)
        self._stale_seconds = stale_seconds
        self._evicted = evicted
        self._lock = threading.Lock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._touches: deque[str] = deque()
        self._used: dict[Directory, float] = {}  # as of the last survey
        self._written: dict[Directory, int] = dict.fromkeys(directories, 0)  # by us since then
        self._busy = False  # whether we wrote since the last regular survey
        self._full: set[Directory] = set()
        self._next_survey = self._next_tidy = float("inf")

    def start(self) -> None:
        """Begin, unless it has."""
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed:
                    self._next_survey = self._next_tidy = time.monotonic() + _FIRST_SECONDS
                    self._thread = threading.Thread(target=self._run, name="ucm-keeper", daemon=True)
                    self._thread.start()
                    self._wake.set()

    def touch(self, path: str) -> None:
        """Note that a block was used; its time is renewed soon."""
        self._touches.append(path)
        self._wake.set()

    def wrote(self, directory: Directory, nbytes: int) -> None:
        """Note that a block became visible."""
        with self._lock:
            self._busy = True
            self._written[directory] += nbytes
            written = self._written[directory]
        share = self._share
        if share is not None and (written > share * _SURVEY_STEP or self._used.get(directory, 0.0) + written > share):
            self._wake.set()

    def full(self, directory: Directory) -> None:
        """Note that the medium has no room although the capacity is not used up."""
        if self._share is not None:
            self._full.add(directory)
            self._wake.set()

    @property
    def used_bytes(self) -> int | None:
        """What all directories hold, as far as known."""
        if not self._used:
            return None
        with self._lock:
            return int(sum(self._used.values()) + sum(self._written.values()))

    def close(self) -> None:
        """Renew the last times, and end."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._stop.set()
        self._wake.set()
        if thread is not None:
            thread.join()
        self._renew()

    def _run(self) -> None:
        enter_background(_NICEST)
        while not self._stop.is_set():
            try:
                self._round()
            except Exception:  # noqa: BLE001 - a keeper that ends would let the store grow without bounds
                get_logger().exception("[UCM.Store] the keeper failed in a way it must not")
            self._stop.wait(_SURVEY_PAUSE)
            self._wake.wait(max(0.0, min(self._next_survey, self._next_tidy) - time.monotonic()))
            self._wake.clear()

    def _round(self) -> None:
        self._renew()
        now = time.monotonic()
        for directory in self._directories:
            with suppress(OSError):  # a directory that cannot be listed now may be next time
                looks = now >= self._next_survey or self._must_look(directory)
                if looks or now >= self._next_tidy:
                    directory.layout.mend()  # without its marker, a namespace is neither tidied nor surveyed
                if now >= self._next_tidy:
                    tidy(directory.layout.root, self._stale_seconds)
                if looks:
                    self._look(directory)
        if now >= self._next_tidy:
            self._next_tidy = now + _IDLE_SECONDS
        if now >= self._next_survey:
            self._next_survey = now + (_SURVEY_SECONDS if self._busy else _IDLE_SECONDS)
            self._busy = False

    def _renew(self) -> None:
        while self._touches:
            with suppress(OSError):
                utime(self._touches.popleft())

    def _must_look(self, directory: Directory) -> bool:
        share, written = self._share, self._written[directory]
        if share is None:
            return False
        return (
            directory in self._full
            or written > share * _SURVEY_STEP
            or self._used.get(directory, 0.0) + written > share
        )

    def _look(self, directory: Directory) -> None:
        """Take stock, and delete what is too much."""
        with self._lock:
            self._written[directory] = 0
        full = directory in self._full
        self._full.discard(directory)
        root = directory.layout.root
        found = survey(root)
        self._used[directory] = found.nbytes
        if self._share is None:
            return
        if full or found.nbytes > self._share:
            target = _EVICT_TO * (min(found.nbytes, self._share) if full else self._share)
            count, freed = evict(root, found, found.nbytes - target, self._evicted)
            self._used[directory] = found.nbytes - freed
            get_logger().debug("[UCM.Store] %d blocks evicted from %s, which lost %d bytes", count, root, freed)
