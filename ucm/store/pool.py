"""Threads that work off one queue, started when there is something to do.

A medium can keep a thread for ever: no system interrupts a read of a file whose server does not answer. So each medium
has a pool of its own. Where all of a pool's threads are stuck, what waits is refused instead of waiting with them, and
once per rest one more thread tries whether the medium answers again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ucm.background import enter_background
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

Job = Callable[[], None]

#: How many threads are started in place of stuck ones; a medium that keeps as many is not tried again until it lets one
#: go.
_MOST_EXTRA = 8


@dataclass(frozen=True, slots=True)
class RefusableJob:
    """A job for which something else is done where it cannot be.

    Args:
        run: The job.
        refuse: What is done instead, by whichever thread finds out.
    """

    run: Job
    refuse: Job

    def __call__(self) -> None:
        """Do the job."""
        self.run()


class Pool:
    """A few daemon threads.

    Args:
        name: Their name, of at most 13 characters so that system tools show it whole.
        threads: How many.
        nice: How much they give way to the process's other threads.
        before: Called before each job; it returns when the job may be done.
        patience: After how many seconds in one job a thread counts as stuck.
        rest: How many seconds after all were found stuck one more is started; never after an infinite time.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        nice: int = 0,
        before: Job | None = None,
        *,
        patience: float = math.inf,
        rest: float = 30.0,
    ) -> None:
        self._name = name
        self._count = threads
        self._nice = nice
        self._before = before
        self._patience = patience
        self._rest = rest
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._began: dict[int, float] = {}  # of the threads that have a job: since when
        self._rest_until = 0.0
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
            while len(self._threads) < self._count:
                self._start()
            if self._is_stuck() and self._rest_until and time.monotonic() >= self._rest_until:
                self._rest_until = 0.0
                if len(self._threads) < self._count + _MOST_EXTRA:
                    self._start()
            for job in jobs:
                self._queue.put(job)
        self.relieve()

    def relieve(self) -> None:
        """Refuse what waits, if all threads are stuck; whoever waits for a job's end calls this now and then."""
        if len(self._began) < len(self._threads) or not self._is_stuck():
            return
        with self._lock:
            if not self._is_stuck():
                return
            now = time.monotonic()
            if not self._rest_until:
                self._rest_until = now + self._rest
                get_logger(__name__).warning(
                    "[UCM.Store] all threads of %s have been stuck for %.1f s: what waits for them is refused",
                    self._name,
                    now - max(self._began.values()),
                )
            waiting = self._drain()
            for job in waiting:
                if not isinstance(job, RefusableJob):
                    self._queue.put(job)
        for job in waiting:
            if isinstance(job, RefusableJob):
                job.refuse()

    @property
    def is_stuck(self) -> bool:
        """Whether none of the threads gets on."""
        with self._lock:
            return self._is_stuck()

    def close(self) -> None:
        """Finish what is queued and end the threads; those that are stuck are left to themselves."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            for _ in threads:
                self._queue.put(None)
        for thread in threads:
            while thread.is_alive() and not self.is_stuck:
                thread.join(min(1.0, self._patience))
        self.relieve()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _is_stuck(self) -> bool:
        began = list(self._began.values())
        return bool(began) and len(began) >= len(self._threads) and time.monotonic() - max(began) >= self._patience

    def _drain(self) -> list[Job | None]:
        found: list[Job | None] = []
        try:
            while True:
                found.append(self._queue.get_nowait())
        except Empty:
            return found

    def _run(self) -> None:
        enter_background(self._nice)
        me = threading.get_ident()
        while (job := self._queue.get()) is not None:
            self._began[me] = began = time.monotonic()
            try:
                if self._before is not None:
                    self._before()
                job()
            except Exception:  # noqa: BLE001 - a thread that ends would leave its queue waiting for ever
                get_logger(__name__).exception("[UCM.Store] a job of %s failed unexpectedly", self._name)
            finally:
                self._began.pop(me, None)
            if time.monotonic() - began >= self._patience and self._is_one_too_many():
                return
        with self._lock:  # where all others have ended, one that is stuck is all that there is
            self._threads.remove(threading.current_thread())

    def _is_one_too_many(self) -> bool:
        """Of a thread that was stuck: whether another one has taken its place."""
        with self._lock:
            self._rest_until = 0.0
            if len(self._threads) > self._count:
                self._threads.remove(threading.current_thread())
                return True
            return False
