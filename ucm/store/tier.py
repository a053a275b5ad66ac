"""A tier: one medium for blocks, used synchronously by the threads of a store.

``ucm.store.tiered`` makes a store of one or several tiers. A tier of another kind derives from ``Tier``, or from
``ValueTier`` if it keeps whole values by name, as servers do, and can then stand in a pipeline; a whole store of
another kind derives from ``ucm.store.base.KVStore``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict

from ucm.logger import get_logger
from ucm.store.base import TierStats
from ucm.store.errors import (
    BlockCorruptError,
    BlockForeignError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from ucm.store.format import verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockGeometry, BlockKey, BlockTransfer, Buffer
    from ucm.store.config import StoreConfig
    from ucm.store.format import HeaderCodec
    from ucm.store.health import Breaker


#: Failures whose reasons are about the medium and not about one block, and how many of them are logged at most.
_OF_THE_MEDIUM = (StoreFullError, StoreUnavailableError)
_MOST_REASONS = 8

#: How reading a block went: what failed, or whether its time of last use was old. Then the tiers below renew theirs,
#: too, lest they evict what is only ever read from above.
Outcome: TypeAlias = "StoreError | bool"


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

    def took(self, operation: str, seconds: float) -> None:
        """Count the time of a ``lookup``, ``load`` or ``dump``."""
        with self._lock:
            if operation == "lookup":
                self._stats.lookup_calls += 1
                self._stats.lookup_seconds += seconds
            elif operation == "load":
                self._stats.load_seconds += seconds
            else:
                self._stats.dump_seconds += seconds

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
            get_logger(__name__).warning(
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


class TierOptions(BaseModel):
    """The options of a tier; one kind of tier derives its own. A secret is never one: its file or variable is."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class TierPlace:
    """What a tier is opened for.

    Args:
        name: How the tier is called in the pipeline.
        namespace: What the sharers of blocks have in common.
        geometry: What a block is; None in an instance that only looks up and prefetches.
        codec: What a block looks like when stored; None as the geometry.
        config: The whole store's options.
    """

    name: str
    namespace: str
    geometry: BlockGeometry | None
    codec: HeaderCodec | None
    config: StoreConfig


