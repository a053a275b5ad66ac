"""Transfer blocks of one KV-cache group between its KV cache and its store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ucm.clock import SYSTEM
from ucm.integration.vllm.connector.kv_cache import NO_BLOCK
from ucm.integration.vllm.connector.saving import Saver
from ucm.store.base import BlockTransfer, StoreUnavailableError, Task, TransferTask
from ucm.store.config import StoreConfig
from ucm.store.format import gather
from ucm.store.health import Pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.clock import Clock
    from ucm.integration.vllm.connector.kv_cache import DeviceMemory, HostMemory
    from ucm.integration.vllm.connector.metadata import BlockMoves
    from ucm.integration.vllm.connector.saving import SaveTask
    from ucm.store.base import BlockGeometry, BlockKey, KVStore
    from ucm.store.memory.slab import SlabReader

#: Called when work has ended: with the device's error, or with None.
Ended = Callable[[Exception | None], None]
#: Page-locked memory per direction in bytes; two chunks share it.
STAGING_BYTES = 64 << 20


class GroupTransfer(ABC):
    """Moves chunks of one KV-cache group; a call starts a task.

    For the store, a chunk is one block with more layer slices.

    A save copies its chunks into rows of host memory, which the store then writes. So a step that will overwrite the
    blocks waits only for the copy and not for a medium; a slow or stuck medium only occupies rows. A chunk for which no
    row is free is not saved.
    """

    #: The tokens of a chunk.
    chunk_tokens = 0

    def __init__(
        self, geometry: BlockGeometry, layer_names: Sequence[str], store: KVStore, room: int, *, clock: Clock = SYSTEM
    ) -> None:
        self.store = store
        self._clock = clock
        self.saver = Saver(store, geometry.nbytes, room, clock=clock)  #: holds the rows
        self.layer_names = layer_names  #: in the order of a block's bytes
        self.chunk_bytes = geometry.nbytes

    def load(self, moves: BlockMoves, layers: range, share: int) -> Task:
        """Load some layers of chunks into the KV cache, from the slab if they are staged, else from the store.

        ``share`` is where this rank's part of a staged chunk begins, behind the chunk's place.
        """
        raise NotImplementedError

    def save(self, keys: Sequence[BlockKey], depths: Sequence[int], retain_until: float = 0.0) -> SaveTask:
        """Begin a save of chunks; ``copy`` fills it layer by layer, and ``confirm`` or ``drop`` ends it."""
        return self.saver.begin(keys, depths, retain_until)

    @abstractmethod
    def copy(self, task: SaveTask, block_ids: Sequence[int], layers: range) -> None:
        """Copy some layers of a save's chunks from the KV cache; ``block_ids`` are those of all chunks of the save."""

    def confirm(self, task: SaveTask) -> None:
        """Write a save's chunks after all its copies; each becomes visible when it is written."""
        task.confirm()

    def drop(self, task: SaveTask) -> None:
        """Write nothing of a save."""
        task.drop()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were saved and are not written yet."""
        return self.saver.room.taken_bytes

    def close(self) -> None:
        """Finish confirmed saves and close the store."""
        self.saver.close()
        self.store.close()


class HostTransfer(GroupTransfer):
    """Transfers blocks of a KV cache in host memory: loads fill it in place, saves are copied by the calling thread."""

    def __init__(
        self, memory: HostMemory, store: KVStore, slab: SlabReader, save_queue_bytes: int, *, clock: Clock = SYSTEM
    ) -> None:
        names = [layout.name for layout in memory.layouts]
        super().__init__(memory.geometry, names, store, save_queue_bytes, clock=clock)
        self._memory, self._slab, self.chunk_tokens = memory, slab, memory.group.chunk_tokens

    def load(self, moves: BlockMoves, layers: range, share: int) -> Task:
        """Load some layers of chunks into the KV cache."""
        memory = self._memory
        blocks_of, first_slice = memory.group.blocks_of, memory.slice_count(layers.start)
        blocks = [
            BlockTransfer(key, memory.buffers(blocks_of(moves.block_ids, place), layers), first_slice, depth)
            for place, (key, depth) in enumerate(zip(moves.keys, moves.depths, strict=True))
        ]
        places = _places(moves, share, blocks, memory.geometry)
        return self._slab.load(blocks, places, moves.tiers) if places else self.store.load(blocks)

    def copy(self, task: SaveTask, block_ids: Sequence[int], layers: range) -> None:
        """Copy some layers of a save's chunks at once."""
        memory = self._memory
        skipped = sum(memory.geometry.slice_sizes[: memory.slice_count(layers.start)])
        for place, row in enumerate(task.rows):
            gather(memory.buffers(memory.group.blocks_of(block_ids, place), layers), row[skipped:])


