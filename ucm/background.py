"""Background threads that do not slow down the threads that compute."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ucm.clock import SYSTEM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ucm.clock import Clock

T = TypeVar("T")

#: The polling interval for the progress of other threads.
_LOOK_SECONDS = 0.01


def enter_background(nice: int = 0) -> None:
    """Let the calling thread run on any CPU of its process, with a lower priority.

    A thread inherits the CPU affinity of the thread that starts it. vLLM binds a CPU worker's main thread to a single
    CPU, which all threads started there would share with the forward pass, even if others are idle.

    Args:
        nice: The thread's nice value, 0 (normal priority) to 19 (lowest).
    """
    cores = process_cores()
    if cores:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
    if nice:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def wait_while_it_shrinks(left: Callable[[], int], seconds: float, *, clock: Clock = SYSTEM) -> int:
    """Wait for the work of other threads, as long as it makes progress.

    Args:
        left: Returns the amount of remaining work.
        seconds: How long it may stay the same.
        clock: What time passes by.

    Returns:
        The remaining work at the end.
    """
    least, until = left(), clock.monotonic() + seconds
    while (now := least) > 0 and clock.monotonic() < until:
        clock.sleep(_LOOK_SECONDS)
        if (now := left()) < least:
            until = clock.monotonic() + seconds
        least = min(least, now)
    return least


class Later(Generic[T]):
    """A call that another thread makes, or has made.

    Args:
        call: The function.
        clock: What those who wait for it wait by.
    """

    def __init__(self, call: Callable[[], T], *, clock: Clock = SYSTEM) -> None:
        self._call = call
        self._ended = clock.event()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call; whatever it raises is raised by ``result``."""
        try:
            self._result.append(self._call())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where the result is wanted
            self._error = error
        self._ended.set()

    def done(self) -> bool:
        """Return whether the call has returned or raised."""
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the call, at most for a time in seconds, and return whether it is done."""
        return self._ended.wait(seconds)

    def result(self) -> T:
        """Wait for the call; return what it returned, or raise what it raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]


def call_later(call: Callable[[], T], name: str, *, clock: Clock = SYSTEM) -> Later[T]:
    """Call a function in a daemon thread, which does not keep the process from exiting."""
    found = Later(call, clock=clock)
    clock.thread(found.run, name).start()
    return found


def call_all(
    calls: Iterable[Callable[[], T]],
    name: str,
    threads: int,
    nice: int = 0,
    *,
    helps: bool = False,
    clock: Clock = SYSTEM,
) -> list[Later[T]]:
    """Make calls in a few background threads, each of which takes the next call until none is left.

    Args:
        calls: The functions, in the order in which they begin.
        name: The threads' name.
        threads: The number of threads.
        nice: How far to lower their priority; see `enter_background`.
        helps: Whether the calling thread makes calls as well, all of them if the system refuses the threads.
        clock: The clock whose threads make the calls.
    """
    found = [Later(call, clock=clock) for call in calls]
    left = iter(found)
    lock = threading.Lock()

    def take() -> None:
        while True:
            with lock:
                later = next(left, None)
            if later is None:
                return
            later.run()

    def work() -> None:
        enter_background(nice)
        take()

    for _ in range(min(threads, len(found))):
        if not helps:
            clock.thread(work, name).start()
        elif clock.started(work, name) is None:
            break
    if helps:
        take()
    return found


def call_within(call: Callable[[], None], name: str, seconds: float, *, clock: Clock = SYSTEM) -> bool:
    """Call a function in a thread, and stop waiting for it after a time limit.

    Returns:
        Whether it has ended.
    """
    thread = clock.thread(call, name)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def wait_for_all(calls: Iterable[Later[Any]], seconds: float, *, clock: Clock = SYSTEM) -> None:
    """Wait until all calls are done, but no longer than a time in seconds."""
    until = clock.monotonic() + seconds
    for call in calls:
        call.wait(max(0.0, until - clock.monotonic()))


def process_cores() -> set[int]:
    """Return the CPUs that any thread of this process may use; empty if the system does not report them (not Linux)."""
    found: set[int] = set()
    with suppress(OSError, AttributeError):
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - Paths are of no use here
            with suppress(ProcessLookupError):
                found |= os.sched_getaffinity(int(thread))
    return found
