"""Move a group's blocks between a device and a store, in chunks through page-locked host memory.

Loads and saves have one thread each. While one chunk is copied to or from the device, the store reads the next one or
writes earlier ones. The save thread waits only for the device, never for the store.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucm.background import enter_background
from ucm.integration.vllm.connector.saving import Saver, SaveTask
from ucm.integration.vllm.connector.transfer import GroupTransfer, Staged, start_load
from ucm.store.base import BlockTransfer, StoreUnavailableError, Task, TaskResult
from ucm.store.config import StoreConfig
from ucm.store.memory.slab import CopyTask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucm.integration.vllm.connector.memory import DeviceMemory
    from ucm.store.base import BlockKey, Buffer, KVStore, StoreError
    from ucm.store.memory.slab import SlabReader

#: Called when work has ended: with the device's error, or with None.
Ended = Callable[[Exception | None], None]
#: Page-locked memory per direction in bytes; two chunks share it.
STAGING_BYTES = 64 << 20


class StagedTask(Task):
    """A load in progress on the load thread.

    Args:
        keys: The blocks to load.
    """

    def __init__(self, keys: Sequence[BlockKey]) -> None:
        self.keys = keys
        self.finished = threading.Event()
        self.done: dict[BlockKey, str] = {}
        self.failed: dict[BlockKey, StoreError] = {}
        self.nbytes = 0
        self.started = time.monotonic()
        self.seconds = 0.0

    def take(self, result: TaskResult) -> None:
        """Add the result of a chunk."""
        self.done.update(result.done)
        self.failed.update(result.failed)
        self.nbytes += result.nbytes

    def end(self, error: Exception | None) -> None:
        """End the task; if the device failed, blocks that are not done have failed."""
        if error is not None:
            reason = device_failed(error)
            self.failed.update({key: reason for key in self.keys if key not in self.done})
        self.seconds = time.monotonic() - self.started
        self.finished.set()


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
    """

    def __init__(
        self,
        memory: DeviceMemory,
        store: KVStore,
        slab: SlabReader,
        staging_bytes: int = STAGING_BYTES,
        *,
        save_queue_bytes: int = StoreConfig.save_queue_bytes,
    ) -> None:
        self._memory = memory
        self._store = store
        self._slab = slab
        self.layer_names = [layout.name for layout in memory.layouts]
        self.block_bytes = memory.geometry.nbytes
        self.tokens_per_block = memory.group.block_size
        self._chunk = max(1, staging_bytes // 2 // self.block_bytes)
        self._loader = _Lane(memory, self._chunk, "ucm-load", stagings=2)
        self._gatherer = _Lane(memory, self._chunk, "ucm-gather", stagings=1)
        self._saver = Saver(store, save_queue_bytes)

    def load(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range, staged: Staged | None) -> Task:
        """Load some layers of blocks onto the device."""
        task = StagedTask(keys)
        self._loader.submit(lambda event: self._load(task, event, keys, block_ids, layers, staged), task.end)
        return task

    def save(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range) -> Task:
        """Save some layers of blocks from the device; blocks for which there is no room fail at once."""
        task = self._saver.begin(keys, self._memory.geometry.slice_sizes[layers.start : layers.stop], layers.start)
        if not task.rows:
            task.copied.set()
            return task
        left = deque(task.rows)

        def ended(error: Exception | None) -> None:
            if error is not None:
                self._saver.drop(task, left, device_failed(error))
            task.copied.set()

        self._gatherer.submit(lambda event: self._save(task, event, left, block_ids, layers), ended)
        return task

    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Make blocks visible; blocks with refused layer slices fail and are discarded."""
        task = self._saver.begin_commit(keys)

        def ended(error: Exception | None) -> None:
            if error is not None:
                task.failed.update({key: device_failed(error) for key in task.keys if key not in task.failed})
            task.copied.set()

        self._gatherer.submit(lambda _: self._saver.commit(task), ended)
        return task

    def copied(self, task: Task) -> None:
        """Wait until a save no longer reads the device's memory."""
        if isinstance(task, SaveTask):
            task.copied.wait()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were saved and are not written yet."""
        return self._saver.waiting_bytes

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Discard blocks, after all earlier saves."""
        self._saver.forget(keys)
        self._gatherer.submit(lambda _: self._store.discard(keys), lambda _: None)

    def check(self, task: Task) -> bool:
        """Return whether a task is finished."""
        return self._saver.check(task) if isinstance(task, SaveTask) else _staged(task).finished.is_set()

    def wait(self, task: Task) -> TaskResult:
        """Wait for a task and return its result."""
        if isinstance(task, SaveTask):
            return self._saver.wait(task)
        staged = _staged(task)
        staged.finished.wait()
        return TaskResult(staged.done, staged.failed, staged.nbytes, staged.seconds)

    def close(self) -> None:
        """Finish queued transfers and close the store."""
        self._loader.close()
        self._gatherer.close()
        self._store.close()

    def _load(
        self,
        task: StagedTask,
        event: Any,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int],
        layers: range,
        staged: Staged | None,
    ) -> None:
        lane, geometry = self._loader, self._memory.geometry
        reading: list[tuple[list[Any], Sequence[BlockKey], Sequence[int], Task]] = []
        try:
            for number, (some_keys, some_ids) in enumerate(_chunks(keys, block_ids, self._chunk)):
                if len(reading) == len(lane.staging):
                    self._place(task, event, layers, reading.pop(0))
                staging = lane.staging[number % len(lane.staging)]
                transfers = _transfers(some_keys, staging, layers)
                task_of_chunk = start_load(
                    self._store, self._slab, transfers, _part(staged, number * self._chunk, len(some_keys)), geometry
                )
                reading.append((staging, some_keys, some_ids, task_of_chunk))
            while reading:
                self._place(task, event, layers, reading.pop(0))
        finally:
            # Also after a failure of the device: the next task needs staging memory that is no longer written.
            for *_, portion in reading:
                self._wait(portion)

    def _place(
        self,
        task: StagedTask,
        event: Any,
        layers: range,
        portion: tuple[list[Any], Sequence[BlockKey], Sequence[int], Task],
    ) -> None:
        staging, keys, block_ids, reading = portion
        result = self._wait(reading)
        rows = [row for row, key in enumerate(keys) if key in result.done]
        if rows:
            with self._loader.stream.after(event):
                self._memory.scatter(rows, [block_ids[row] for row in rows], layers, staging)
            self._loader.stream.synchronize()
        task.take(result)

    def _wait(self, task: Task) -> TaskResult:
        return (self._slab if isinstance(task, CopyTask) else self._store).wait(task)

    def _save(
        self, task: SaveTask, event: Any, left: deque[tuple[int, Buffer]], block_ids: Sequence[int], layers: range
    ) -> None:
        """Copy blocks into their rows, chunk by chunk; remove copied blocks from ``left``."""
        lane = self._gatherer
        [staging] = lane.staging
        while left:
            some = [left[number] for number in range(min(self._chunk, len(left)))]
            with lane.stream.after(event):
                self._memory.gather([block_ids[place] for place, _ in some], layers, staging)
            lane.stream.synchronize()
            for number, (_, row) in enumerate(some):
                at = 0
                for layer in layers:
                    layer_slice = staging[layer][number].numpy()
                    row[at : at + layer_slice.nbytes] = memoryview(layer_slice)
                    at += layer_slice.nbytes
            for _ in some:
                left.popleft()
            self._saver.write(task, some)


