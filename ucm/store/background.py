"""How a thread that works in the background takes its place beside the threads that compute."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


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


def process_cores() -> set[int]:
    """The processors that any thread of this process may use; empty where the system does not tell (not Linux)."""
    found: set[int] = set()
    with suppress(OSError, AttributeError):
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - Paths are of no use here
            with suppress(ProcessLookupError):
                found |= os.sched_getaffinity(int(thread))
    return found
