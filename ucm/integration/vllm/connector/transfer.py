"""One group's blocks between its KV cache and its store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from ucm.store.base import BlockTransfer
from ucm.store.leases import LeasingStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.integration.vllm.connector.host_memory import HostMemory
    from ucm.store.base import BlockKey, KVStore, Task, TaskResult


class GroupTransfer(ABC):
    """Moves blocks of one KV-cache group; a call starts a task, ``wait`` ends it.

    A dump reads the KV cache until its task is finished: nobody may write its blocks before.
    """

    #: The layers, in the order of a block's bytes.
    layer_names: Sequence[str]
    #: Bytes of a block.
    block_bytes: int
    #: Tokens of a block.
    tokens_per_block: int

    @abstractmethod
    def load(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range, *, lease: str | None = None
    ) -> Task:
        """Bring some layers of blocks into the KV cache."""

    @abstractmethod
    def dump(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range) -> Task:
        """Take some layers of blocks out of the KV cache; they become visible by ``commit``."""

    @abstractmethod
    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Make blocks visible, after the dumps called before."""

    @abstractmethod
    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Forget what was dumped of blocks."""

    def stand_back(self, *, active: bool) -> None:
        """The forward takes the processors that dumps need, or no longer does; see `KVStore.stand_back`."""
        del active

    @abstractmethod
    def check(self, task: Task) -> bool:
        """Whether a task is finished."""

    @abstractmethod
    def wait(self, task: Task) -> TaskResult:
        """Wait for a task."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was committed."""


class HostTransfer(GroupTransfer):
    """The KV cache lies in host memory: the store reads and writes it in place.

    Args:
        memory: Where the blocks are.
        store: Their store.
    """

    def __init__(self, memory: HostMemory, store: KVStore) -> None:
        self._memory = memory
        self.store = store
        self.layer_names = [layout.name for layout in memory.layouts]
        self.block_bytes = memory.geometry.nbytes
        self.tokens_per_block = memory.group.block_size

    def load(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range, *, lease: str | None = None
    ) -> Task:
        """Bring some layers of blocks into the KV cache."""
        return load_from(self.store, self._blocks(keys, block_ids, layers), lease)

    def dump(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range) -> Task:
        """Take some layers of blocks out of the KV cache."""
        return self.store.dump(self._blocks(keys, block_ids, layers))

    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Make blocks visible."""
        return self.store.commit(keys)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Forget what was dumped of blocks."""
        self.store.discard(keys)

    def stand_back(self, *, active: bool) -> None:
        """The forward runs on the host's processors."""
        self.store.stand_back(active=active)

    def check(self, task: Task) -> bool:
        """Whether a task is finished."""
        return self.store.check(task)

    def wait(self, task: Task) -> TaskResult:
        """Wait for a task."""
        return self.store.wait(task)

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def _blocks(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range) -> list[BlockTransfer]:
        memory = self._memory
        first_shard = memory.shard_count(layers.start)
        return [
            BlockTransfer(key, memory.buffers(block_id, layers), first_shard)
            for key, block_id in zip(keys, block_ids, strict=True)
        ]


def load_from(store: KVStore, blocks: Sequence[BlockTransfer], lease: str | None) -> Task:
    """Load blocks, those of a lease from where it holds them."""
    if lease is not None and isinstance(store, LeasingStore):
        return store.load(blocks, lease)
    return store.load(blocks)
