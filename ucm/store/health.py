"""A breaker: a directory or a server that keeps failing is left alone for a while, then tried with one call, the probe.

UCM's stores have such a breaker; this one counts failures in a row instead of watching windows of time.
"""

from __future__ import annotations

import time
from threading import Condition

from ucm.logger import get_logger
from ucm.store.errors import StoreError, StoreTimeoutError, StoreUnavailableError

#: For how long, in seconds, other calls wait to hear how a probe went, so that what is queued behind one that goes well
#: does not fail while it is under way. A medium that hangs keeps them no longer.
_PATIENCE = 1.0


class Breaker:
    """Says whether something may be tried.

    Args:
        what: Its name in the log.
        failures: After how many failures in a row it rests.
        seconds: For how long.
    """

    def __init__(self, what: str, failures: int, seconds: float) -> None:
        self._what = what
        self._limit = failures
        self._seconds = seconds
        self._changed = Condition()
        self._row = 0
        self._cause: StoreError = StoreUnavailableError("nothing failed yet")
        self._until = 0.0
        self._probing = False
        self._patient_until = 0.0

    def allows(self, *, wait: bool = True) -> bool:
        """Whether to try; after a rest, the first caller who hears True is the probe, and must tell how it went.

        Args:
            wait: Whether to wait for the outcome of a probe that is under way, a second at most.
        """
        if self._row < self._limit:
            return True
        with self._changed:
            now = time.monotonic()
            if now >= self._until:
                self._until = now + self._seconds
                self._patient_until = now + _PATIENCE
                self._probing = True
                return True
            if not wait:
                return False
            self._changed.wait_for(lambda: not self._probing, max(0.0, self._patient_until - now))
            return self._row < self._limit

    @property
    def rests(self) -> bool:
        """Whether it is of no use to ask; unlike ``allows`` without becoming the probe."""
        return self._row >= self._limit and time.monotonic() < self._until

    @property
    def probing(self) -> bool:
        """Whether what is under way can only be a probe: the last calls failed."""
        return self._row >= self._limit

    def succeeded(self) -> None:
        """Tell that a call went well."""
        if self._row == 0:
            return
        with self._changed:
            rested, self._row = self._row >= self._limit, 0
            self._probing = False
            self._changed.notify_all()
        if rested:
            get_logger(__name__).info("[UCM.Store] %s works again", self._what)

    def refusal(self, where: str) -> StoreError:
        """What a call is told that comes during a rest: of the same kind as the failure that led to it."""
        return type(self._cause)(f"{self._what} rests after failures: {self._cause.what}", where=where)

    def failed(self, error: StoreError) -> None:
        """Tell that a call failed. One that timed out is enough for a rest: another would cost as much time again."""
        with self._changed:
            was_resting = self._row >= self._limit
            self._row += 1
            if isinstance(error, StoreTimeoutError):
                self._row = max(self._row, self._limit)
            if self._probing or not was_resting:  # what was under way when the rest began does not hide its cause
                self._cause = error
            self._until = time.monotonic() + self._seconds
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
