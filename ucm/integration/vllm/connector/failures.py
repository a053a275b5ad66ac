"""Count failures on the data path and log the first of each cause."""

from __future__ import annotations

from collections import Counter
from threading import Lock
from typing import TYPE_CHECKING

from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.store.base import BlockKey
    from ucm.store.errors import StoreError


class FailureLog:
    """Failures of one operation, by cause; any thread may record some.

    Args:
        area: The prefix of the log lines, for instance ``[UCM.Load]``.
        consequence: What happens to the failed blocks, for the log line.
    """

    def __init__(self, area: str, consequence: str) -> None:
        self._area = area
        self._consequence = consequence
        self._lock = Lock()
        self.counts: Counter[str] = Counter()

    def record(self, failed: Mapping[BlockKey, StoreError]) -> None:
        """Count failed blocks; log the first of each cause with its reason."""
        for key, error in failed.items():
            with self._lock:
                self.counts[error.cause] += 1
                is_new = self.counts[error.cause] == 1
            if is_new:
                get_logger(__name__).warning(
                    "%s block %s: %s (cause %s; %s; further ones are only counted)",
                    self._area,
                    key.hex()[:16],
                    error,
                    error.cause,
                    self._consequence,
                )
