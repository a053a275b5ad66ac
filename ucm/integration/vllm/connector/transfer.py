"""One group's blocks between its KV cache and its store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.integration.vllm.connector.saving import DumpTask, Saver
from ucm.store.base import BlockTransfer
from ucm.store.slab import CopyTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.integration.vllm.connector.host_memory import HostMemory
    from ucm.store.base import BlockGeometry, BlockKey, KVStore, Task, TaskResult
    from ucm.store.slab import SlabReader


@dataclass(frozen=True, slots=True)
class Staged:
    """Where blocks lie in the slab.

    Args:
        places: Where this rank's part of each begins.
        tiers: The tier that each came from.
    """

    places: Sequence[int]
    tiers: Sequence[str]


class GroupTransfer(ABC):
    """Moves blocks of one KV-cache group; a call starts a task, ``wait`` ends it.

    A dump copies its blocks into rows of host memory and has the store write those. So whoever is to write the blocks
    waits for the copy, and for no medium; a medium that is slow or stuck costs rows. Without a free row a block is not
    saved.
    """

    #: The layers, in the order of a block's bytes.
    layer_names: Sequence[str]
    #: Bytes of a block.
    block_bytes: int
    #: Tokens of a block.
    tokens_per_block: int

    @abstractmethod
    def load(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range, staged: Staged | None) -> Task:
        """Bring some layers of blocks into the KV cache: from the slab, or those that are not there from the store."""

    @abstractmethod
    def dump(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range) -> Task:
        """Take some layers of blocks out of the KV cache; they become visible by ``commit``."""

    @abstractmethod
    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Make blocks visible, after the dumps called before."""

    @abstractmethod
    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Forget blocks that were dumped and will not be committed."""

    def stand_back(self, *, active: bool) -> None:
        """The forward takes the processors that dumps need, or no longer does; see `KVStore.stand_back`."""
        del active

    @abstractmethod
    def copied(self, task: Task) -> None:
        """Wait until a dump reads the KV cache no longer; that takes as long as copying, whatever the medium does."""

    @property
    @abstractmethod
    def waiting_bytes(self) -> int:
        """What was dumped and is not written yet."""

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
    """The KV cache lies in host memory: it is filled in place, and copied by the thread that saves.

    Args:
        memory: Where the blocks are.
        store: Their store.
        slab: Where they are staged.
        dump_queue_bytes: What may wait for being written.
    """

    def __init__(self, memory: HostMemory, store: KVStore, slab: SlabReader, dump_queue_bytes: int) -> None:
        self._memory = memory
        self.store = store
        self._slab = slab
        self._saver = Saver(store, dump_queue_bytes)
        self.layer_names = [layout.name for layout in memory.layouts]
        self.block_bytes = memory.geometry.nbytes
        self.tokens_per_block = memory.group.block_size

    def load(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range, staged: Staged | None) -> Task:
        """Bring some layers of blocks into the KV cache."""
        return start_load(self.store, self._slab, self._blocks(keys, block_ids, layers), staged, self._memory.geometry)

    def dump(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range) -> Task:
        """Copy some layers of blocks, and have them written."""
        memory = self._memory
        first, end = memory.shard_count(layers.start), memory.shard_count(layers.stop)
        task = self._saver.begin(keys, memory.geometry.shard_sizes[first:end], first)
        for place, row in task.rows:
            at = 0
            for shard in memory.buffers(block_ids[place], layers):
                row[at : at + shard.nbytes] = shard
                at += shard.nbytes
        self._saver.write(task, task.rows)
        task.copied.set()
        return task

    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Make blocks visible."""
        return self._saver.commit(self._saver.begin_commit(keys))

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Forget blocks."""
        self._saver.forget(keys)
        self.store.discard(keys)

    def stand_back(self, *, active: bool) -> None:
        """The forward runs on the host's processors."""
        self.store.stand_back(active=active)

    def copied(self, task: Task) -> None:
        """They are, since ``dump`` returned."""

    @property
    def waiting_bytes(self) -> int:
        """What was dumped and is not written yet."""
        return self._saver.waiting_bytes

    def check(self, task: Task) -> bool:
        """Whether a task is finished."""
        if isinstance(task, DumpTask):
            return self._saver.check(task)
        return (self._slab if isinstance(task, CopyTask) else self.store).check(task)

    def wait(self, task: Task) -> TaskResult:
        """Wait for a task."""
        if isinstance(task, DumpTask):
            return self._saver.wait(task)
        return (self._slab if isinstance(task, CopyTask) else self.store).wait(task)

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


def start_load(
    store: KVStore, slab: SlabReader, blocks: Sequence[BlockTransfer], staged: Staged | None, geometry: BlockGeometry
) -> Task:
    """Load blocks from the slab, or if they are not staged, from the store."""
    if staged is None:
        return store.load(blocks)
    skipped = sum(geometry.shard_sizes[: blocks[0].first_shard]) if blocks else 0
    return slab.load(blocks, [place + skipped for place in staged.places], staged.tiers)
