"""Copy blocks into lower tiers in the background, after a save."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from ucm.background import enter_background
from ucm.clock import SYSTEM
from ucm.logger import get_logger
from ucm.store.base import BlockMissingError, StoreError, StoreFullError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.clock import Clock, Thread
    from ucm.store.base import BlockKey
    from ucm.store.format import HeaderCodec
    from ucm.store.guard import Guard

#: How many blocks are looked up in a tier at once.
_BATCH = 64
#: How often a block is tried that the medium did not accept, in case the block itself is the cause. More often than
#: failures that start a rest, so that a rest costs no block.
_TRIES = 5
#: How often, in seconds, a resting tier is checked.
_LOOK_SECONDS = 0.1
#: How many seconds ``close`` of a store goes on writing.
CLOSE_SECONDS = 10.0


class _Waiting(NamedTuple):
    """A block that waits to be written behind."""

    key: BlockKey
    depth: int  #: see ``BlockTransfer``
    retain_until: float = 0.0
    tries: int = 0


class WriteBehind:
    """Writes blocks into one lower tier, with one thread and a bounded queue.

    Only keys are queued: the bytes stay in the tier that accepted the block and are read from there in their turn. A
    block that this tier has evicted meanwhile is dropped.

    Args:
        above: The tiers that may have accepted a block, fastest first.
        tier: The lower tier.
        limit: Bytes that may wait; further blocks are dropped and counted.
        codec: The codec of stored blocks.
        nice: How far to lower the thread's priority.
        clock: The store's clock.
    """

    def __init__(
        self,
        above: Sequence[Guard],
        tier: Guard,
        limit: int,
        codec: HeaderCodec,
        nice: int,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        self._above = tuple(above)
        self._tier = tier
        self._most = max(1, limit // codec.file_nbytes)
        self._codec = codec
        self._nice = nice
        self._changed = clock.condition()
        self._waiting: deque[_Waiting] = deque()
        self._in_hand = 0
        self._thread: Thread | None = None
        self._closed = False

    @property
    def queued(self) -> tuple[int, int]:
        """The number of waiting blocks, and their bytes."""
        with self._changed:
            blocks = len(self._waiting) + self._in_hand
        return blocks, blocks * self._codec.file_nbytes

    def add(self, key: BlockKey, depth: int = 0, retain_until: float = 0.0) -> None:
        """Queue a block, with its depth in its chain and its lease; drop it if the queue is full."""
        with self._changed:
            full = len(self._waiting) + self._in_hand >= self._most
            if not full and not self._closed:
                self._waiting.append(_Waiting(key, depth, retain_until))
                if self._thread is None:
                    self._thread = self._clock.started(self._run, "ucm-behind")
                self._changed.notify_all()
        if full:
            self._tier.counters.failed(
                "save",
                StoreFullError(
                    f"{self._most * self._codec.file_nbytes} bytes wait for being written to {self._tier.name}",
                    fix="none is needed if this is seldom: the tier is slower than what fills it; else raise "
                    "write_behind",
                ),
            )

    def flush(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until no block is waiting, and return whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._in_hand), seconds)

    def close(self, until: float) -> None:
        """Write waiting blocks until the deadline; drop and count the rest.

        Args:
            until: The deadline, by the clock's ``monotonic()``.
        """
        while self._tier.takes and (left := until - self._clock.monotonic()) > 0:
            if self.flush(min(left, _LOOK_SECONDS)):
                break
        with self._changed:
            self._closed = True
            dropped = len(self._waiting) + self._in_hand
            self._waiting.clear()
            self._changed.notify_all()
        closed = StoreUnavailableError(f"the store was closed before the block was written to {self._tier.name}")
        for _ in range(dropped):
            self._tier.counters.failed("save", closed)

    def _run(self) -> None:
        enter_background(self._nice)
        while batch := self._next():
            try:
                self._feed(batch)
            except Exception:  # noqa: BLE001 - an exception would end the thread and leave its queue waiting for ever
                get_logger(__name__).exception("[UCM.Store] writing to %s failed unexpectedly", self._tier.name)
            with self._changed:
                self._in_hand = 0
                self._changed.notify_all()

    def _next(self) -> list[_Waiting]:
        """Return the next waiting blocks once the tier accepts writes; empty when the store is closed."""
        with self._changed:
            while not self._closed:
                if self._waiting and self._tier.takes:
                    batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                    self._in_hand = len(batch)
                    return batch
                self._changed.wait(_LOOK_SECONDS if self._waiting else None)
            return []

    def _feed(self, batch: list[_Waiting]) -> None:
        there = self._tier.contains([block.key for block in batch])
        for number, (block, has) in enumerate(zip(batch, there, strict=True)):
            if self._closed:
                return
            if not self._tier.takes:
                self._again(batch[number:])
                return
            if not has and not self._write(block) and block.tries + 1 < _TRIES:
                self._again([block._replace(tries=block.tries + 1), *batch[number + 1 :]])
                return
            with self._changed:
                self._in_hand -= 1

    def _again(self, batch: list[_Waiting]) -> None:
        with self._changed:
            self._waiting.extendleft(reversed(batch))
            self._in_hand -= len(batch)

    def _write(self, block: _Waiting) -> bool:
        """Copy one block; return False if the medium does not answer and the block must be tried again."""
        key, lost = block.key, None
        for source in self._above:
            try:
                content = source.read_file(key)
            except BlockMissingError:
                continue
            except StoreError as error:
                source.counters.failed("load", error)
                lost = error
                continue
            try:
                self._tier.put(key, [content], self._codec.geometry.nbytes, block.depth, block.retain_until)
            except StoreError as error:
                self._tier.counters.failed("save", error)
                return not isinstance(error, StoreUnavailableError)
            return True
        evicted = f"block {key.hex()} was evicted before it was written to {self._tier.name}"
        self._tier.counters.failed("save", lost or BlockMissingError(evicted))
        return True
