"""Transfer blocks of one KV-cache group between its KV cache and its store.

A save copies whole chunks into rows of host memory, so that slow media do not hold blocks of the KV cache. A chunk
waits there until it is confirmed that its KV was computed with the weights that its key stands for.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any

from ucm.background import enter_background
from ucm.clock import SYSTEM
from ucm.integration.vllm.connector.kv_cache import NO_BLOCK, layers_nbytes
from ucm.logger import get_logger
from ucm.store.base import (
    BlockTransfer,
    StoreError,
    StoreUnavailableError,
    Task,
    TaskResult,
    TransferTask,
    too_far_behind,
)
from ucm.store.config import StoreConfig
from ucm.store.format import gather
from ucm.store.health import Pool
from ucm.store.memory.slab import KEEP_SECONDS, private_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.clock import Clock, Thread
    from ucm.integration.vllm.connector.kv_cache import DeviceMemory, HostMemory
    from ucm.integration.vllm.connector.metadata import BlockMoves
    from ucm.store.base import BlockGeometry, BlockKey, Buffer, KVStore
    from ucm.store.memory.slab import SlabReader

#: Bytes handed to the store at once; this is how much memory a stuck write blocks.
WRITE_BYTES = 8 << 20
#: Rows are cut from allocations of about this many bytes, or of the whole limit if that is less, and of no more rows
#: than this: cutting takes time per row, which tiny blocks would need in one step.
EXTENT_BYTES, EXTENT_ROWS = 8 << 20, 256
#: How long `GroupTransfer.close` waits for its thread, in seconds.
CLOSE_SECONDS = 5.0
#: Called when work has ended: with the device's error, or with None.
Ended = Callable[[Exception | None], None]
#: Page-locked memory per direction in bytes; two chunks share it.
STAGING_BYTES = 64 << 20


class SaveRoom:
    """Allocates rows up to a limit of bytes.

    One thread takes rows; any thread gives them back, or trims.

    Args:
        limit: Bytes of blocks that may wait or be in progress.
        row_bytes: The size of a row in bytes.
    """

    def __init__(self, limit: int, row_bytes: int) -> None:
        self.limit, self._row_bytes = limit, row_bytes
        self._extent_rows = min(EXTENT_ROWS, max(1, min(EXTENT_BYTES, limit) // row_bytes))
        self._lock = Lock()
        self._taken = 0  # rows
        self._free: list[Buffer] = []
        self._most = 0  # peak of taken rows since the last call of `trim`

    @property
    def held_bytes(self) -> int:
        """The memory allocated from the system, in bytes."""
        with self._lock:
            return (self._taken + len(self._free)) * self._row_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes of blocks that wait or are being written."""
        return self._taken * self._row_bytes

    def take(self, count: int) -> list[Buffer]:
        """Take up to ``count`` rows, as there is room and the system has memory; at least one if none is in use."""
        found: list[Buffer] = []
        with self._lock:
            while len(found) < count and (not self._taken or (self._taken + 1) * self._row_bytes <= self.limit):
                if not self._free and not self._grow():
                    break
                self._taken += 1
                found.append(self._free.pop())
            self._most = max(self._most, self._taken)
        return found

    def give_back(self, rows: Sequence[Buffer]) -> None:
        """Return rows that are no longer read."""
        with self._lock:
            self._free += rows
            self._taken -= len(rows)

    def trim(self) -> None:
        """Free rows beyond the most that were taken at once since the last call, whole allocations of them."""
        with self._lock:
            most, self._most = self._most, self._taken
            spare = (self._taken + len(self._free) - most) // self._extent_rows
            of_extent = Counter(id(row.obj) for row in self._free)
            unused = [extent for extent, count in of_extent.items() if count == self._extent_rows]
            gone, before = set(unused[: max(0, spare)]), self._free
            self._free = [row for row in before if id(row.obj) not in gone]
        # The memory is freed with `before`, which takes time that no other thread should wait for the lock.

    def _grow(self) -> bool:
        """Allocate rows; return False if the system has no memory."""
        size = self._row_bytes
        memory = private_memory(self._extent_rows * size)
        if memory is None:
            return False
        extent = memoryview(memory)
        self._free += [extent[at * size : (at + 1) * size] for at in range(self._extent_rows)]
        return True


