"""A clock for tests: threads take turns, and time passes only when no thread can go on.

It is a discrete-event simulation with real threads. One thread runs at a time, until it waits for something of the
clock: a lock, a condition, an event, a queue, a thread, or time. Then the next thread that can go on runs. When none
can, time jumps to the earliest deadline. So a time-out of an hour takes no time, a busy machine changes nothing, and a
test in which nothing can happen any more fails at once, with a list of who waits, instead of hanging.

What takes real time, such as a read of a file, takes no simulated time. A thread that waits outside of the clock, for
instance in ``threading.Event.wait``, keeps its turn: nobody else runs until it returns.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from queue import Empty
from typing import TYPE_CHECKING, Any, TypeVar

from ucm.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

#: Simulated seconds for which the test's thread waits for something without a time limit. Threads that wake
#: periodically would otherwise keep a test going for ever.
_LONGEST_WAIT = 48 * 3600.0
#: How far a clock's time of day is ahead of the real one at its start.
_AHEAD_NS = 60 * 10**9
#: Not shown of a thread's stack.
_MACHINERY = {__file__, threading.__file__}
#: With a seed, one in so many calls of the clock lets another thread go first.
_ONE_IN = 4


class StuckError(AssertionError):
    """The test's thread waits for something that will not happen."""


class _Ended(BaseException):
    """Unwinds a thread when the test has ended."""


@dataclass(eq=False)
class _Wait:
    """One wait of one thread."""

    turn: _Turn
    deadline: float = math.inf
    over: bool = False
    timed_out: bool = False


@dataclass(eq=False)
class _Turn:
    """A thread that takes part."""

    name: str
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ident: int | None = None
    failure: BaseException | None = None


