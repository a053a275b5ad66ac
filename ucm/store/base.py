"""The interface of a KV store, and its errors.

A *block* is the KV cache of one vLLM block of tokens, or of a chunk of such blocks, in one KV-cache group on one worker
rank, and is named by its *key*. It consists of one or more *layer slices*: byte ranges of fixed sizes, each of which
can be loaded and verified alone. A store is opened for one *namespace*, whose name covers everything that two engines
must have in common to share blocks, together with the fingerprint of the geometry. A block is saved whole, in one call,
and is whole or absent.

Calls return at once unless they say otherwise. Transfers run in the store's own threads; the caller keeps the buffers
alive and unchanged until ``wait`` of their task returns.

No error of a store ends a request by itself: blocks that could not be loaded are recomputed. Where vLLM cannot
recompute them, the connector stops the engine rather than compute with missing KV. Every error class has a ``cause``, a
short word that labels the failure counters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, NewType, TypeAlias

from ucm.clock import SYSTEM
from ucm.errors import UcmError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from ucm.clock import Clock

#: A block's name within its namespace: the 16 to 64 bytes of a digest.
BlockKey = NewType("BlockKey", bytes)
#: Memory of one or more layer slices: contiguous bytes, writable if they are loaded.
Buffer: TypeAlias = memoryview
#: Called for every buffer, and several times as fast as an expression in Python.
_NBYTES = attrgetter("nbytes")


class StoreError(UcmError):
    """A block could not be stored or loaded."""

    cause: ClassVar[str] = "other"
    #: The device and inode of the file that is unusable; None if none was read.
    file: tuple[int, int] | None = None


class BlockMissingError(StoreError):
    """The block is not in the store, or not any more."""

    cause = "missing"


class BlockCorruptError(StoreError):
    """The block's bytes differ from those stored: truncated, changed, or not a block. It has been quarantined."""

    cause = "corrupt"


class BlockForeignError(StoreError):
    """The block is intact but has another format version, namespace, key or geometry than expected."""

    cause = "foreign"


class BlockCompressedError(StoreError):
    """The block is compressed, and this process cannot decompress it. It stays where it is, for those who can."""

    cause = "compressed"


class BlockUnreadableError(StoreError):
    """The medium cannot read this block, for instance because of an I/O error, but lets it be moved away."""

    cause = "unreadable"


class StoreFullError(StoreError):
    """The medium has no room, or the write queue is full."""

    cause = "full"


def too_far_behind(limit: int) -> StoreFullError:
    """Return the error of a save that exceeds ``StoreConfig.save_queue_bytes``."""
    return StoreFullError(
        f"more than {limit} bytes wait for being written",
        fix="raise save_queue, or save_threads if the medium is not busy",
    )


class StoreUnavailableError(StoreError):
    """The medium does not answer: a directory vanished, a permission was withdrawn, an I/O error occurred."""

    cause = "unavailable"


