"""A circuit breaker: a failing directory or server is not used for a while, then tried with one call, the probe.

UCM's stores have such a breaker; this one counts consecutive failures instead of watching time windows.
"""

from __future__ import annotations

import time
from threading import Condition

from ucm.logger import get_logger
from ucm.store.errors import StoreError, StoreTimeoutError, StoreUnavailableError

#: How long, in seconds, other calls wait for the outcome of a probe, so that calls queued behind a successful probe do
#: not fail meanwhile. A probe that hangs delays them no longer than this.
_PATIENCE = 1.0


class Breaker:
    """Decides whether a medium may be tried.

    Args:
        what: The medium's name in the log.
        failures: The number of consecutive failures that starts a rest.
        seconds: The length of a rest.
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
        """Return whether to try; after a rest, the first caller to get True is the probe and must report its outcome.

        Args:
            wait: Whether to wait, for at most a second, for the outcome of a probe in progress.
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
        """Whether calls would be refused; unlike ``allows``, this does not make the caller the probe."""
        return self._row >= self._limit and time.monotonic() < self._until

    @property
    def probing(self) -> bool:
        """Whether any call in progress can only be a probe, because the last calls failed."""
        return self._row >= self._limit

    def succeeded(self) -> None:
        """Report that a call succeeded."""
        if self._row == 0:
            return
        with self._changed:
            rested, self._row = self._row >= self._limit, 0
            self._probing = False
            self._changed.notify_all()
        if rested:
            get_logger(__name__).info("[UCM.Store] %s works again", self._what)

    def refusal(self, where: str) -> StoreError:
        """Return the error of a call during a rest, of the same class as the failure that caused the rest."""
        return type(self._cause)(f"{self._what} rests after failures: {self._cause.what}", where=where)

    def failed(self, error: StoreError) -> None:
        """Report that a call failed. One timeout is enough for a rest: another would cost as much time again."""
        with self._changed:
            was_resting = self._row >= self._limit
            self._row += 1
            if isinstance(error, StoreTimeoutError):
                self._row = max(self._row, self._limit)
            if self._probing or not was_resting:  # calls in progress when the rest began do not replace its cause
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
