"""Track transfers in progress."""

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
    """Collects the outcomes of a number of transfers.

    Args:
        transfers: The number of transfers; with 0 the task is finished.
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
        """Record a successful transfer."""
        with self._lock:
            self._done[key] = tier
            self._nbytes += nbytes
            self._finish_one()

    def failed(self, key: BlockKey, error: StoreError) -> None:
        """Record a failed transfer."""
        with self._lock:
            self._failed.setdefault(key, error)
            self._finish_one()

    def _finish_one(self) -> None:
        self._left -= 1
        if self._left == 0:
            # A key with several transfers succeeds only if all of them do.
            for key in self._failed:
                self._done.pop(key, None)
            self._seconds = time.perf_counter() - self._started
            self._event.set()
            if self._then is not None:
                self._then()

    def when_finished(self, then: Callable[[], None]) -> None:
        """Set a callback for the end of the last transfer; call this before any transfer ends."""
        self._then = then

    def finished_within(self, seconds: float) -> bool:
        """Wait at most ``seconds`` and return whether every transfer has ended."""
        return self._event.wait(seconds)

    def is_finished(self) -> bool:
        """Return whether every transfer has ended."""
        return self._event.is_set()

    def result(self) -> TaskResult:
        """Wait for the last transfer and return the outcomes."""
        self._event.wait()
        return TaskResult(self._done, self._failed, self._nbytes, self._seconds)
