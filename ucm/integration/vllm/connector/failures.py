"""Errors that keep a connector from starting or stop it, and the log of failed blocks."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from ucm.errors import ConfigError, UcmError
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ucm.store.base import BlockKey, StoreError


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


class UnknownLayoutError(UcmError):
    """The layout of the registered KV caches is unknown, so blocks cannot be located reliably."""


class UnsupportedModelError(ConfigError):
    """The model's KV cannot be restored from blocks, or a setting of the engine forbids it."""


class PromisedBlockLostError(UcmError):
    """Promised blocks must not be used, because the weights were changed in place, and nothing can recompute them.

    Raised where vLLM has no load-failure recovery: the engine stops rather than continue with wrong KV.
    """


@contextmanager
def refusals_logged(tag: str) -> Iterator[None]:
    """Log UCM's errors as one record under a tag, and raise them on to vLLM.

    vLLM prints such an error among its tracebacks, once per process, with a prefix before each line; the tag makes it
    easy to find.

    Args:
        tag: The part's tag, for instance ``UCM.Config``.

    Raises:
        UcmError: The error, unchanged.
    """
    try:
        yield
    except UcmError as error:
        get_logger(__name__).error("[%s] refused: %s", tag, error)
        raise