class StoreTimeoutError(StoreUnavailableError):
    """The medium did not answer in time: a frozen server, a network that drops packets, a mount that hangs."""

    cause = "timeout"


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """The layer slice sizes and the fingerprint of a namespace's blocks.

    Args:
        slice_sizes: The size of each layer slice in bytes, in order.
        fingerprint: 16 bytes that identify the meaning of the bytes (layers, shapes, strides, dtypes). A stored block
            with another fingerprint is never loaded.
        element_size: The size of a number in bytes, which helps to compress: 1, 2, 4 or 8; 1 if there are several.
    """

    slice_sizes: tuple[int, ...]
    fingerprint: bytes
    element_size: int = 1

    @property
    def nbytes(self) -> int:
        """The size of a whole block in bytes."""
        return sum(self.slice_sizes)


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """One block to be saved, or some or all of its layer slices to be loaded.

    Args:
        key: The block's key.
        slices: The memory of consecutive layer slices, all of them to save a block: one buffer where they lie one after
            the other, which is fastest; else several, whatever each of them holds.
        first_slice: The index of the first layer slice.
        depth: How many tokens its chain has up to this block's end; of blocks used alike, the deepest are evicted
            first, so blocks of unequal sizes that depend on each other go together.
        retain_until: Of a block to save: until when to retain it, in seconds since the epoch; 0: not at all. Every tier
            that the block is written to retains it; see ``KVStore.retain``.
    """

    key: BlockKey
    slices: Sequence[Buffer]
    first_slice: int = 0
    depth: int = 0
    retain_until: float = 0.0

    @property
    def nbytes(self) -> int:
        """The bytes of the layer slices."""
        return sum(map(_NBYTES, self.slices))


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The outcome of a finished task.

    Args:
        done: The keys that succeeded, each with the tier that served or accepted it (``posix``, ``dram``, …).
        failed: Every other key with its error. The memory of a block that failed to load is undefined.
        nbytes: Bytes moved for the keys that succeeded.
        seconds: The time from the call to the last byte.
    """

    done: Mapping[BlockKey, str]
    failed: Mapping[BlockKey, StoreError]
    nbytes: int
    seconds: float


class Task(ABC):
    """A transfer in progress, as returned by ``load`` and ``save``. It ends also if the store is closed meanwhile."""

    @abstractmethod
    def wait(self) -> TaskResult:
        """Block until the transfer is finished. Later calls return the same result."""

    @abstractmethod
    def check(self) -> bool:
        """Return whether the transfer is finished, without blocking."""


@dataclass(slots=True)
class TierStats:
    """One tier's statistics since the store was opened; counters only rise."""

    lookups: int = 0  #: keys looked up
    hits: int = 0  #: keys found
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
    compressed_bytes: int = 0  #: what a tier that compresses has stored for these, with headers
    evicted_blocks: int = 0
    quarantined_blocks: int = 0
    failures: dict[str, int] = field(default_factory=dict)  #: by ``<operation>.<cause>``, for instance ``load.corrupt``
    used_bytes: int | None = None  #: used in the whole tier by all its users, as far as known
    capacity_bytes: int | None = None  #: None if there is no limit
    leased_bytes: int | None = None  #: of retained and pinned blocks, if this process counts them
    # By account (``ucm.store.shares``), if some have weights:
    hits_of: dict[str, int] = field(default_factory=dict)
    evicted_of: dict[str, int] = field(default_factory=dict)  #: blocks that this process deleted to make room
    bytes_of: dict[str, int] = field(default_factory=dict)  #: held, if this process counts them
    lookup_calls: int = 0  #: batches of keys looked up
    lookup_seconds: float = 0.0  #: total duration of lookups
    load_seconds: float = 0.0  #: total duration of reads, summed over threads
    save_seconds: float = 0.0  #: total duration of writes, summed over threads
    queued_blocks: int = 0  #: blocks queued to be written behind
    queued_bytes: int = 0  #: bytes of those blocks
    resting: float = 0.0  #: the share of the tier that is not used because of failures, 0 to 1


