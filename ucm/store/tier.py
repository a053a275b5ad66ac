"""Define a tier: one medium for blocks, called synchronously by the threads of a store.

``ucm.store.tiered`` combines one or several tiers into a store. A custom tier derives from ``Tier``, or from
``ValueTier`` if it stores whole values by name, as servers do, and can then be part of a pipeline; a custom store
derives from ``ucm.store.base.KVStore``.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict

from ucm.clock import SYSTEM
from ucm.logger import get_logger
from ucm.store.base import (
    BlockCorruptError,
    BlockForeignError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
    TierStats,
)
from ucm.store.compression import Compression, check_installed
from ucm.store.format import known_codec, scatter, verify
from ucm.store.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.clock import Clock
    from ucm.store.authentication import Authenticator
    from ucm.store.base import BlockGeometry, BlockKey, BlockTransfer, Buffer
    from ucm.store.config import StoreConfig
    from ucm.store.format import HeaderCodec
    from ucm.store.health import Breaker

#: Failures that concern the medium rather than one block, and how many different reasons are logged at most.
_OF_THE_MEDIUM = (StoreFullError, StoreUnavailableError)
_MOST_REASONS = 8
#: The outcome of reading a block: an error, or whether its time of last use was old. If it was, the lower tiers renew
#: theirs as well, so that they do not evict blocks that are always read from a higher tier.
Outcome: TypeAlias = "StoreError | bool"


class TierCounters:
    """The counters of a tier; methods may be called from any thread.

    Args:
        tier: The tier's name, for the log.
    """

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._lock = Lock()
        self._stats = TierStats()
        self._reasons: dict[str, set[str]] = {}
        self.shares = Shares()  #: whose hits and evictions are counted apart: accounts with weights

    def looked_up(self, asked: int, found: Sequence[BlockKey]) -> None:
        """Count the keys of a lookup, and those that were found."""
        of = self._by_account(found)
        with self._lock:
            self._stats.lookups += asked
            self._stats.hits += len(found)
            _add(self._stats.hits_of, of)

    def took(self, operation: str, seconds: float) -> None:
        """Add to the time of a ``lookup``, ``load`` or ``save``."""
        with self._lock:
            if operation == "lookup":
                self._stats.lookup_calls += 1
                self._stats.lookup_seconds += seconds
            elif operation == "load":
                self._stats.load_seconds += seconds
            else:
                self._stats.save_seconds += seconds

    def loaded(self, blocks: int, nbytes: int) -> None:
        """Count loaded blocks, or blocks of which layer slices were loaded, and their bytes."""
        with self._lock:
            self._stats.loaded_blocks += blocks
            self._stats.loaded_bytes += nbytes

    def saved(self, nbytes: int) -> None:
        """Count a block that became visible."""
        with self._lock:
            self._stats.saved_blocks += 1
            self._stats.saved_bytes += nbytes

    def compressed(self, nbytes: int) -> None:
        """Count the stored bytes of a block that was compressed, or was to be."""
        with self._lock:
            self._stats.compressed_bytes += nbytes

    def evicted(self, blocks: int, keys: Sequence[BlockKey] = ()) -> None:
        """Count blocks deleted to make room, with their keys if these are known."""
        of = self._by_account(keys)
        with self._lock:
            self._stats.evicted_blocks += blocks
            _add(self._stats.evicted_of, of)

    def quarantined(self) -> None:
        """Count a damaged block that was moved away or deleted."""
        with self._lock:
            self._stats.quarantined_blocks += 1

    def failed(self, operation: str, error: StoreError) -> None:
        """Count a failure; log the first of each kind and, for failures of the medium, the first with each reason."""
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
        """Return a copy of the counters."""
        with self._lock:
            found = deepcopy(self._stats)
        found.used_bytes, found.capacity_bytes = used_bytes, capacity_bytes
        return found

    def _by_account(self, keys: Sequence[BlockKey]) -> Counter[str]:
        return Counter(self.shares.account_of(key) for key in keys) if self.shares.weights else Counter()


def _add(to: dict[str, int], counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        to[name] = to.get(name, 0) + count


class TierOptions(BaseModel):
    """The options of a tier; tiers derive their own. An option names a secret's file or variable, never the secret."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def require_packages(self, name: str) -> None:
        """Check that the packages are installed that these options need.

        Args:
            name: The tier's name in the pipeline.

        Raises:
            ConfigError: One is not.
        """