def _places(moves: BlockMoves, share: int, blocks: Sequence[BlockTransfer], geometry: BlockGeometry) -> list[int]:
    """Return where in the slab the layers of this rank's part of each staged chunk begin; nothing if none is staged."""
    skipped = sum(geometry.slice_sizes[: blocks[0].first_slice]) if blocks else 0
    return [place + share + skipped for place in moves.places]


def device_failed(error: Exception) -> StoreUnavailableError:
    """Return the error of blocks that could not be copied."""
    return StoreUnavailableError(f"a copy on the device failed: {error}")


@dataclass(slots=True)
class Stream:
    """A device stream with its torch module; on the host there is no stream and nothing to wait for."""

    module: Any = None
    stream: Any = None
    device: Any = None
    _nothing: AbstractContextManager[None] = field(default_factory=nullcontext)

    @classmethod
    def on(cls, device: Any) -> Stream:
        """Create a stream on a device (CUDA, or a torch backend with the same interface, such as Ascend's)."""
        if device.type == "cpu":
            return cls()
        import torch  # noqa: PLC0415 - this package is also imported without torch

        module = getattr(torch, device.type)
        return cls(module, module.Stream(device=device), device)

    def use_device(self) -> None:
        """Set the calling thread's device to that of the stream.

        A new thread uses the first device, and its first copy would create a context there, on another rank's GPU.
        """
        if self.module is not None:
            self.module.set_device(self.device)

    def mark(self) -> Any:
        """Record an event after all work submitted to the device so far."""
        return None if self.module is None else self.module.current_stream().record_event()

    def after(self, event: Any) -> AbstractContextManager[Any]:
        """Return a context that runs work on this stream after an event."""
        if self.stream is None:
            return self._nothing
        self.stream.wait_event(event)
        return self.module.stream(self.stream)  # type: ignore[no-any-return] # torch is untyped here

    def synchronize(self) -> None:
        """Wait until the stream is idle."""
        if self.stream is not None:
            self.stream.synchronize()


