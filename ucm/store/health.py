"""A breaker: a directory that keeps failing is left alone for a while, then tried with one call.

UCM's stores have such a breaker; this one counts failures in a row instead of watching windows of time.
"""

from __future__ import annotations

import time
from threading import Lock

from ucm.logger import get_logger


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
        self._lock = Lock()
        self._row = 0
        self._until = 0.0

    def allows(self) -> bool:
        """Whether to try; after a rest, the one caller who hears True is the probe, and must tell how it went."""
        if self._row < self._limit:
            return True
        with self._lock:
            now = time.monotonic()
            if now < self._until:
                return False
            self._until = now + self._seconds
            return True

    @property
    def rests(self) -> bool:
        """Whether it is of no use to ask; unlike ``allows`` without becoming the probe."""
        return self._row >= self._limit and time.monotonic() < self._until

    @property
    def probing(self) -> bool:
        """Whether what is under way is a probe: the last calls failed."""
        return self._row >= self._limit

    def succeeded(self) -> None:
        """Tell that a call went well."""
        if self._row == 0:
            return
        with self._lock:
            rested, self._row = self._row >= self._limit, 0
        if rested:
            get_logger().info("[UCM.Store] %s works again", self._what)

    def failed(self, reason: str) -> None:
        """Tell that a call failed."""
        with self._lock:
            self._row += 1
            self._until = time.monotonic() + self._seconds
            rests = self._row == self._limit
        if rests:
            get_logger().warning(
                "[UCM.Store] %s rests for %.0f s after %d failures in a row: %s",
                self._what,
                self._seconds,
                self._limit,
                reason,
            )
