"""Copy blocks into lower tiers in the background, after a save."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ucm.background import enter_background
from ucm.clock import SYSTEM
from ucm.logger import get_logger
from ucm.store.base import BlockMissingError, StoreError, StoreFullError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.clock import Clock, Thread
    from ucm.store.base import BlockKey
    from ucm.store.config import StoreConfig
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
    retain_until: float


class WriteBehind:
    """Writes blocks into one lower tier, with one thread and a bounded queue.

    Only keys are queued: the bytes stay in the tier that accepted the block and are read from there in their turn. A
    block that this tier has evicted meanwhile is dropped.

    Args:
        above: The tiers that may have accepted a block, fastest first.
        tier: The lower tier.
        codec: The codec of stored blocks.
        config: Says how many bytes may wait in all lanes of the tier; further blocks are dropped and counted.
        clock: The store's clock.
    """

    def __init__(
        self, above: Sequence[Guard], tier: Guard, codec: HeaderCodec, config: StoreConfig, *, clock: Clock = SYSTEM
    ) -> None:
        self._clock = clock
        self._above = tuple(above)
        self._tier = tier
        self._most = max(1, config.write_behind_bytes // tier.tier.lanes // codec.file_nbytes)
        self._codec = codec
        self._nice = config.save_nice
        self._changed = clock.condition()
        self._waiting: deque[_Waiting] = deque()  # its first one is being written
        self._tries = 0  # of the first block
        self._thread: Thread | None = None
        self._closed = False

    @property
    def queued(self) -> tuple[int, int]:
        """The number of waiting blocks, and their bytes."""
        blocks = len(self._waiting)
        return blocks, blocks * self._codec.file_nbytes

    def add(self, key: BlockKey, depth: int = 0, retain_until: float = 0.0) -> None:
        """Queue a block, with its depth in its chain and its lease; drop it if the queue is full."""
        with self._changed:
            full = len(self._waiting) >= self._most
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
            return self._changed.wait_for(lambda: not self._waiting, seconds)

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
            dropped = len(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        closed = StoreUnavailableError(f"the store was closed before the block was written to {self._tier.name}")
        for _ in range(dropped):
            self._tier.counters.failed("save", closed)

    def _run(self) -> None:
        enter_background(self._nice)
        while batch := self._next():
            there = self._tier.contains([block.key for block in batch])
            for block, has in zip(batch, there, strict=False):
                if self._closed or not (self._tier.takes and (has or self._is_over(block))):
                    break  # the block stays the first one
                self._tries = 0
                with self._changed:
                    if self._waiting:  # not closed meanwhile
                        self._waiting.popleft()
                    self._changed.notify_all()

    def _next(self) -> list[_Waiting]:
        """Return the next waiting blocks once the tier accepts writes; empty when the store is closed."""
        with self._changed:
            while not self._closed:
                if self._waiting and self._tier.takes:
                    return list(islice(self._waiting, _BATCH))
                self._changed.wait(_LOOK_SECONDS if self._waiting else None)
            return []

    def _is_over(self, block: _Waiting) -> bool:
        """Write the first block; return False if it is to be tried again, because the medium does not answer."""
        self._tries += 1
        try:
            return self._write(block) or self._tries >= _TRIES
        except Exception:  # noqa: BLE001 - an exception would end the thread and leave its queue waiting for ever
            get_logger(__name__).exception("[UCM.Store] writing to %s failed unexpectedly", self._tier.name)
            return True

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