class SaveTask(Task):
    """A save of whole chunks: each is copied into a row, and written from there once `confirm` says so.

    Args:
        transfer: Whose rows they are.
        moves: The chunks; the first ones have a row each.
        rows: These rows; none any more once they were handed to the store, or dropped.
        clock: Time and threads.
    """

    def __init__(
        self, transfer: GroupTransfer, moves: BlockMoves, rows: Sequence[Buffer], *, clock: Clock = SYSTEM
    ) -> None:
        self._transfer = transfer
        self.moves = moves
        self.keys = moves.keys[: len(rows)]  #: the chunks that have a row
        self.rows = rows
        self._checking = clock.lock()  # held by the one thread that asks the store, which may not answer
        self.copied = clock.event()  #: set while nothing reads the KV cache
        self.copied.set()
        self._handed_over = clock.event()  # nothing more is handed to the store
        self._writing: deque[tuple[Task, Sequence[Buffer]]] = deque()
        self._done: dict[BlockKey, str] = {}
        self._failed: dict[BlockKey, StoreError] = {}
        if len(rows) < len(moves.keys):
            self._failed = dict.fromkeys(moves.keys[len(rows) :], too_far_behind(transfer.room.limit))
        self._nbytes = 0
        self._seconds = 0.0

    def confirm(self) -> None:
        """Start to write the rows, whose content is complete and does not change any more."""
        rows, self.rows = self.rows, ()
        at_once = max(1, WRITE_BYTES // max(1, self._transfer.chunk_bytes))
        for first in range(0, len(rows), at_once):
            part = slice(first, first + at_once)
            some = rows[part]
            transfers = [
                BlockTransfer(key, [row], depth=depth, retain_until=self.moves.retain_until)
                for key, row, depth in zip(self.keys[part], some, self.moves.depths[part], strict=False)
            ]
            try:
                self._writing.append((self._transfer.store.save(transfers), some))
            except Exception as error:  # noqa: BLE001 - of any kind: the engine goes on
                self._raised(error)
        self._handed_over.set()

    def drop(self, error: StoreError | None = None) -> None:
        """Write nothing of a task that was not confirmed; with an error, its blocks fail."""
        if error is not None:
            self._failed.update(dict.fromkeys(self.keys, error))
        rows, self.rows = self.rows, ()
        self._transfer.room.give_back(rows)
        self._handed_over.set()

    def check(self) -> bool:
        """Reclaim written rows, and return whether the whole task is finished; not while another thread does this."""
        handed_over = self._handed_over.is_set()
        if not self._checking.acquire(blocking=False):
            return False
        try:
            for _ in range(len(self._writing)):
                self._reclaim(wait=False)
            return handed_over and not self._writing
        finally:
            self._checking.release()

    def wait(self) -> TaskResult:
        """Wait until all rows are written."""
        self._handed_over.wait()
        with self._checking:
            while self._writing:
                self._reclaim(wait=True)
        done = {key: tier for key, tier in self._done.items() if key not in self._failed}
        return TaskResult(done, self._failed, self._nbytes, self._seconds)

    def _reclaim(self, *, wait: bool) -> None:
        """Take back the rows that come next, if they are written; else look at them after all others."""
        writing, rows = self._writing.popleft()
        try:
            if not (wait or writing.check()):
                self._writing.append((writing, rows))
                return
            result = writing.wait()
        except Exception as error:  # noqa: BLE001 - of any kind: the engine goes on
            self._raised(error)
            return
        self._done.update(result.done)
        self._failed.update(result.failed)
        self._nbytes += result.nbytes
        self._seconds = max(self._seconds, result.seconds)
        self._transfer.room.give_back(rows)

    def _raised(self, error: Exception) -> None:
        """Fail the blocks because the store raised, as a third-party one may; it may still write their rows."""
        get_logger(__name__).error("[UCM.Save] a store failed unexpectedly", exc_info=error)
        self._failed.update(dict.fromkeys(self.keys, StoreError(f"{type(error).__name__}: {error}")))


class GroupTransfer(ABC):
    """Moves chunks of one KV-cache group; a call starts a task.

    For the store, a chunk is one block of one layer slice.

    A save copies its chunks into rows of host memory, which the store then writes. So a step that will overwrite the
    blocks waits only for the copy and not for a medium; a slow or stuck medium only occupies rows. A chunk for which no
    row is free is not saved.

    A thread that lives while rows have memory frees what is not needed. It also reclaims written rows, because an
    engine without requests has no steps in which its saves are checked.

    Args:
        geometry: The geometry of a chunk.
        layer_names: The group's layers, in the order of a chunk's bytes.
        store: The store.
        room: Bytes that may wait to be written.
        clock: Time and threads.
    """

    #: The tokens of a chunk.
    chunk_tokens = 0
    #: The index of this rank's part of the blocks among all ranks' different ones.
    place = 0
    #: Whether this rank saves it; of ranks with the same KV only one does.
    saves = True

    def __init__(
        self, geometry: BlockGeometry, layer_names: Sequence[str], store: KVStore, room: int, *, clock: Clock = SYSTEM
    ) -> None:
        self.store = store
        self._clock = clock
        self.layer_names = layer_names
        self.chunk_bytes = geometry.nbytes
        self.room = SaveRoom(room, geometry.nbytes)
        self._lock = clock.lock()
        self._tasks: weakref.WeakValueDictionary[int, SaveTask] = weakref.WeakValueDictionary()  # in their order
        self._begun = count()
        self._thread: Thread | None = None
        self._closed = clock.event()

    def load(self, moves: BlockMoves, layers: range, share: int) -> Task:
        """Load some layers of chunks into the KV cache from the slab if they are staged, else all from the store.

        ``share`` is where this rank's part of a staged chunk begins, behind the chunk's place.
        """
        raise NotImplementedError

    def save(self, moves: BlockMoves) -> SaveTask:
        """Begin a save of chunks, which copies them; ``confirm`` or ``drop`` ends it.

        The last chunks fail if there are not enough rows. Who keeps a row keeps its memory.
        """
        task = SaveTask(self, moves, self.room.take(len(moves.keys)), clock=self._clock)
        if task.rows:
            self._watch(task)
            self._copy(task)
        return task

    @abstractmethod
    def _copy(self, task: SaveTask) -> None:
        """Copy a save's chunks from the KV cache to its rows."""

    def confirm(self, task: SaveTask) -> None:
        """Write a save's chunks once they are copied; each becomes visible when it is written."""
        task.confirm()

    def drop(self, task: SaveTask) -> None:
        """Write nothing of a save."""
        task.drop()

    def close(self) -> None:
        """Finish confirmed saves and close the store; the thread that frees memory is left if it is stuck there."""
        self._closed.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_SECONDS)
        self.store.close()

    def _watch(self, task: SaveTask) -> None:
        """Remember a task, and start the thread that frees memory, unless it runs."""
        with self._lock:
            self._tasks[next(self._begun)] = task
            if self._thread is not None or self._closed.is_set():
                return
            self._thread = self._clock.started(self._free, "ucm-free")

    def _free(self) -> None:
        enter_background()
        while not self._closed.wait(KEEP_SECONDS):
            self._check_all()
            self.room.trim()
            with self._lock:
                if not self.room.held_bytes:
                    self._thread = None
                    return

    def _check_all(self) -> None:
        with self._lock:
            tasks = list(self._tasks.values())
        for task in tasks:
            if self._closed.is_set():
                return
            task.check()


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
        memory, blocks_of = self._memory, self._memory.group.blocks_of
        blocks = [
            BlockTransfer(key, memory.buffers(blocks_of(moves.block_ids, place), layers), depth=depth)
            for place, (key, depth) in enumerate(zip(moves.keys, moves.depths, strict=True))
        ]
        places = _places(moves, share, memory, layers)
        return self._slab.load(blocks, places, moves.tiers) if places else self.store.load(blocks)

    def _copy(self, task: SaveTask) -> None:
        memory, layers = self._memory, range(len(self.layer_names))
        for place, row in enumerate(task.rows):
            gather(memory.buffers(memory.group.blocks_of(task.moves.block_ids, place), layers), row)


