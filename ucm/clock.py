"""Where time, and everything that waits for it, comes from: a parameter of whatever has threads or deadlines.

Code that waits takes a `Clock` and uses its methods instead of the modules ``time``, ``threading`` and ``queue``. In an
engine that is `SYSTEM`. Tests pass a simulated clock, in which time passes only when nothing else can happen, so that
no test waits and none depends on the speed of a machine.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

# What clocks return, or in a simulation what behaves like it.
Lock: TypeAlias = threading.Lock
Condition: TypeAlias = threading.Condition
Event: TypeAlias = threading.Event
Queue: TypeAlias = queue.SimpleQueue
Thread: TypeAlias = threading.Thread

#: How often two clocks are read together.
_READINGS = 10


class Clock:
    """Time and threads: the system's, unless a simulation overrides them."""

    def monotonic(self) -> float:
        """Return the time in seconds that only grows; deadlines are such times."""
        return time.monotonic()

    def time(self) -> float:
        """Return the time of day in seconds since the epoch, to compare with those of files."""
        return time.time()

    def time_ns(self) -> int:
        """Return the time of day in nanoseconds since the epoch."""
        return time.time_ns()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def lock(self) -> Lock:
        """Return a lock, not reentrant. A plain ``threading.Lock`` serves where its holder never waits."""
        return threading.Lock()

    def condition(self, lock: Lock | None = None) -> Condition:
        """Return a condition variable with a lock of its own, which is reentrant, or with the given one."""
        return threading.Condition(lock)

    def event(self) -> Event:
        """Return a flag that is not set."""
        return threading.Event()

    def queue(self) -> Queue[Any]:
        """Return an empty queue."""
        return queue.SimpleQueue()

    def thread(self, target: Callable[[], object], name: str) -> Thread:
        """Return a daemon thread that is not started yet.

        Args:
            target: What it runs.
            name: Its name; system tools show the first 15 bytes.
        """
        return threading.Thread(target=target, name=name, daemon=True)

    def started(self, target: Callable[[], object], name: str) -> Thread | None:
        """Return a thread that was started; None if the system allows no more, so that a later use can try again."""
        thread = self.thread(target, name)
        try:
            thread.start()
        except RuntimeError:
            return None
        return thread


#: The clock of an engine, and the default wherever a clock is a parameter.
SYSTEM = Clock()


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
