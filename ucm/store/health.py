"""Keep a medium that fails or hangs from holding up its callers: a circuit breaker, and threads of its own.

A failing directory or server is not used for a while, then tried with one call, the probe. UCM's stores have such a
breaker; this one counts consecutive failures instead of watching time windows.

A medium can block a thread for ever: no system interrupts a read of a file whose server does not answer. So each medium
has its own pool. If all of a pool's threads are stuck, queued jobs are refused instead of waiting behind them, and once
per rest one more thread tries whether the medium answers again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty
from typing import TYPE_CHECKING

from ucm.background import enter_background
from ucm.clock import SYSTEM
from ucm.logger import get_logger
from ucm.store.base import StoreError, StoreTimeoutError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucm.clock import Clock, Queue, Thread

Job = Callable[[], None]

#: How long, in seconds, other calls wait for the outcome of a probe, so that calls queued behind a successful probe do
#: not fail meanwhile. A probe that hangs delays them no longer than this.
_PROBE_SECONDS = 1.0
#: How many threads are started in place of stuck ones. If all of these are stuck too, the medium is not tried again
#: until one returns.
_MOST_EXTRA = 8


class Breaker:
    """Decides whether a medium may be tried.

    Args:
        what: The medium's name in the log.
        failures: The number of consecutive failures that starts a rest.
        seconds: The length of a rest.
        clock: What a rest passes by.
    """

    def __init__(self, what: str, failures: int, seconds: float, *, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._what = what
        self._limit = failures
        self._seconds = seconds
        self._changed = clock.condition()
        self._row = 0
        self._cause: StoreError = StoreUnavailableError("nothing failed yet")
        self._until = 0.0
        self._probing = False
        self._patient_until = 0.0

    def allows(self, *, wait: bool = True) -> bool:
        """Return whether to try; after a rest, the first caller to get True is the probe and must report its outcome.

        Args:
            wait: Whether to wait, for at most a second, for the outcome of a probe in progress.
        """
        if self._row < self._limit:
            return True
        with self._changed:
            now = self._clock.monotonic()
            if now >= self._until:
                self._until = now + self._seconds
                self._patient_until = now + _PROBE_SECONDS
                self._probing = True
                return True
            if not wait:
                return False
            self._changed.wait_for(lambda: not self._probing, max(0.0, self._patient_until - now))
            return self._row < self._limit

    @property
    def rests(self) -> bool:
        """Whether calls would be refused; unlike ``allows``, this does not make the caller the probe."""
        return self._row >= self._limit and self._clock.monotonic() < self._until

    @property
    def probing(self) -> bool:
        """Whether any call in progress can only be a probe, because the last calls failed."""
        return self._row >= self._limit

    def succeeded(self) -> None:
        """Report that a call succeeded."""
        if self._row == 0:
            return
        with self._changed:
            rested, self._row = self._row >= self._limit, 0
            self._probing = False
            self._changed.notify_all()
        if rested:
            get_logger(__name__).info("[UCM.Store] %s works again", self._what)

    def refusal(self, where: str) -> StoreError:
        """Return the error of a call during a rest, of the same class as the failure that caused the rest."""
        return type(self._cause)(f"{self._what} rests after failures: {self._cause.what}", where=where)

    def failed(self, error: StoreError) -> None:
        """Report that a call failed. One timeout is enough for a rest: another would cost as much time again."""
        with self._changed:
            was_resting = self._row >= self._limit
            self._row += 1
            if isinstance(error, StoreTimeoutError):
                self._row = max(self._row, self._limit)
            if self._probing or not was_resting:  # calls in progress when the rest began do not replace its cause
                self._cause = error
            self._until = self._clock.monotonic() + self._seconds
            row, probed, self._probing = self._row, self._probing, False
            self._changed.notify_all()
        if probed or (not was_resting and row >= self._limit):
            get_logger(__name__).warning(
                "[UCM.Store] %s rests for %.0f s after %d failures in a row: %s",
                self._what,
                self._seconds,
                row,
                error.what,
            )


@dataclass(frozen=True, slots=True)
class RefusableJob:
    """A job with an alternative for when it cannot run.

    Args:
        run: The job.
        refuse: The alternative, run by whichever thread finds the pool stuck.
    """

    run: Job
    refuse: Job

    def __call__(self) -> None:
        """Run the job."""
        self.run()


class Pool:
    """A few daemon threads.

    Args:
        name: The prefix of their names, at most 13 characters so that system tools show it whole.
        threads: The number of threads.
        nice: How far to lower their priority below the process's other threads.
        patience: Seconds in one job after which a thread counts as stuck.
        rest: Seconds from finding all threads stuck until one more is started; infinite: never.
        clock: What patience and rest pass by; its threads run the jobs.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        nice: int = 0,
        *,
        patience: float = math.inf,
        rest: float = 30.0,
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        self._name = name
        self._count = threads
        self._nice = nice
        self._patience = patience
        self._rest = rest
        self._lock = clock.lock()
        self._threads: list[Thread] = []
        self._began: dict[int, float] = {}  # start time of each busy thread's job
        self._rest_until = 0.0
        self._queue: Queue[Job | None] = clock.queue()
        self._closed = False

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue jobs; each thread takes them in order. A job must not raise.

        Raises:
            ValueError: The pool is closed.
        """
        with self._lock:
            if self._closed:
                raise ValueError("the store is closed")
            while len(self._threads) < self._count:
                self._start()
            if self._is_stuck() and self._rest_until and self._clock.monotonic() >= self._rest_until:
                self._rest_until = 0.0
                if len(self._threads) < self._count + _MOST_EXTRA:
                    self._start()
            for job in jobs:
                self._queue.put(job)
        self.relieve()

    def relieve(self) -> None:
        """Refuse queued jobs if all threads are stuck; callers that wait for a job call this from time to time."""
        if len(self._began) < len(self._threads) or not self._is_stuck():
            return
        with self._lock:
            if not self._is_stuck():
                return
            now = self._clock.monotonic()
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
        """Whether all of the threads are stuck."""
        with self._lock:
            return self._is_stuck()

    def close(self) -> None:
        """Finish queued jobs and end the threads; stuck threads are abandoned."""
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
        thread = self._clock.thread(self._run, f"{self._name}-{len(self._threads)}")
        thread.start()
        self._threads.append(thread)

    def _is_stuck(self) -> bool:
        began = list(self._began.values())
        if not began or len(began) < len(self._threads):
            return False
        return self._clock.monotonic() - max(began) >= self._patience

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
            self._began[me] = began = self._clock.monotonic()
            try:
                job()
            except Exception:  # noqa: BLE001 - an exception would end the thread and leave its queue waiting for ever
                get_logger(__name__).exception("[UCM.Store] a job of %s failed unexpectedly", self._name)
            finally:
                self._began.pop(me, None)
            del job  # with the memory that it refers to, which the caller may want to free while this thread waits
            if self._clock.monotonic() - began >= self._patience and self._is_one_too_many():
                return
        with self._lock:  # once all other threads have ended, only stuck ones may remain in the list
            self._leave()

    def _is_one_too_many(self) -> bool:
        """Return whether this thread, which was stuck, has been replaced by another one."""
        with self._lock:
            self._rest_until = 0.0
            if len(self._threads) > self._count:
                self._leave()
                return True
            return False

    def _leave(self) -> None:
        me = threading.get_ident()
        self._threads = [thread for thread in self._threads if thread.ident != me]