class Tier(ABC):
    """One medium, opened for one namespace. Methods that transfer raise StoreError, no other one raises at all.

    The class of a tier of others is called with an instance of its ``Options`` and a ``TierPlace``.

    A *deadline* is a time of ``time.monotonic()`` by which a call has ended: with ``StoreTimeoutError``, or with
    nothing found. A tier whose medium cannot be interrupted, a file system for instance, ignores it in transfers: the
    store sees to it that nobody else waits for such a call. A lookup keeps it in any case.

    Args:
        name: Its name in results and statistics.
        timeout: Seconds that a lookup may take.
        transfer_timeout: Seconds that a batch of loads, or one dump, may take.
        breaker: What keeps the store from asking while the medium fails, where several tiers share it; None: one of
            its own.
    """

    Options: ClassVar[type[TierOptions]] = TierOptions
    #: Bytes that are read in one call, about.
    batch_nbytes: ClassVar[int] = 16 << 20
    #: Whether the parts of the tier, such as directories, each have a breaker; the store then asks in any case.
    rests_by_itself: ClassVar[bool] = False
    #: How many parts there are that can get stuck on their own; each has its own threads.
    lanes: int = 1

    def __init__(
        self, name: str, timeout: float = 1.0, transfer_timeout: float = 10.0, breaker: Breaker | None = None
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.transfer_timeout = transfer_timeout
        self.breaker = breaker
        self.counters = TierCounters(name)

    @classmethod
    def open(cls, options: Any, place: TierPlace) -> Tier:
        """Make a tier of this kind.

        Args:
            options: An instance of ``Options``.
            place: What it is opened for.

        Raises:
            ConfigError: It cannot be opened as configured.
        """
        made: Any = cls
        opened: Tier = made(options, place)
        return opened

    def lane(self, key: BlockKey) -> int:
        """Which part of the tier has a block."""
        del key
        return 0

    @property
    def resting(self) -> float:
        """The share of its parts that rest, 0 to 1; of a tier that ``rests_by_itself``."""
        return 0.0

    @abstractmethod
    def contains(self, keys: Sequence[BlockKey], deadline: float) -> list[bool]:
        """Whether each block is there, all in one round trip."""

    def prefix(self, keys: Sequence[BlockKey], deadline: float) -> int:
        """How many of the first blocks are there without a gap."""
        found = self.contains(keys, deadline)
        return found.index(False) if False in found else len(found)

    @abstractmethod
    def read_many(self, blocks: Sequence[BlockTransfer], deadline: float) -> list[Outcome]:
        """Fill memory with shards, verified; one outcome for each block.

        A damaged block is set aside before its error is returned.
        """

    def touch(self, key: BlockKey) -> None:
        """Renew a block's time of last use, if it is there; a tier that never evicts need do nothing."""
        del key

    @abstractmethod
    def read_file(self, key: BlockKey, deadline: float) -> Buffer:
        """A whole block as it is stored, header and shards, verified; valid until this thread's next call."""

    def expect(self, keys: Sequence[BlockKey], file_nbytes: int) -> None:
        """Prepare for these blocks, each for its own ``writer``; a tier that has nothing to prepare need do nothing."""
        del keys, file_nbytes

    @abstractmethod
    def writer(self, key: BlockKey, file_nbytes: int) -> BlockWriter | None:
        """Begin a block that will have this length; None if the tier has it already."""

    def put(self, key: BlockKey, content: Buffer, deadline: float) -> None:
        """Store a whole block, header and shards; one that is there may be replaced by it."""
        del deadline
        self.expect([key], content.nbytes)
        writer = self.writer(key, content.nbytes)
        if writer is not None:
            try:
                writer.write([content], 0, content.nbytes)
                writer.commit()
            except StoreError:
                writer.abort()
                raise

    def prefetch(self, key: BlockKey) -> None:
        """Have the medium read ahead, if it can."""
        del key

    def stats(self) -> TierStats:
        """A snapshot of the counters, and the usage if it is known."""
        return self.counters.snapshot(None, None)

    def close(self) -> None:  # noqa: B027 - a tier may have nothing to end
        """End its threads and connections."""


class ValueTier(Tier):
    """A tier that keeps a block as one value by name: a server, a bucket.

    Args:
        name: See ``Tier``.
        place: What it is opened for.
        timeout: See ``Tier``.
        transfer_timeout: See ``Tier``.
        breaker: See ``Tier``.
    """

    def __init__(
        self,
        name: str,
        place: TierPlace,
        timeout: float = 1.0,
        transfer_timeout: float = 10.0,
        breaker: Breaker | None = None,
    ) -> None:
        super().__init__(name, timeout, transfer_timeout, breaker)
        self.codec = place.codec

    @abstractmethod
    def fetch(self, key: BlockKey, deadline: float) -> Buffer:
        """The value of a block, unverified.

        Raises:
            BlockMissingError: There is none.
            StoreError: The medium does not answer.
        """

    @abstractmethod
    def put_value(self, key: BlockKey, buffers: Sequence[Buffer | bytearray], deadline: float) -> None:
        """Store a value, given in pieces, visible all at once; one that is there is replaced.

        Raises:
            StoreError: It could not be.
        """

    @abstractmethod
    def remove(self, key: BlockKey, deadline: float) -> None:
        """Delete a block, if it is there.

        Raises:
            StoreError: It could not be.
        """

    def read_many(self, blocks: Sequence[BlockTransfer], deadline: float) -> list[Outcome]:
        """One value after the other, each copied."""
        return [self._read(block, deadline) for block in blocks]

    def read_file(self, key: BlockKey, deadline: float) -> Buffer:
        """The value, verified by its own header, and by the codec if there is one."""
        content = self.fetch(key, deadline)
        if self.codec is not None:
            refusal = self.codec.check(content, key)
            if refusal is not None:
                raise self.damaged(key, refusal, deadline)
            return content
        try:
            verify(content, key)
        except (BlockCorruptError, BlockForeignError) as error:
            raise self.damaged(key, error, deadline) from error
        return content

    def put(self, key: BlockKey, content: Buffer, deadline: float) -> None:
        """As one piece."""
        self.put_value(key, [content], deadline)

    def writer(self, key: BlockKey, file_nbytes: int) -> BlockWriter | None:
        """One that collects the block in memory; None if the tier has it."""
        if self.contains([key], time.monotonic() + self.timeout)[0]:
            return None
        return ValueWriter(self, key, file_nbytes)

    def damaged(self, key: BlockKey, error: StoreError, deadline: float) -> StoreError:
        """Delete a block that cannot be used, and give the error back."""
        error.where = f"{self.name}: {key.hex()}"
        self.counters.set_aside()
        try:
            self.remove(key, deadline)
        except StoreError as failure:
            self.counters.failed("remove", failure)
        return error

    def _read(self, block: BlockTransfer, deadline: float) -> Outcome:
        codec = self.codec
        if codec is None:
            raise ValueError("the store was opened without a geometry: it looks up and prefetches, no more")
        try:
            content = self.fetch(block.key, deadline)
            refusal = codec.check(content, block.key)
            if refusal is not None:
                return self.damaged(block.key, refusal, deadline)
        except StoreError as error:
            return error
        for number, shard in enumerate(block.shards, block.first_shard):
            at = codec.offsets[number]
            shard.cast("B")[:] = content[at : at + shard.nbytes]
        return False


class ValueWriter(BlockWriter):
    """Collects a block in memory and puts it at once.

    Args:
        tier: Where to.
        key: The block.
        nbytes: How long it will be.
    """

    def __init__(self, tier: ValueTier, key: BlockKey, nbytes: int) -> None:
        self._tier, self._key = tier, key
        self._memory = memoryview(bytearray(nbytes))

    def write(self, buffers: Sequence[Buffer | bytearray], offset: int, nbytes: int) -> None:
        """Copy."""
        del nbytes
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            self._memory[offset : offset + view.nbytes] = view
            offset += view.nbytes

    def pause(self) -> None:
        """Nothing is open."""

    def commit(self) -> None:
        """Put it."""
        self._tier.put_value(self._key, [self._memory], time.monotonic() + self._tier.transfer_timeout)

    def abort(self) -> None:
        """Let the memory go."""
        self._memory = memoryview(b"")
