"""Transfers under way."""

from __future__ import annotations

import time
from threading import Event, Lock
from typing import TYPE_CHECKING

from ucm.store.base import Task, TaskResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucm.store.base import BlockKey
    from ucm.store.errors import StoreError


class TransferTask(Task):
    """Collects how each of a number of transfers ends.

    Args:
        transfers: How many there are; with none the task is finished.
    """

    def __init__(self, transfers: int) -> None:
        self._started = time.perf_counter()
        self._lock = Lock()
        self._left = transfers
        self._done: dict[BlockKey, str] = {}
        self._failed: dict[BlockKey, StoreError] = {}
        self._nbytes = 0
        self._seconds = 0.0
        self._event = Event()
        self._then: Callable[[], None] | None = None
        if not transfers:
            self._event.set()

    def succeeded(self, key: BlockKey, tier: str, nbytes: int) -> None:
        """One transfer went well."""
        with self._lock:
            self._done[key] = tier
            self._nbytes += nbytes
            self._finish_one()

    def failed(self, key: BlockKey, error: StoreError) -> None:
        """One transfer failed."""
        with self._lock:
            self._failed.setdefault(key, error)
            self._finish_one()

    def _finish_one(self) -> None:
        self._left -= 1
        if self._left == 0:
            # A key in several transfers went well only if all of them did.
            for key in self._failed:
                self._done.pop(key, None)
            self._seconds = time.perf_counter() - self._started
            self._event.set()
            if self._then is not None:
                self._then()

    def when_finished(self, then: Callable[[], None]) -> None:
        """Have something done when every transfer has ended; called before any has."""
        self._then = then

    def finished_within(self, seconds: float) -> bool:
        """Wait for the end, so long at most; whether every transfer has ended."""
        return self._event.wait(seconds)

    def is_finished(self) -> bool:
        """Whether every transfer has ended."""
        return self._event.is_set()

    def result(self) -> TaskResult:
        """Wait for the end."""
        self._event.wait()
        return TaskResult(self._done, self._failed, self._nbytes, self._seconds)
