"""How a thread that works in the background takes its place beside the threads that compute."""

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

#: How often something that others do is looked at.
_LOOK_SECONDS = 0.01


def enter_background(nice: int = 0) -> None:
    """Let the calling thread run on any processor of its process, and with a lower priority.

    A thread inherits the processors of the one that starts it. vLLM binds a CPU worker's main thread to a single one,
    and the threads that are started from there would all share it with the forward, whatever else the machine has.

    Args:
        nice: How much it gives way to others, 0 (not at all) to 19.
    """
    cores = process_cores()
    if cores:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)
    if nice:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def wait_while_it_shrinks(left: Callable[[], int], seconds: float) -> int:
    """Wait for what others do, as long as they get on.

    Args:
        left: What is left to be done.
        seconds: How long that may stay the same.

    Returns:
        What is left at the end.
    """
    least, until = left(), time.monotonic() + seconds
    while (now := least) > 0 and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
        if (now := left()) < least:
            until = time.monotonic() + seconds
        least = min(least, now)
    return least


def call_within(call: Callable[[], None], name: str, seconds: float) -> bool:
    """Call something in a thread, and leave it there if it takes too long.

    Args:
        call: What to call.
        name: The thread's name.
        seconds: How long to wait for it.

    Returns:
        Whether it has ended.
    """
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def call_later(call: Callable[[], T], name: str) -> Future[T]:
    """Call something in a thread that keeps nobody: the process may end before it does.

    Args:
        call: What to call.
        name: The thread's name.

    Returns:
        What it returns or raises, once it has.
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
    """The processors that any thread of this process may use; empty where the system does not tell (not Linux)."""
    found: set[int] = set()
    with suppress(OSError, AttributeError):
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - Paths are of no use here
            with suppress(ProcessLookupError):
                found |= os.sched_getaffinity(int(thread))
    return found
