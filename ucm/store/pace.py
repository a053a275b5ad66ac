"""When background writing gives way to its caller's computation.

A low priority alone does not keep it out of the way where the computation takes all processors, as vLLM does on a CPU:
a thread of low priority that holds the interpreter's lock gets no processor, and the computation waits for that lock.
"""

from __future__ import annotations

import threading
import time

#: Bytes that may wait; more than that is written at once.
MOST_WAITING = 1 << 30
#: Seconds after which one job is done all the same, so that what is being saved moves on within a long computation;
#: the fewer, the more waits, so that an engine that never rests saves as fast as it computes.
PATIENCE = 0.25
#: Seconds after a computation until jobs are done: a step's tokens are yet to be sampled and sent, by the same
#: processors, and very often the next step follows at once.
GRACE = 0.03


class Pace:
    """Holds jobs back while their caller computes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._active = False
        #: Of the clock: from when on jobs are done, if nothing is computed.
        self._free_from = 0.0

    def stand_back(self, *, active: bool) -> None:
        """Hold jobs back from now on, or in a moment no longer."""
        with self._changed:
            self._active = active
            self._free_from = time.monotonic() + GRACE
            self._changed.notify_all()

    def hurry(self) -> None:
        """Hold jobs back no longer: somebody waits for one."""
        with self._changed:
            self._active = False
            self._free_from = 0.0
            self._changed.notify_all()

    def take_turn(self, waiting: int) -> None:
        """Called before a job: returns when it may be done.

        Args:
            waiting: Bytes that wait with it.
        """
        latest = time.monotonic() + PATIENCE * (1 - waiting / MOST_WAITING)
        with self._changed:
            while (now := time.monotonic()) < (until := latest if self._active else min(latest, self._free_from)):
                self._changed.wait(until - now)