class SimulatedClock(Clock):
    """Time and threads of a test; the thread that creates it is the test's.

    Args:
        seed: None runs threads in the order in which they became able to go on. A number chooses the order at random,
            to try other interleavings.
        time_of_day: The time at its start in seconds since 1970; None: a minute from now, so that the times of files,
            which the kernel sets, are in the past, however long a test takes to write them.
    """

    def __init__(self, seed: int | None = None, time_of_day: float | None = None) -> None:
        self._chance = None if seed is None else random.Random(seed)  # noqa: S311 - not for secrets
        self._now = self._start = 1000.0
        self._began_ns = time.time_ns() + _AHEAD_NS if time_of_day is None else int(time_of_day * 1e9)
        self._order = itertools.count()
        self._test = _Turn("the test", ident=threading.get_ident())
        self._running = self._test
        self._ready: list[_Turn] = []
        self._timed: list[tuple[float, int, _Wait]] = []
        self._waits: dict[_Turn, _Wait] = {}
        self._threads: list[_Thread] = []
        self._closed = False

    # What a test does.

    def run_until_idle(self) -> None:
        """Let all other threads run until each waits; no time passes."""
        self._wait(self._now, last=True)

    def advance(self, seconds: float) -> None:
        """Let time pass, and everything happen that happens meanwhile, also at the last moment."""
        until = self._now + seconds
        self._wait(until, last=True)

    def run_until(self, happened: Callable[[], bool], within: float = _LONGEST_WAIT) -> None:
        """Let as much time pass as it takes.

        Args:
            happened: What to wait for. It is asked whenever all threads wait, so it may itself give them work.
            within: The most seconds that this may take.

        Raises:
            StuckError: It did not happen.
        """
        until = self._now + within
        self.run_until_idle()
        while not happened():
            if self._ready:  # the question itself gave a thread something to do
                self.run_until_idle()
                continue
            deadline = self._next_deadline()
            if deadline > until:
                raise StuckError(self._explain(f"{happened} did not become true within {within:g} s"))
            self._wait(deadline, last=True)

    @property
    def alive(self) -> list[str]:
        """The names of the threads that have not ended, for the test to compare with those that should be left."""
        return [thread.name for thread in self._threads if thread.is_alive()]

    def close(self) -> None:
        """End all threads: whatever they wait for raises in them."""
        self._closed = True
        for thread in self._threads:
            while thread.is_alive():
                self._ready = [turn for turn in self._ready if turn is not thread.turn]
                self._hand_over(thread.turn)
                self._test.gate.acquire()

    # What code under test does.

    def monotonic(self) -> float:
        """Return the simulated time in seconds."""
        return self._now

    def time(self) -> float:
        """Return the time of day at the clock's start plus the simulated time that has passed."""
        return self.time_ns() / 1e9

    def time_ns(self) -> int:
        """Return the same in nanoseconds."""
        return self._began_ns + int((self._now - self._start) * 1e9)

    def sleep(self, seconds: float) -> None:
        """Wait, and let others run."""
        self._wait(self._now + max(0.0, seconds))

    def lock(self) -> Any:
        """Return a lock."""
        return _Lock(self, reentrant=False)

    def condition(self, lock: Any = None) -> Any:
        """Return a condition variable with a reentrant lock, or with one of this clock."""
        return _Condition(self, lock or _Lock(self, reentrant=True))

    def event(self) -> Any:
        """Return a flag."""
        return _Event(self)

    def queue(self) -> Any:
        """Return a queue."""
        return _Queue(self)

    def thread(self, target: Callable[[], object], name: str) -> Any:
        """Return a thread that takes part."""
        return _Thread(self, target, name)

    # Turns. Only the thread whose turn it is touches any of this, so none of it needs a lock.

    def _me(self) -> _Turn:
        if threading.get_ident() != self._running.ident:
            raise RuntimeError(
                f"the thread {threading.current_thread().name!r} does not take part in the simulation: "
                "start it with the clock's thread()"
            )
        if self._closed and self._running is not self._test:
            raise _Ended
        return self._running

    def _wait(self, deadline: float = math.inf, *, last: bool = False, among: deque[_Wait] | None = None) -> bool:
        """Wait, and return whether ``_wake`` ended it, not time.

        Args:
            deadline: When to stop waiting.
            last: Whether others go first that wait for the same time.
            among: Where those find the wait who wake it.
        """
        wait = _Wait(self._me(), deadline)
        if self._closed:  # the test's thread, after the end: there is nobody to wait for
            return False
        if wait.turn is self._test and deadline == math.inf:
            wait.deadline = self._now + _LONGEST_WAIT
        if wait.deadline < math.inf:
            heapq.heappush(self._timed, (wait.deadline, next(self._order) + (last << 62), wait))
        if among is not None:
            among.append(wait)
        self._waits[wait.turn] = wait
        self._switch(wait.turn)
        if wait.timed_out and among is not None:
            among.remove(wait)
        if wait.timed_out and deadline == math.inf:
            raise StuckError(self._explain(f"the test waited for {_LONGEST_WAIT / 3600:.0f} simulated hours"))
        return not wait.timed_out

    def _wake(self, wait: _Wait, *, timed_out: bool = False) -> None:
        wait.over, wait.timed_out = True, timed_out
        self._waits.pop(wait.turn, None)
        self._ready.append(wait.turn)

    def _yield(self) -> None:
        """With a seed: sometimes let another thread go first."""
        me = self._me()
        if self._chance is not None and self._ready and self._chance.randrange(_ONE_IN) == 0:
            self._ready.append(me)
            self._switch(me)

    def _switch(self, me: _Turn) -> None:
        """Give the turn to the next thread, and return when it is this thread's again."""
        following = self._next()
        if following is not me:
            self._hand_over(following)
            me.gate.acquire()
        if me is not self._test and self._closed:
            raise _Ended
        if (failure := me.failure) is not None:
            me.failure = None
            raise failure

    def _hand_over(self, turn: _Turn) -> None:
        self._running = turn
        turn.gate.release()

    def _next(self) -> _Turn:
        if not self._ready and self._next_deadline() < math.inf:
            deadline, _, wait = heapq.heappop(self._timed)
            self._now = max(self._now, deadline)
            self._wake(wait, timed_out=True)
        if self._ready:
            return self._ready.pop(self._chance.randrange(len(self._ready)) if self._chance is not None else 0)
        self._test.failure = StuckError(self._explain("no thread can go on"))
        return self._test

    def _next_deadline(self) -> float:
        while self._timed and self._timed[0][2].over:
            heapq.heappop(self._timed)
        return self._timed[0][0] if self._timed else math.inf

    def _explain(self, what: str) -> str:
        frames = sys._current_frames()
        lines = [f"{what}; simulated time {self._now - self._start:g} s"]
        for turn in [self._test, *(thread.turn for thread in self._threads if thread.is_alive())]:
            wait = self._waits.get(turn)
            until = "" if wait is None or wait.deadline == math.inf else f", until {wait.deadline - self._start:g} s"
            lines.append(f"{turn.name}{until}:")
            if turn.ident in frames:
                stack = [
                    frame for frame in traceback.extract_stack(frames[turn.ident]) if frame.filename not in _MACHINERY
                ]
                lines += [line.rstrip() for line in traceback.format_list(stack[-4:])]
        return "\n".join(lines)