def _places(moves: BlockMoves, share: int, memory: HostMemory | DeviceMemory, layers: range) -> list[int]:
    """Return where in the slab the layers of this rank's part of each staged chunk begin; nothing if none is staged."""
    skipped = layers_nbytes(memory.group, memory.layouts[: layers.start])
    return [place + share + skipped for place in moves.places]


def device_failed(error: Exception) -> StoreUnavailableError:
    """Return the error of blocks that could not be copied."""
    return StoreUnavailableError(f"a copy on the device failed: {error}")


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

    def _copy(self, task: SaveTask) -> None:
        """Start to copy a save's chunks from the device; if that fails, the whole save does."""
        copied = task.copied = self._clock.event()

        def ended(error: Exception | None) -> None:
            if error is not None:
                task.drop(device_failed(error))
            copied.set()

        self._gatherer.submit(lambda event: self._gather(task, event), ended)

    def confirm(self, task: SaveTask) -> None:
        """Write a save's chunks once they are copied, whatever happened to the device since then."""
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
                    BlockTransfer(key, [memoryview(array[row]) for array in arrays], depth=depth)
                    for row, (key, depth) in enumerate(zip(moves.keys[part], moves.depths[part], strict=True))
                ]
                places = _places(moves, share, self._memory, layers)[part]
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
            with self._loader.after(event):
                self._memory.scatter(rows, [block_ids[row] for row in rows], layers, staging)
            self._loader.synchronize()
        task.take(result)

    def _gather(self, task: SaveTask, event: Any) -> None:
        """Copy chunks into their rows, portion by portion."""
        lane, memory, layers = self._gatherer, self._memory, range(len(self.layer_names))
        [staging] = lane.staging
        for first in range(0, len(task.rows), self._portion):
            rows = task.rows[first : first + self._portion]
            blocks = memory.group.chunk_blocks
            ids = task.moves.block_ids[first * blocks : (first + len(rows)) * blocks]
            with lane.after(event):
                memory.gather(ids, layers, staging)
            lane.synchronize()
            for number, row in enumerate(rows):
                gather([memory.chunks(layer)[number] for layer in staging], row)


