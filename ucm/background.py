"""Background threads that do not slow down the threads that compute."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

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


def wait_while_it_shrinks(left: Callable[[], int], seconds: float) -> int:
    """Wait for the work of other threads, as long as it makes progress.

    Args:
        left: Returns the amount of remaining work.
        seconds: How long it may stay the same.

    Returns:
        The remaining work at the end.
    """
    least, until = left(), time.monotonic() + seconds
    while (now := least) > 0 and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        if (now := left()) < least:
            until = time.monotonic() + seconds
        least = min(least, now)
    return least


def call_within(call: Callable[[], None], name: str, seconds: float) -> bool:
    """Call a function in a thread, and stop waiting for it after a time limit.

    Args:
        call: The function.
        name: The thread's name.
        seconds: How long to wait.

    Returns:
        Whether it has returned.
    """
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def call_later(call: Callable[[], T], name: str) -> Future[T]:
    """Call a function in a daemon thread, which does not keep the process from exiting.

    Args:
        call: The function.
        name: The thread's name.

    Returns:
        A future of the function's result.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised where the result is wanted
            found.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return found


def process_cores() -> set[int]:
    """Return the CPUs that any thread of this process may use; empty if the system does not report them (not Linux)."""
    found: set[int] = set()
    with suppress(OSError, AttributeError):
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - Paths are of no use here
            with suppress(ProcessLookupError):
                found |= os.sched_getaffinity(int(thread))
    return found