class _Lock:
    def __init__(self, clock: SimulatedClock, *, reentrant: bool) -> None:
        self._clock = clock
        self._reentrant = reentrant
        self.owner: _Turn | None = None
        self.count = 0
        self._waits: deque[_Wait] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._clock._me()
        if self.owner is me and self._reentrant:
            self.count += 1
            return True
        self._clock._yield()
        if self.owner is not None:
            until = math.inf if timeout < 0 else self._clock.monotonic() + timeout
            if not blocking or not self._clock._wait(until, among=self._waits):
                return False
        self.owner, self.count = me, 1
        return True

    def release(self) -> None:
        if self.owner is None:
            raise RuntimeError("release of a lock that is not held")
        self.count -= 1
        if self.count == 0:
            self.owner = None
            if self._waits:
                wait = self._waits.popleft()
                self.owner = wait.turn  # or a third thread could take it first
                self._clock._wake(wait)

    def locked(self) -> bool:
        return self.owner is not None

    __enter__ = acquire

    def __exit__(self, *raised: object) -> None:
        if self.owner is not None or not self._clock._closed:  # threads that are being ended take no locks
            self.release()


class _Condition:
    def __init__(self, clock: SimulatedClock, lock: _Lock) -> None:
        self._clock = clock
        self._lock = lock
        self._waits: deque[_Wait] = deque()
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *raised: object) -> None:
        self._lock.__exit__(*raised)

    def wait(self, timeout: float | None = None) -> bool:
        if self._lock.owner is not self._clock._me():
            raise RuntimeError("wait on a condition whose lock is not held")
        count, self._lock.count = self._lock.count, 1
        self._lock.release()
        try:
            until = math.inf if timeout is None else self._clock.monotonic() + timeout
            return self._clock._wait(until, among=self._waits)
        finally:
            self._lock.acquire()
            self._lock.count = count

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        until = math.inf if timeout is None else self._clock.monotonic() + timeout
        while not (found := predicate()):
            left = None if timeout is None else until - self._clock.monotonic()
            if left is not None and left <= 0:
                break
            self.wait(left)
        return found

    def notify(self, n: int = 1) -> None:
        if self._lock.owner is not self._clock._me():
            raise RuntimeError("notification of a condition whose lock is not held")
        for _ in range(min(n, len(self._waits))):
            self._clock._wake(self._waits.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waits))


class _Event:
    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._set = False
        self._waits: deque[_Wait] = deque()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._clock._me()
        self._set = True
        while self._waits:
            self._clock._wake(self._waits.popleft())
        self._clock._yield()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._set:
            return True
        until = math.inf if timeout is None else self._clock.monotonic() + timeout
        return self._clock._wait(until, among=self._waits) or self._set


class _Queue:
    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._items: deque[Any] = deque()
        self._waits: deque[_Wait] = deque()

    def put(self, item: Any) -> None:
        self._clock._me()
        self._items.append(item)
        if self._waits:
            self._clock._wake(self._waits.popleft())
        self._clock._yield()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        until = math.inf if timeout is None else self._clock.monotonic() + timeout
        while not self._items:
            if not block or not self._clock._wait(until, among=self._waits):
                raise Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items


class _Thread:
    def __init__(self, clock: SimulatedClock, target: Callable[[], object], name: str) -> None:
        self._clock = clock
        self._target = target
        self.name = name
        self.turn = _Turn(name)
        self._ended = _Event(clock)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def ident(self) -> int | None:
        return self.turn.ident

    def start(self) -> None:
        self._clock._me()
        self._thread.start()
        self._clock._threads.append(self)
        self._clock._ready.append(self.turn)
        self._clock._yield()

    def join(self, timeout: float | None = None) -> None:
        if self._thread.ident is None:
            raise RuntimeError("join of a thread that was not started")
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return self._thread.ident is not None and not self._ended.is_set()

    def _run(self) -> None:
        clock = self._clock
        self.turn.ident = threading.get_ident()
        self.turn.gate.acquire()
        try:
            clock._me()
            self._target()
        except _Ended:
            pass
        except BaseException:  # noqa: BLE001 - told while the test waits, or it could end before it fails
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        finally:
            self._ended._set = True
            for wait in self._ended._waits:
                clock._wake(wait)
            clock._hand_over(clock._test if clock._closed else clock._next())
