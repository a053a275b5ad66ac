"""Delay background writing while its caller computes.

A low priority alone is not enough where the computation uses all processors, as vLLM does on a CPU: a low-priority
thread that holds the interpreter's lock gets no processor, and the computation waits for that lock.
"""

from __future__ import annotations

import threading
import time

#: Bytes that may wait; if more wait, jobs run at once.
MOST_WAITING = 1 << 30
#: Seconds after which a job runs during a computation, so that saving goes on within a long one. The delay shrinks as
#: more bytes wait, so that an engine that never rests saves as fast as it computes.
PATIENCE = 0.25
#: Seconds to wait after a computation: the same processors still have to sample and send the step's tokens, and very
#: often the next step follows at once.
GRACE = 0.03


class Throttle:
    """Delays jobs while their caller computes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active = False
        #: The monotonic time from which jobs may run if nothing is computed.
        self._free_from = 0.0

    def switch(self, *, active: bool) -> None:
        """Start to delay jobs, or stop after ``GRACE``."""
        with self._changed:
            self._active = active
            self._free_from = time.monotonic() + GRACE
            self._changed.notify_all()

    def hurry(self) -> None:
        """Stop delaying jobs, because a caller waits for one."""
        with self._changed:
            self._active = False
            self._free_from = 0.0
            self._changed.notify_all()

    def take_turn(self, waiting: int) -> None:
        """Wait until the next job may run.

        Args:
            waiting: Bytes queued, including this job's.
        """
        latest = time.monotonic() + PATIENCE * (1 - waiting / MOST_WAITING)
        with self._changed:
            while (now := time.monotonic()) < (until := latest if self._active else min(latest, self._free_from)):
                self._changed.wait(until - now)