class CompressingOptions(TierOptions):
    """The options of tiers that can compress blocks."""

    compression: Compression = "none"

    def require_packages(self, name: str) -> None:
        """Check that Zstandard is installed if blocks are compressed."""
        if self.compression != "none":
            check_installed(f"store: tiers: {name}: compression")


@dataclass(frozen=True, slots=True)
class TierPlace:
    """The context in which a tier is opened.

    Args:
        name: The tier's name in the pipeline.
        namespace: The name shared by all engines that share blocks.
        geometry: The geometry of a block; None in an instance that only looks up.
        codec: The codec of stored blocks; None if the geometry is None.
        config: The options of the whole store.
        authenticator: Authenticates blocks; None: they have checksums alone. The codec has it as well.
        clock: The clock of the store's deadlines; what a tier waits for waits by it as well.
    """

    name: str
    namespace: str
    geometry: BlockGeometry | None
    codec: HeaderCodec | None
    config: StoreConfig
    authenticator: Authenticator | None = None
    clock: Clock = SYSTEM


class Leased(NamedTuple):
    """What `Tier.lease` has done.

    Attributes:
        stored: How many of the blocks are stored.
        leased: How many of these are leased as asked.
        refused: What the system said of each block that cannot be leased, e.g. because another user owns its file.
    """

    stored: int
    leased: int
    refused: Sequence[OSError] = ()