class KVStore(ABC):
    """A store opened for one namespace.

    An instance may be used from several threads. Only ``close`` blocks for longer than one metadata
    operation per key. No method raises for the state of a block or of the medium: blocks that cannot be reached are not
    found, and transfers report failures per key. Misuse (a layer slice of the wrong size) raises ValueError.

    Method names and responsibilities follow the known UCM's store interface. What that calls ``dump`` and ``commit`` is
    ``save``; its ``wait`` and ``check`` are methods of the ``Task``.
    """

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return whether each block exists, judged by its name; its bytes are checked when it is loaded."""

    @abstractmethod
    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Return how many blocks exist without a gap, from the first key on."""

    @abstractmethod
    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Read layer slices into memory and verify each against the checksum it was stored with."""

    @abstractmethod
    def save(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Write whole blocks; each becomes visible as soon as it is written.

        A block that the store already has counts as done and is not written again.
        """

    def renew(self, depths: Mapping[BlockKey, int]) -> None:
        """Note that all blocks of a chain are used, from its first one on, although they are not loaded.

        Their times of last use are renewed in the background, at most once per ``touch_seconds``. Call this for the
        whole chain: a block without those before it is worth nothing.

        Args:
            depths: The chain's blocks, each with its depth as in ``BlockTransfer``; missing ones are ignored.
        """
        del depths

    def retain(self, depths: Mapping[BlockKey, int], until: float, *, pinned: bool = False) -> None:
        """Lease all blocks of a chain, from its first one on: they are evicted after all blocks without a lease.

        Leases are set in the background, are not longer than ``lease_seconds``, and end by themselves. They hold for
        all processes that share a tier, and outlast these. A later lease on the same block extends it; nothing shortens
        it. Blocks that are saved later are leased by ``BlockTransfer.retain_until``.

        Args:
            depths: As for ``renew``.
            until: When the lease ends, in seconds since the epoch.
            pinned: Do not evict the blocks at all until then, where a tier can do this. Of pinned blocks beyond half of
                the capacity, some are only retained: of the salt that has pinned the most, those whose pins end first.
        """
        del depths, until, pinned

    def flush(self, seconds: float) -> bool:
        """Wait until every tier has received the saved blocks that it accepts.

        Args:
            seconds: The longest time to wait.

        Returns:
            Whether no block is waiting any more; dropped blocks do not wait.
        """
        del seconds
        return True

    @abstractmethod
    def stats(self) -> Mapping[str, TierStats]:
        """Return a snapshot of each tier's counters, fastest tier first."""

    @abstractmethod
    def close(self) -> None:
        """Finish saves and end the threads. A closed store accepts no more calls."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


#: How often, in seconds, a thread that waits for a task asks for it.
_ASK_SECONDS = 1.0


class TransferTask(Task):
    """Collects the outcomes of a number of transfers.

    Args:
        transfers: The number of transfers; with 0 the task is finished.
        asked: Called when somebody asks for the unfinished task; while they wait for it, every second.
        clock: The store's clock.
    """

    def __init__(self, transfers: int, asked: Callable[[], object] = bool, *, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._asked = asked
        self._started = clock.monotonic()
        self._lock = clock.lock()
        self._left = transfers
        self._done: dict[BlockKey, str] = {}
        self._failed: dict[BlockKey, StoreError] = {}
        self._nbytes = 0
        self._seconds = 0.0
        self._event = clock.event()
        if not transfers:
            self._event.set()

    def succeeded(self, key: BlockKey, tier: str, nbytes: int) -> None:
        """Record a successful transfer."""
        self.all_succeeded((key,), tier, nbytes)

    def all_succeeded(self, keys: Sequence[BlockKey], tier: str, nbytes: int) -> None:
        """Record successful transfers, with the bytes of all of them."""
        with self._lock:
            self._done.update(dict.fromkeys(keys, tier))
            self._nbytes += nbytes
            self._finish(len(keys))

    def failed(self, key: BlockKey, error: StoreError) -> None:
        """Record a failed transfer."""
        with self._lock:
            self._failed.setdefault(key, error)
            self._finish(1)

    def take(self, result: TaskResult) -> None:
        """Add the outcomes of another task, which was one of several steps of these transfers."""
        with self._lock:
            self._done.update(result.done)
            self._failed.update(result.failed)
            self._nbytes += result.nbytes

    def end(self, otherwise: Mapping[BlockKey, StoreError]) -> None:
        """End all transfers; those without an outcome have failed."""
        with self._lock:
            for key, error in otherwise.items():
                if key not in self._done:
                    self._failed.setdefault(key, error)
            self._finish(self._left)

    def _finish(self, transfers: int) -> None:
        self._left -= transfers
        if self._left == 0:
            # A key with several transfers succeeds only if all of them do.
            for key in self._failed:
                self._done.pop(key, None)
            self._seconds = self._clock.monotonic() - self._started
            self._event.set()

    def check(self) -> bool:
        """Return whether every transfer has ended."""
        if not self._event.is_set():
            self._asked()
        return self._event.is_set()

    def wait(self) -> TaskResult:
        """Wait for the last transfer and return the outcomes."""
        while not self._event.is_set():
            self._asked()
            self._event.wait(_ASK_SECONDS)
        return TaskResult(self._done, self._failed, self._nbytes, self._seconds)
