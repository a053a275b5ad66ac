"""A tier: one medium for blocks, used synchronously by the threads of a store.

``ucm.store.tiered`` makes a store of one or several tiers. A tier of another kind derives from ``Tier`` and can then
stand in a pipeline; a whole store of another kind derives from ``ucm.store.base.KVStore``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

from ucm.logger import get_logger
from ucm.store.base import TierStats
from ucm.store.errors import StoreFullError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockKey, BlockTransfer, Buffer
    from ucm.store.errors import StoreError


#: Failures whose reasons are about the medium and not about one block, and how many of them are logged at most.
_OF_THE_MEDIUM = (StoreFullError, StoreUnavailableError)
_MOST_REASONS = 8


class TierCounters:
    """What a tier counts; every method may be called from any thread.

    Args:
        tier: Its name, for the log.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = Lock()
        self._stats = TierStats()
        self._reasons: dict[str, set[str]] = {}

    def looked_up(self, asked: int, found: int) -> None:
        """Count keys of a lookup."""
        with self._lock:
            self._stats.lookups += asked
            self._stats.hits += found

    def loaded(self, nbytes: int) -> None:
        """Count a block, or shards of it, that was loaded."""
        with self._lock:
            self._stats.loaded_blocks += 1
            self._stats.loaded_bytes += nbytes

    def dumped(self, nbytes: int) -> None:
        """Count a block that became visible."""
        with self._lock:
            self._stats.dumped_blocks += 1
            self._stats.dumped_bytes += nbytes

    def evicted(self, blocks: int) -> None:
        """Count blocks deleted to make room."""
        with self._lock:
            self._stats.evicted_blocks += blocks

    def set_aside(self) -> None:
        """Count a damaged block taken out of the way."""
        with self._lock:
            self._stats.set_aside_blocks += 1

    def failed(self, operation: str, error: StoreError) -> None:
        """Count a failure; the first of each kind is logged, and the first with each reason of the medium's."""
        label = f"{operation}.{error.cause}"
        with self._lock:
            failures = self._stats.failures
            failures[label] = failures.get(label, 0) + 1
            reasons = self._reasons.setdefault(label, set())
            is_new = not reasons or (isinstance(error, _OF_THE_MEDIUM) and error.what not in reasons)
            is_said = is_new and len(reasons) < _MOST_REASONS
            if is_said:
                reasons.add(error.what)
        if is_said:
            get_logger().warning(
                "[UCM.Store] %s in tier %s (logged once, counted from now on): %s", label, self._tier, error
            )

    def snapshot(self, used_bytes: int | None, capacity_bytes: int | None) -> TierStats:
        """A copy of the counters."""
        with self._lock:
            return replace(
                self._stats,
                failures=dict(self._stats.failures),
                used_bytes=used_bytes,
                capacity_bytes=capacity_bytes,
            )


class BlockWriter(ABC):
    """One block on its way into a tier: bytes of its file at their places, then ``commit`` or ``abort``.

    Used by one thread at a time. Methods raise StoreError; after one did, ``abort`` is called.
    """

    @abstractmethod
    def write(self, buffers: Sequence[Buffer | bytearray], offset: int, nbytes: int) -> None:
        """Take bytes of the block's file from an offset on; ``nbytes`` in all buffers together."""

    @abstractmethod
    def pause(self) -> None:
        """Give back what is scarce, for instance an open file, until the next call."""

    @abstractmethod
    def commit(self) -> None:
        """Make the block visible, whole at once."""

    @abstractmethod
    def abort(self) -> None:
        """Drop what was written. Never raises."""


class Tier(ABC):
    """One medium, opened for one namespace. Methods that transfer raise StoreError, no other one raises at all.

    Args:
        name: Its name in results and statistics.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.counters = TierCounters(name)

    @abstractmethod
    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each block is there; cheap."""

    @abstractmethod
    def prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first blocks are there without a gap."""

    @abstractmethod
    def read(self, block: BlockTransfer, lease: str | None) -> bool:
        """Fill memory with shards, verified, if need be those of a lease.

        A damaged block is set aside before the error is raised.

        Returns:
            Whether the block's time of last use was old: then the tiers below renew theirs, too, lest they evict what
            is only ever read from here.
        """

    def touch(self, key: BlockKey) -> None:
        """Renew a block's time of last use, if it is there; a tier that never evicts need do nothing."""
        del key

    @abstractmethod
    def read_file(self, key: BlockKey) -> Buffer:
        """A whole block's file, verified; valid until this thread's next call."""

    @abstractmethod
    def writer(self, key: BlockKey, file_nbytes: int) -> BlockWriter | None:
        """Begin a block whose file will have this length; None if the tier has it already."""

    @abstractmethod
    def prefetch(self, key: BlockKey) -> None:
        """Have the medium read ahead, if it can."""

    def lease(self, token: str, keys: Sequence[BlockKey], *, verify: bool) -> set[BlockKey]:
        """Hold blocks under a name, and say which; a tier that never evicts need do nothing."""
        del token, verify
        return {key for key, there in zip(keys, self.contains(keys), strict=True) if there}

    def release(self, token: str) -> None:
        """Let the blocks of a lease go."""
        del token

    @abstractmethod
    def stats(self) -> TierStats:
        """A snapshot of the counters and the usage."""

    @abstractmethod
    def close(self) -> None:
        """End its threads."""
