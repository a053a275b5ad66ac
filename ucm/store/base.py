"""The interface of a KV store.

A *block* is the KV cache of one vLLM block of tokens in one KV-cache group on one worker rank. It consists of
*shards*, byte ranges of fixed sizes, one or more for each attention layer, and is named by its *key*. A store is opened
for one *namespace*: everything that two engines must have in common to share blocks has gone into its name, and into
the fingerprint of the geometry. A block is whole or absent: what was dumped becomes visible by ``commit`` alone.

Calls return at once unless they say otherwise. Transfers run in the store's own threads; the caller keeps the buffers
alive and untouched until ``wait`` returned for their task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from ucm.store.errors import StoreError

#: A block's name within its namespace: the 16 to 64 bytes of a digest.
BlockKey = NewType("BlockKey", bytes)

#: Memory of one shard: contiguous bytes, writable where they are loaded into.
Buffer: TypeAlias = memoryview


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """What the bytes of a namespace's blocks are.

    Args:
        shard_sizes: The bytes of each shard, in order.
        fingerprint: 16 bytes that name the meaning of the bytes (layers, shapes, strides, dtypes). A stored block with
            another fingerprint is never loaded.
    """

    shard_sizes: tuple[int, ...]
    fingerprint: bytes

    @property
    def nbytes(self) -> int:
        """The bytes of a whole block."""
        return sum(self.shard_sizes)


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Some or all shards of one block on their way between a store and memory.

    Args:
        key: The block.
        shards: The memory of consecutive shards; each as long as the geometry says.
        first_shard: The index of the first of them.
    """

    key: BlockKey
    shards: Sequence[Buffer]
    first_shard: int = 0


@dataclass(frozen=True, slots=True)
class TaskResult:
    """How a finished task went.

    Args:
        done: The keys that went well, each with the tier that served or took it (``posix``, ``dram``, …).
        failed: Every other key with the reason. The memory of a block that failed to load holds anything.
        nbytes: Bytes moved for the keys that went well.
        seconds: From the call to the last byte.
    """

    done: Mapping[BlockKey, str]
    failed: Mapping[BlockKey, StoreError]
    nbytes: int
    seconds: float


class Task:
    """A transfer under way; what ``load``, ``dump`` and ``commit`` return."""


@dataclass(slots=True)
class TierStats:
    """What one tier has counted since the store was opened; the counters only rise."""

    lookups: int = 0  #: keys asked for
    hits: int = 0  #: keys found
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    dumped_blocks: int = 0
    dumped_bytes: int = 0
    evicted_blocks: int = 0
    set_aside_blocks: int = 0
    failures: dict[str, int] = field(default_factory=dict)  #: by ``<operation>.<cause>``, for instance ``load.corrupt``
    used_bytes: int | None = None  #: of the whole tier, as far as known; by all who use it
    capacity_bytes: int | None = None  #: None if there is no limit
    lookup_calls: int = 0  #: batches of keys asked for
    lookup_seconds: float = 0.0  #: what they took
    load_seconds: float = 0.0  #: what reading took, of all threads together
    dump_seconds: float = 0.0  #: what writing took, of all threads together
    queued_blocks: int = 0  #: blocks that wait to be written behind
    queued_bytes: int = 0  #: and their bytes
    resting: float = 0.0  #: the share of it that is left alone after failures, 0 to 1


class KVStore(ABC):
    """A store opened for one namespace.

    An instance may be used from several threads. No method but ``wait`` and ``close`` blocks for longer than one
    metadata operation per key. No method raises for the state of a block or of the medium: blocks that cannot be
    reached are not found, and transfers say per key what failed. Misuse (a shard of the wrong size) raises ValueError.

    Names and split of work follow UCM's store interface (``lookup``, ``prefetch``, ``load``, ``dump``, ``wait``,
    ``check``, ``commit``).
    """

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each block is there, as far as its name tells; its bytes are checked when it is loaded."""

    @abstractmethod
    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many blocks are there from the first key on without a gap."""

    @abstractmethod
    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Bring blocks into a faster tier, or the page cache, in the background and as far as possible."""

    @abstractmethod
    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Read shards into memory, each verified against the checksum that it was stored with."""

    @abstractmethod
    def dump(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Take shards, in any order and any number of calls per block; nothing becomes visible.

        A block that the store has already is taken as done and not written again.
        """

    @abstractmethod
    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Make dumped blocks visible, each whole at once, after all dumps called before; see IncompleteBlockError."""

    @abstractmethod
    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Forget dumped shards that will not be committed, for instance of an aborted request."""

    def stand_back(self, *, active: bool) -> None:
        """Let the caller compute: a hint that what runs in the background should stay off the processors for a while.

        Args:
            active: Whether that begins or ends. A caller that waits for a task ends it as well.
        """
        del active

    @abstractmethod
    def wait(self, task: Task) -> TaskResult:
        """Block until a task is finished. May be called again, with the same result."""

    @abstractmethod
    def check(self, task: Task) -> bool:
        """Whether a task is finished, without blocking."""

    def flush(self, seconds: float) -> bool:
        """Wait until what was committed is in every tier that takes it.

        Args:
            seconds: How long at most.

        Returns:
            Whether nothing waits any longer; what was dropped does not wait.
        """
        del seconds
        return True

    @abstractmethod
    def stats(self) -> Mapping[str, TierStats]:
        """A snapshot of each tier's counters, fastest tier first."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was committed, drop the rest, end the threads. A closed store takes no more calls."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