class _Lane:
    """A thread for transfers in one direction, with a device stream and staging memory.

    The device is one of CUDA's, or of a torch backend with the same interface, such as Ascend's. On the host there is
    no stream and nothing to wait for.
    """

    def __init__(self, memory: DeviceMemory, blocks: int, name: str, stagings: int, *, clock: Clock = SYSTEM) -> None:
        self._device = memory.device
        self._module = self._stream = None
        if self._device.type != "cpu":
            import torch  # noqa: PLC0415 - this package is also imported without torch

            self._module = getattr(torch, self._device.type)
            self._stream = self._module.Stream(device=self._device)
        self.staging = [memory.staging(blocks) for _ in range(stagings)]
        self._pool = Pool(name, 1, clock=clock)

    def after(self, event: Any) -> AbstractContextManager[Any]:
        """Return a context that runs work on the stream after an event."""
        if self._module is None or self._stream is None:
            return nullcontext()
        self._stream.wait_event(event)
        return self._module.stream(self._stream)  # type: ignore[no-any-return] # torch is untyped here

    def synchronize(self) -> None:
        """Wait until the stream is idle."""
        if self._stream is not None:
            self._stream.synchronize()

    def submit(self, work: Callable[[Any], object], ended: Ended) -> None:
        """Run work after everything submitted to the device so far, then call ``ended``."""
        event = None if self._module is None else self._module.current_stream().record_event()
        self._pool.submit([partial(self._run, work, ended, event)])

    def close(self) -> None:
        """Finish what was submitted."""
        self._pool.close()

    def _run(self, work: Callable[[Any], object], ended: Ended, event: Any) -> None:
        failure = None
        try:
            if self._module is not None:
                # A new thread uses the first device, and its first copy would create a context there, on another
                # rank's GPU.
                self._module.set_device(self._device)
            work(event)
        except Exception as error:  # noqa: BLE001 - a device error fails blocks
            with suppress(Exception):
                self.synchronize()  # started copies must not outlive the task
            failure = error
        ended(failure)
