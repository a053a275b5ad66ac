"""Copying blocks into the first tier in the background."""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from ucm.store.errors import BlockMissingError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockKey
    from ucm.store.pool import Pool
    from ucm.store.tier import Tier

#: How many copies may wait: more would be old news by the time they are made.
_MOST_WAITING = 1024


class Promoter:
    """Copies whole files, so that it needs to know nothing of what is in them.

    Args:
        tiers: The store's, fastest first.
        pool: Whose threads copy.
    """

    def __init__(self, tiers: Sequence[Tier], pool: Pool) -> None:
        self._first, self._lower = tiers[0], tiers[1:]
        self._pool = pool
        self._lock = Lock()
        self._waiting: set[BlockKey] = set()
        self._closed = False

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Bring blocks nearer: into the first tier, or if there is only one, into whatever reads ahead for it."""
        if self._lower:
            missing = [key for key, there in zip(keys, self._first.contains(keys), strict=True) if not there]
            for key in missing:
                self.promote(key)
        else:
            self._pool.submit([partial(self._first.prefetch, key) for key in keys])

    def promote(self, key: BlockKey) -> None:
        """Copy a block from a lower tier, unless that is under way or too much is."""
        with self._lock:
            if self._closed or key in self._waiting or len(self._waiting) >= _MOST_WAITING:
                return
            self._waiting.add(key)
        self._pool.submit([partial(self._copy, key)])

    def close(self) -> None:
        """Skip what waits."""
        with self._lock:
            self._closed = True

    def _copy(self, key: BlockKey) -> None:
        try:
            if not self._closed:
                self._copy_from_lower(key)
        except StoreError as error:
            self._first.counters.failed("promote", error)
        finally:
            with self._lock:
                self._waiting.discard(key)

    def _copy_from_lower(self, key: BlockKey) -> None:
        for tier in self._lower:
            try:
                content = tier.read_file(key)
            except BlockMissingError:
                continue
            writer = self._first.writer(key, content.nbytes)
            if writer is not None:
                try:
                    writer.write([content], 0, content.nbytes)
                    writer.commit()
                except StoreError:
                    writer.abort()
                    raise
            return