class Tier(ABC):
    """One medium, opened for one namespace. Transfer methods raise StoreError; other methods never raise.

    The class of a third-party tier is called with an instance of its ``Options`` and a ``TierPlace``.

    A *deadline* is the ``monotonic()`` of the store's clock (in an engine ``time.monotonic()``) by which a call ends,
    with ``StoreTimeoutError`` or with nothing found. A tier whose medium cannot be interrupted, for instance a file
    system, ignores it in transfers: the store ensures that only the call's own thread waits for it. A lookup always
    meets its deadline.

    Args:
        name: The tier's name in results and statistics.
        timeout: Seconds that a lookup may take.
        transfer_timeout: Seconds that a batch of loads, or one save, may take.
        breaker: The breaker shared by tiers of the same medium, which stops calls while it fails; None: a separate
            one.
        clock: The clock of the deadlines, ``TierPlace.clock``.
    """

    Options: ClassVar[type[TierOptions]] = TierOptions
    #: About how many bytes to read in one call.
    batch_nbytes: ClassVar[int] = 16 << 20
    #: Whether the parts of the tier, such as directories, have their own breakers; the store then never skips the tier.
    rests_by_itself: ClassVar[bool] = False
    #: Whether it compares the tags of every block that it returns, by ``TierPlace.codec``, or if there is none by
    #: ``TierPlace.authenticator``; a tier that does not is refused together with an authentication key.
    authenticates: ClassVar[bool] = False
    #: Whether it keeps leases, see ``retain`` and ``lease``.
    leases: ClassVar[bool] = False
    #: How many blocks of a prefix to look up first, then several times as many, and so on: few where each costs a
    #: request, and a prompt may have none.
    first_wave: ClassVar[int] = sys.maxsize
    #: The number of parts that can get stuck independently; each has its own threads.
    lanes: int = 1

    def __init__(
        self,
        name: str,
        timeout: float = 1.0,
        transfer_timeout: float = 10.0,
        breaker: Breaker | None = None,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self.name = name
        self.timeout = timeout
        self.transfer_timeout = transfer_timeout
        self.breaker = breaker
        self.clock = clock
        self.counters = TierCounters(name)

    def lane(self, key: BlockKey) -> int:
        """Return the index of the part that stores a block."""
        del key
        return 0

    @property
    def resting(self) -> float:
        """The share of the tier's parts that rest, 0 to 1; used if ``rests_by_itself``."""
        return 0.0

    def moved_nbytes(self, block: BlockTransfer) -> int:
        """Return how many bytes a load of a block moves; see ``batch_nbytes``."""
        return block.nbytes

    @abstractmethod
    def contains(self, keys: Sequence[BlockKey], deadline: float) -> list[bool]:
        """Return whether each block exists, using one round trip for all."""

    @abstractmethod
    def read_many(self, blocks: Sequence[BlockTransfer], deadline: float) -> list[Outcome]:
        """Load layer slices into memory and verify them; return one outcome for each block.

        A damaged block is quarantined before its error is returned.
        """

    def renew(self, depths: Mapping[BlockKey, int], *, is_new: bool = False) -> None:
        """Renew the times of last use of a chain's blocks, as far as they exist.

        Called for every use of a chain, so a tier should do this in the background and not more often than necessary.
        See ``used_until``. A tier that never evicts can do nothing.

        Args:
            depths: The blocks, each with its depth as in ``BlockTransfer``.
            is_new: They were just written, which is a use, too, whatever was renewed before.
        """
        del depths, is_new

    def retain(self, depths: Mapping[BlockKey, int], until: float, *, pinned: bool = False) -> None:
        """Retain a chain's blocks, as far as they exist: evict them after all that are not.

        A lease is at most ``StoreConfig.lease_seconds`` long, ends by itself, and is never shortened by a use. A tier
        whose blocks others evict, such as a server, does nothing; so does one that never evicts.

        Args:
            depths: The blocks, each with its depth as in ``BlockTransfer``.
            until: When the lease ends, in seconds since the epoch.
            pinned: Do not evict them at all until then. A tier need not be able to.
        """
        del depths, until, pinned

    def lease(self, depths: Mapping[BlockKey, int], until: float, *, pinned: bool) -> Leased:
        """Lease blocks for a tool, as ``retain`` does, but at once; called only if it ``leases``.

        With ``until`` 0, end their leases, whoever asked for them: the blocks count as used now. A tier need not be
        able to; it then counts none of them as leased as asked.
        """
        raise NotImplementedError

    def drop(self, keys: Sequence[BlockKey]) -> int:
        """Delete blocks for a tool, also what is kept of damaged ones, and return how many there were.

        Raises:
            StoreError: The tier cannot delete single blocks, its medium does not answer, or it refused some blocks; the
                others are deleted.
        """
        del keys
        raise StoreError("this tier cannot delete single blocks")

    @abstractmethod
    def read_file(self, key: BlockKey, deadline: float) -> Buffer:
        """Return a whole stored block, header and layer slices, verified; valid until this thread's next call."""

    def has(self, key: BlockKey) -> bool:
        """Return whether a block exists that is to be saved; called by the threads that save."""
        return self.contains([key], self.clock.monotonic() + self.timeout)[0]

    @abstractmethod
    def put(self, key: BlockKey, pieces: Sequence[Buffer | bytearray], deadline: float) -> None:
        """Store a whole block atomically, given as pieces of its file. A block that exists may stay or be replaced.

        The pieces are not read after the call has ended, also with an error: their memory is used again at once.
        """

    def stats(self) -> TierStats:
        """Return a snapshot of the counters, and the usage if known."""
        return self.counters.snapshot(None, None)

    def close(self) -> None:  # noqa: B027 - a tier may have nothing to end
        """End the tier's threads and connections."""


class ValueTier(Tier):
    """A tier that stores each block as one named value, for instance on a server or in a bucket.

    Args:
        name: See ``Tier``.
        place: The context in which the tier is opened.
        timeout: See ``Tier``.
        transfer_timeout: See ``Tier``.
        breaker: See ``Tier``.
    """

    authenticates = True

    def __init__(
        self,
        name: str,
        place: TierPlace,
        timeout: float = 1.0,
        transfer_timeout: float = 10.0,
        breaker: Breaker | None = None,
    ) -> None:
        super().__init__(name, timeout, transfer_timeout, breaker, clock=place.clock)
        self.codec, self.authenticator, self.namespace = place.codec, place.authenticator, place.namespace
        self._geometry = place.geometry

    @abstractmethod
    def fetch(self, key: BlockKey, deadline: float) -> Buffer:
        """Return the value of a block, unverified.

        Raises:
            BlockMissingError: There is no such value.
            StoreError: The medium does not answer.
        """

    @abstractmethod
    def remove(self, key: BlockKey, deadline: float) -> None:
        """Delete a block, if it exists.

        Raises:
            StoreError: The block could not be deleted.
        """

    def moved_nbytes(self, block: BlockTransfer) -> int:
        """Return the bytes of a whole block: a part of it is loaded from the whole."""
        return block.nbytes if self.codec is None else self.codec.file_nbytes

    def fetch_many(self, keys: Sequence[BlockKey], deadline: float) -> list[Buffer | StoreError]:
        """Return the values of blocks, or why one is not returned; by default one after the other."""
        found: list[Buffer | StoreError] = []
        for key in keys:
            try:
                found.append(self.fetch(key, deadline))
            except StoreError as error:
                found.append(error)
        return found

    def read_many(self, blocks: Sequence[BlockTransfer], deadline: float) -> list[Outcome]:
        """Load values, with a copy of each."""
        values = self.fetch_many([block.key for block in blocks], deadline)
        return [
            self.outcome(block.key, value if isinstance(value, StoreError) else self._deliver(block, value), deadline)
            for block, value in zip(blocks, values, strict=True)
        ]

    def read_file(self, key: BlockKey, deadline: float) -> Buffer:
        """Return the value, decompressed, verified by its own header."""
        try:
            return self._plain(key, self.fetch(key, deadline))
        except (BlockCorruptError, BlockForeignError) as error:
            raise self.damaged(key, error, deadline) from error

    def drop(self, keys: Sequence[BlockKey]) -> int:
        """Delete one value after the other, each by a deadline of its own."""
        there = self.contains(keys, self.clock.monotonic() + self.timeout)
        for key in keys:
            self.remove(key, self.clock.monotonic() + self.timeout)
        return there.count(True)

    def outcome(self, key: BlockKey, refusal: StoreError | None, deadline: float) -> Outcome:
        """Return the outcome of a block, given what is wrong with it; delete an unusable one."""
        if isinstance(refusal, BlockCorruptError | BlockForeignError):
            return self.damaged(key, refusal, deadline)
        return refusal or False

    def damaged(self, key: BlockKey, error: StoreError, deadline: float) -> StoreError:
        """Delete an unusable block and return the error."""
        error.where = f"{self.name}: {key.hex()}"
        self.counters.quarantined()
        try:
            self.remove(key, deadline)
        except StoreError as failure:
            self.counters.failed("remove", failure)
        return error

    def _deliver(self, block: BlockTransfer, stored: Buffer) -> StoreError | None:
        """Verify a value and copy some of its layer slices into memory; return what is wrong with it, or None."""
        codec = known_codec(self.codec)
        try:
            header = codec.unpack(stored, block.first_slice, block.slices)
            if header is not None and codec.is_sound(header, block.key, block.first_slice, block.slices):
                return None
            scatter(self._plain(block.key, stored)[codec.offsets[block.first_slice] :], block.slices)
        except StoreError as error:
            return error
        return None

    def _plain(self, key: BlockKey, stored: Buffer) -> Buffer:
        """Return a value, decompressed and verified; raises like ``verify``."""
        return verify(stored, key, self.authenticator, namespace=self.namespace, geometry=self._geometry)[1]


# The time of last use of a block is the moment until which it is worth keeping, so that leases need no record and
# survive every process: for a block in use soon after the current span of seconds, for a retained or pinned one the end
# of its lease. The evictor goes by the time, so a retained block goes after all that have none, and leases end by
# themselves. A pinned block's time has 500 in its last three digits, in nanoseconds; every other time that is set is a
# multiple of 1000. The evictor does not take it before its end. File systems with whole seconds drop the mark: there, a
# pinned block is only retained. Two leases on one block become one with the later end, pinned if one of them is and has
# not ended.

#: Nanoseconds between the times of last use of blocks that are used in the same span, and end a token apart.
_APART = 1_000
#: The most tokens of a prompt whose blocks are ordered by their depth. Its last block's time is not before the end of
#: the span: else it would keep the time at which its file was written, which is later than that of the blocks before.
DEEPEST = 10_000_000


def used_until(now: float, touch_seconds: float, depth: int) -> int:
    """Return the time of last use of a block that is used or written now: soon after the current span of seconds ends.

    So a block need be renewed only once per span, and all blocks used in one span are ordered by their depth alone. A
    use of a chain is one of every block before its end, hence:

    - no block of a chain is ever newer than one before it, whoever used them, and the chain is evicted from its end;
    - a block that is written to the end of a chain in use is not newer than the chain, however slowly that is computed.

    Args:
        now: The time, in seconds since the epoch.
        touch_seconds: See ``StoreConfig``.
        depth: See ``BlockTransfer``.

    Returns:
        Nanoseconds since the epoch.
    """
    return kept_until((now // touch_seconds + 1) * touch_seconds if touch_seconds else now, depth - DEEPEST)


def kept_until(end: float, depth: int) -> int:
    """Return the time of last use of a block that is worth keeping until ``end``; see ``used_until``."""
    return int(end * 1e6) * 1_000 - depth * _APART


def lease_end(until: float, now: float, config: StoreConfig) -> float:
    """Return when a lease ends that is asked for now: at most ``lease_seconds`` after the current span; 0 for none.

    So long leases of one chain, asked for in one span, have one end. One whose end is past, or no number, is none.
    """
    if not config.lease_seconds or not until > now:
        return 0.0
    return min(until, used_until(now, config.touch_seconds, DEEPEST) / 1e9 + config.lease_seconds)


#: What a pinned block's time of last use is modulo 1000.
_MARK = 500
#: How far a time may be ahead besides a lease, in seconds: the longest span, and what hosts' clocks may differ by.
_SLACK = 90_000.0


def pinned_until(stamp: int) -> int:
    """Return a time in nanoseconds with the mark of a pinned block."""
    return stamp // 1000 * 1000 + _MARK


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """What a time of last use means; all times are in nanoseconds since the epoch.

    Args:
        longest_ns: The longest time by which a file's time may be ahead. Times beyond it were set by a wrong clock.
    """

    longest_ns: int

    @classmethod
    def of(cls, config: StoreConfig) -> LeaseRules:
        """Return the rules of a store."""
        return cls(int((config.lease_seconds + _SLACK) * 1e9))

    def rank(self, stamp: int, now: int) -> int:
        """Return what orders blocks for eviction, smallest first; one with a wrong time would else stay for ever."""
        return stamp if stamp <= now + self.longest_ns else 0

    def is_pinned(self, stamp: int, now: int) -> bool:
        """Return whether a block is pinned now."""
        return stamp % 1000 == _MARK and now < stamp <= now + self.longest_ns

    def joined(self, old: int, new: int, now: int) -> int:
        """Return the time of a block that has one and is given another; never earlier, unless the old one is wrong."""
        if old > now + self.longest_ns:
            return new
        latest = max(old, new)
        return pinned_until(latest) if self.is_pinned(old, now) or self.is_pinned(new, now) else latest
