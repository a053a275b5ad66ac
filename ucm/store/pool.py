"""Threads that work off one queue, started when there is something to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ucm.logger import get_logger
from ucm.store.background import enter_background

if TYPE_CHECKING:
    from collections.abc import Iterable

Job = Callable[[], None]


class Pool:
    """A few daemon threads.

    Args:
        name: Their name, of at most 13 characters so that system tools show it whole.
        threads: How many.
        nice: How much they give way to the process's other threads.
        before: Called before each job; it returns when the job may be done.
    """

    def __init__(self, name: str, threads: int, nice: int = 0, before: Callable[[], None] | None = None) -> None:
        self._name = name
        self._count = threads
        self._nice = nice
        self._before = before
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._closed = False

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue jobs, done in order as far as one thread is concerned. A job must not raise.

        Raises:
            ValueError: The pool is closed.
        """
        with self._lock:
            if self._closed:
                raise ValueError("the store is closed")
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._run, name=f"{self._name}-{i}", daemon=True)
                    for i in range(self._count)
                ]
                for thread in self._threads:
                    thread.start()
            for job in jobs:
                self._queue.put(job)

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        enter_background(self._nice)
        while (job := self._queue.get()) is not None:
            try:
                if self._before is not None:
                    self._before()
                job()
            except Exception:  # noqa: BLE001 - a thread that ends would leave its queue waiting for ever
                get_logger().exception("[UCM.Store] a job of %s failed in a way it must not", self._name)
