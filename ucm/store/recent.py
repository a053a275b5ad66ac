"""Remember keys that were recently found present."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucm.store.base import BlockKey


class RecentKeys:
    """A set of keys that expire, in two generations; the older one is dropped at the end of its time.

    Args:
        limit: The most keys held; 0 or 1 hold none.
        seconds: How long a key is held at least, unless there are too many; at most twice as long.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self._half = limit // 2
        self._seconds = seconds
        self._young: set[BlockKey] = set()
        self._old: set[BlockKey] = set()
        self._turn = 0.0

    def generations(self) -> tuple[set[BlockKey], set[BlockKey]]:
        """Return the younger and the older set for one lookup; add new keys to the younger one."""
        if not self._half:
            return set(), set()
        now = time.monotonic()
        if now >= self._turn + self._seconds:
            self._young, self._old = set(), set()
            self._turn = now + self._seconds
        elif now >= self._turn:
            self._young, self._old = set(), self._young
            self._turn += self._seconds
        elif len(self._young) > self._half:
            self._young, self._old = set(), self._young
            self._turn = now + self._seconds
        return self._young, self._old

    def drop(self, key: BlockKey) -> None:
        """Forget a key that is, or may be, gone."""
        self._young.discard(key)
        self._old.discard(key)