class StagedTransfer(GroupTransfer):
    """Transfers blocks of a KV cache on a device.

    Args:
        memory: The blocks on the device.
        store: The store of the blocks.
        slab: The slab where blocks are staged.
        staging_bytes: The size of page-locked host memory for each direction.
        save_queue_bytes: Bytes that may wait to be written.
        clock: Time and threads.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        store: KVStore,
        slab: SlabReader,
        staging_bytes: int = STAGING_BYTES,
        *,
        save_queue_bytes: int = StoreConfig.save_queue_bytes,
        clock: Clock = SYSTEM,
    ) -> None:
        names = [layout.name for layout in memory.layouts]
        super().__init__(memory.geometry, names, store, save_queue_bytes, clock=clock)
        self._memory, self._slab, self.chunk_tokens = memory, slab, memory.group.chunk_tokens
        self._portion = max(1, staging_bytes // 2 // self.chunk_bytes)
        blocks = self._portion * memory.group.chunk_blocks
        self._loader = _Lane(memory, blocks, "ucm-load", stagings=2, clock=clock)
        self._gatherer = _Lane(memory, blocks, "ucm-gather", stagings=1, clock=clock)

    def load(self, moves: BlockMoves, layers: range, share: int) -> Task:
        """Load some layers of chunks onto the device."""
        task = TransferTask(1, clock=self._clock)

        def ended(error: Exception | None) -> None:
            task.end({} if error is None else dict.fromkeys(moves.keys, device_failed(error)))

        self._loader.submit(lambda event: self._load(task, event, moves, layers, share), ended)
        return task

    def copy(self, task: SaveTask, block_ids: Sequence[int], layers: range) -> None:
        """Start to copy some layers of a save's chunks from the device; if that fails, the whole save does."""
        if not task.rows:
            return
        copied = task.copied = self._clock.event()

        def ended(error: Exception | None) -> None:
            if error is not None:
                task.drop(device_failed(error))
            copied.set()

        self._gatherer.submit(lambda event: self._copy(task, event, block_ids, layers), ended)

    def confirm(self, task: SaveTask) -> None:
        """Write a save's chunks after its copies, whatever happened to the device since then."""
        self._gatherer.submit(lambda _: None, lambda _: task.confirm())

    def drop(self, task: SaveTask) -> None:
        """Write nothing of a save, and reclaim its rows after its copies."""
        self._gatherer.submit(lambda _: None, lambda _: task.drop())

    def close(self) -> None:
        """Finish queued transfers and close the store."""
        self._loader.close()
        self._gatherer.close()
        super().close()

    def _load(self, task: TransferTask, event: Any, moves: BlockMoves, layers: range, share: int) -> None:
        """Load as many chunks at a time as the staging memory holds; read the next ones while some are placed."""
        lane, size = self._loader, self._portion
        reading: list[tuple[list[Any], slice, Task]] = []
        try:
            for number, first in enumerate(range(0, len(moves.keys), size)):
                if len(reading) == len(lane.staging):
                    self._place(task, event, moves, layers, *reading.pop(0))
                staging, part = lane.staging[number % len(lane.staging)], slice(first, first + size)
                arrays = [self._memory.chunks(staging[layer]) for layer in layers]
                blocks = [
                    BlockTransfer(key, [memoryview(array[row]) for array in arrays], layers.start, depth)
                    for row, (key, depth) in enumerate(zip(moves.keys[part], moves.depths[part], strict=True))
                ]
                places = _places(moves, share, blocks, self._memory.geometry)[part]
                started = self._slab.load(blocks, places, moves.tiers[part]) if places else self.store.load(blocks)
                reading.append((staging, part, started))
            while reading:
                self._place(task, event, moves, layers, *reading.pop(0))
        finally:
            # Also after a failure of the device: the next task needs staging memory that is no longer written.
            for *_, portion in reading:
                portion.wait()

    def _place(
        self,
        task: TransferTask,
        event: Any,
        moves: BlockMoves,
        layers: range,
        staging: list[Any],
        part: slice,
        reading: Task,
    ) -> None:
        result = reading.wait()
        keys, blocks = moves.keys[part], self._memory.group.chunk_blocks
        block_ids = moves.block_ids[part.start * blocks : part.stop * blocks]
        rows = [
            row for row, block_id in enumerate(block_ids) if block_id != NO_BLOCK and keys[row // blocks] in result.done
        ]
        if rows:
            with self._loader.stream.after(event):
                self._memory.scatter(rows, [block_ids[row] for row in rows], layers, staging)
            self._loader.stream.synchronize()
        task.take(result)

    def _copy(self, task: SaveTask, event: Any, block_ids: Sequence[int], layers: range) -> None:
        """Copy some layers of chunks into their rows, portion by portion."""
        lane, memory = self._gatherer, self._memory
        [staging] = lane.staging
        skipped = sum(memory.geometry.slice_sizes[: layers.start])
        for first in range(0, len(task.rows), self._portion):
            rows = task.rows[first : first + self._portion]
            ids = [block for place in range(len(rows)) for block in memory.group.blocks_of(block_ids, first + place)]
            with lane.stream.after(event):
                memory.gather(ids, layers, staging)
            lane.stream.synchronize()
            for number, row in enumerate(rows):
                gather([memory.chunks(staging[layer])[number] for layer in layers], row[skipped:])


class _Lane:
    """A thread for transfers in one direction, with its stream and staging memory."""

    def __init__(self, memory: DeviceMemory, blocks: int, name: str, stagings: int, *, clock: Clock = SYSTEM) -> None:
        self.stream = Stream.on(memory.device)
        self.staging = [memory.staging(blocks) for _ in range(stagings)]
        self._pool = Pool(name, 1, clock=clock)

    def submit(self, work: Callable[[Any], object], ended: Ended) -> None:
        """Run work after everything submitted to the device so far, then call ``ended``."""
        self._pool.submit([partial(self._run, work, ended, self.stream.mark())])

    def close(self) -> None:
        self._pool.close()

    def _run(self, work: Callable[[Any], object], ended: Ended, event: Any) -> None:
        failure = None
        try:
            self.stream.use_device()
            work(event)
        except Exception as error:  # noqa: BLE001 - a device error fails blocks
            with suppress(Exception):
                self.stream.synchronize()  # started copies must not outlive the task
            failure = error
        ended(failure)
