"""Where time, and everything that waits for it, comes from: a parameter of whatever has threads or deadlines.

Code that waits takes a `Clock` and uses its methods instead of the modules ``time``, ``threading`` and ``queue``. In an
engine that is `SYSTEM`, whose methods return the standard library's own objects. Tests pass a simulated clock, in which
time passes only when nothing else can happen, so that no test waits and none depends on the speed of a machine.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

T = TypeVar("T")

#: How often two clocks are read together.
_READINGS = 10


class Lock(Protocol):
    """A lock, as ``threading.Lock`` and ``threading.RLock``."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether it was taken within the time limit in seconds, -1 for none."""

    def release(self) -> None:
        """Give the lock back."""

    def __enter__(self) -> bool:
        """Take the lock."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Give the lock back."""


class Condition(Protocol):
    """A condition variable, as ``threading.Condition``; time limits are in seconds of the clock, None for none."""

    def __enter__(self) -> bool:
        """Take the condition's lock."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Give the lock back."""

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait for a notification, and take the lock again; return False after a time-out."""

    def wait_for(self, predicate: Callable[[], T], timeout: float | None = None) -> T:
        """Wait until the predicate holds or time is over, and return its last value."""

    def notify(self, n: int = 1) -> None:
        """Wake some of the threads that wait."""

    def notify_all(self) -> None:
        """Wake all threads that wait."""


class Event(Protocol):
    """A flag to wait for, as ``threading.Event``."""

    def is_set(self) -> bool:
        """Return whether the flag is set."""

    def set(self) -> None:
        """Set the flag, and wake all threads that wait for it."""

    def clear(self) -> None:
        """Unset the flag."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the flag, at most for a time in seconds, and return whether it is set."""


class Queue(Protocol[T]):
    """An unbounded queue between threads, as ``queue.SimpleQueue``."""

    def put(self, item: T) -> None:
        """Append an item."""

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Remove and return the oldest item; raise ``queue.Empty`` if there is none within the time limit."""

    def get_nowait(self) -> T:
        """Remove and return the oldest item, or raise ``queue.Empty``."""

    def empty(self) -> bool:
        """Return whether there is no item."""


class Thread(Protocol):
    """A daemon thread, as ``threading.Thread``."""

    name: str

    @property
    def ident(self) -> int | None:
        """The thread's identifier, once it has started."""

    def start(self) -> None:
        """Start the thread; raise RuntimeError if the system allows no more threads."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, at most for a time in seconds."""

    def is_alive(self) -> bool:
        """Return whether the thread has started and not ended."""


class Clock(Protocol):
    """Time and threads."""

    def monotonic(self) -> float:
        """Return the time in seconds that only grows; deadlines are such times."""

    def time(self) -> float:
        """Return the time of day in seconds since the epoch, to compare with those of files."""

    def time_ns(self) -> int:
        """Return the time of day in nanoseconds since the epoch."""

    def sleep(self, seconds: float) -> None:
        """Wait."""

    def lock(self) -> Lock:
        """Return a lock, not reentrant. A plain ``threading.Lock`` serves where its holder never waits."""

    def condition(self, lock: Lock | None = None) -> Condition:
        """Return a condition variable with a lock of its own, which is reentrant, or with the given one."""

    def event(self) -> Event:
        """Return a flag that is not set."""

    def queue(self) -> Queue[Any]:
        """Return an empty queue."""

    def thread(self, target: Callable[[], object], name: str) -> Thread:
        """Return a daemon thread that is not started yet.

        Args:
            target: What it runs.
            name: Its name; system tools show the first 15 bytes.
        """


class SystemClock:
    """The system's time, and the standard library's threads."""

    monotonic = staticmethod(time.monotonic)
    time_ns = staticmethod(time.time_ns)
    sleep = staticmethod(time.sleep)
    time = staticmethod(time.time)  # last, because it hides the module
    lock = staticmethod(threading.Lock)
    event = staticmethod(threading.Event)

    def condition(self, lock: Any = None) -> Condition:
        """Return a condition variable; see `Clock.condition`."""
        return threading.Condition(lock)

    def queue(self) -> Queue[Any]:
        """Return an empty queue."""
        return queue.SimpleQueue()

    def thread(self, target: Callable[[], object], name: str) -> Thread:
        """Return a daemon thread that is not started yet."""
        return threading.Thread(target=target, name=name, daemon=True)


#: The clock of an engine, and the default wherever a clock is a parameter.
SYSTEM: Clock = SystemClock()


def system_started(
    now: Callable[[], float] = time.time, uptime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)
) -> float:
    """Return when the system started, in seconds since the epoch.

    A pause between the two clocks would make it seem earlier, so the reading that took the shortest time counts.

    Args:
        now: Seconds since the epoch.
        uptime: Seconds since the start; only Linux has this clock.
    """
    readings = []
    for _ in range(_READINGS):
        before, since = now(), uptime()
        readings.append((now() - before, before - since))
    return min(readings)[1]
