"""Transfer blocks of one KV-cache group between its KV cache and its store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.integration.vllm.connector.saving import Saver, SaveTask
from ucm.store.base import BlockTransfer
from ucm.store.memory.slab import CopyTask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.integration.vllm.connector.memory import HostMemory
    from ucm.store.base import BlockGeometry, BlockKey, KVStore, Task, TaskResult
    from ucm.store.memory.slab import SlabReader


@dataclass(frozen=True, slots=True)
class Staged:
    """The places of blocks in the slab.

    Args:
        places: The offset of this rank's part of each block.
        tiers: The tier that each block was read from.
    """

    places: Sequence[int]
    tiers: Sequence[str]


class GroupTransfer(ABC):
    """Moves blocks of one KV-cache group; a call starts a task, ``wait`` ends it.

    A save copies its blocks into rows of host memory, which the store then writes. So a step that will overwrite the
    blocks waits only for the copy and not for a medium; a slow or stuck medium only occupies rows. A block for which no
    row is free is not saved.
    """

    #: The names of the layers, in the order of a block's bytes.
    layer_names: Sequence[str]
    #: The size of a block in bytes.
    block_bytes: int
    #: The number of tokens of a block.
    tokens_per_block: int

    @abstractmethod
    def load(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range, staged: Staged | None) -> Task:
        """Load some layers of blocks into the KV cache, from the slab if they are staged, else from the store."""

    @abstractmethod
    def save(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range) -> Task:
        """Save some layers of blocks from the KV cache; they become visible through ``commit``."""

    @abstractmethod
    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Make blocks visible, after all earlier saves."""

    @abstractmethod
    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Drop saved blocks that will not be committed."""

    def throttle(self, *, active: bool) -> None:
        """Note that a forward starts or stops using the processors that saves need; see `KVStore.throttle`."""
        del active

    @abstractmethod
    def copied(self, task: Task) -> None:
        """Wait until a save no longer reads the KV cache; this takes as long as the copy, whatever the medium does."""

    @property
    @abstractmethod
    def waiting_bytes(self) -> int:
        """Bytes that were saved and are not written yet."""

    @abstractmethod
    def check(self, task: Task) -> bool:
        """Return whether a task is finished."""

    @abstractmethod
    def wait(self, task: Task) -> TaskResult:
        """Wait for a task and return its result."""

    @abstractmethod
    def close(self) -> None:
        """Finish committed blocks and close the store."""


class HostTransfer(GroupTransfer):
    """Transfers blocks of a KV cache in host memory: loads fill it in place, saves are copied by the calling thread.

    Args:
        memory: The blocks in host memory.
        store: The store of the blocks.
        slab: The slab where blocks are staged.
        save_queue_bytes: Bytes that may wait to be written.
    """

    def __init__(self, memory: HostMemory, store: KVStore, slab: SlabReader, save_queue_bytes: int) -> None:
        self._memory = memory
        self.store = store
        self._slab = slab
        self._saver = Saver(store, save_queue_bytes)
        self.layer_names = [layout.name for layout in memory.layouts]
        self.block_bytes = memory.geometry.nbytes
        self.tokens_per_block = memory.group.block_size

    def load(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range, staged: Staged | None) -> Task:
        """Load some layers of blocks into the KV cache."""
        return start_load(self.store, self._slab, self._blocks(keys, block_ids, layers), staged, self._memory.geometry)

    def save(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range) -> Task:
        """Copy some layers of blocks and start to write them."""
        memory = self._memory
        first, end = memory.slice_count(layers.start), memory.slice_count(layers.stop)
        task = self._saver.begin(keys, memory.geometry.slice_sizes[first:end], first)
        for place, row in task.rows:
            at = 0
            for layer_slice in memory.buffers(block_ids[place], layers):
                row[at : at + layer_slice.nbytes] = layer_slice
                at += layer_slice.nbytes
        self._saver.write(task, task.rows)
        task.copied.set()
        return task

    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Make blocks visible."""
        return self._saver.commit(self._saver.begin_commit(keys))

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Drop saved blocks."""
        self._saver.forget(keys)
        self.store.discard(keys)

    def throttle(self, *, active: bool) -> None:
        """Pass the hint to the store, because the forward runs on the host's processors."""
        self.store.throttle(active=active)

    def copied(self, task: Task) -> None:
        """Do nothing: ``save`` returns after the copy."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were saved and are not written yet."""
        return self._saver.waiting_bytes

    def check(self, task: Task) -> bool:
        """Return whether a task is finished."""
        if isinstance(task, SaveTask):
            return self._saver.check(task)
        return (self._slab if isinstance(task, CopyTask) else self.store).check(task)

    def wait(self, task: Task) -> TaskResult:
        """Wait for a task and return its result."""
        if isinstance(task, SaveTask):
            return self._saver.wait(task)
        return (self._slab if isinstance(task, CopyTask) else self.store).wait(task)

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def _blocks(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range) -> list[BlockTransfer]:
        memory = self._memory
        first_slice = memory.slice_count(layers.start)
        return [
            BlockTransfer(key, memory.buffers(block_id, layers), first_slice)
            for key, block_id in zip(keys, block_ids, strict=True)
        ]


def start_load(
    store: KVStore, slab: SlabReader, blocks: Sequence[BlockTransfer], staged: Staged | None, geometry: BlockGeometry
) -> Task:
    """Start to load blocks, from the slab if they are staged, else from the store."""
    if staged is None:
        return store.load(blocks)
    skipped = sum(geometry.slice_sizes[: blocks[0].first_slice]) if blocks else 0
    return slab.load(blocks, [place + skipped for place in staged.places], staged.tiers)