class _Lane:
    """A thread for transfers in one direction, with its stream and staging memory."""

    def __init__(self, memory: DeviceMemory, chunk: int, name: str, stagings: int) -> None:
        self.stream = Stream.on(memory.device)
        self.staging = [memory.staging(chunk) for _ in range(stagings)]
        self._queue: queue.SimpleQueue[tuple[Callable[[Any], object], Ended, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Any], object], ended: Ended) -> None:
        """Run work after everything submitted to the device so far, then call ``ended``."""
        self._queue.put((work, ended, self.stream.mark()))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        enter_background()
        while (item := self._queue.get()) is not None:
            work, ended, event = item
            failure = None
            try:
                self.stream.use_device()
                work(event)
            except Exception as error:  # noqa: BLE001 - a device error fails blocks, but must not end the thread
                with suppress(Exception):
                    self.stream.synchronize()  # started copies must not outlive the task
                failure = error
            ended(failure)


def _chunks(
    keys: Sequence[BlockKey], block_ids: Sequence[int], size: int
) -> Iterator[tuple[Sequence[BlockKey], Sequence[int]]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size], block_ids[start : start + size]


def _part(staged: Staged | None, first: int, count: int) -> Staged | None:
    if staged is None:
        return None
    return Staged(staged.places[first : first + count], staged.tiers[first : first + count])


def _transfers(keys: Sequence[BlockKey], staging: list[Any], layers: range) -> list[BlockTransfer]:
    arrays = [staging[layer].numpy() for layer in layers]
    return [
        BlockTransfer(key, [memoryview(array[row]) for array in arrays], layers.start) for row, key in enumerate(keys)
    ]


def _staged(task: Task) -> StagedTask:
    if not isinstance(task, StagedTask):
        raise TypeError(f"a task of another transfer: {type(task).__name__}")
    return task
