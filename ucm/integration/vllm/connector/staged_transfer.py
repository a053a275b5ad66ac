"""One group's blocks between a device and a store, through page-locked host memory and in chunks.

Loads and dumps have a thread each: while one chunk crosses the bus, the store reads or writes the next.
"""

from __future__ import annotations

import queue
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.dump_room import DumpRoom
from ucm.integration.vllm.connector.transfer import GroupTransfer, load_from
from ucm.store.background import enter_background
from ucm.store.base import BlockTransfer, Task, TaskResult
from ucm.store.config import StoreConfig
from ucm.store.errors import IncompleteBlockError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucm.integration.vllm.connector.device_memory import DeviceMemory
    from ucm.store.base import BlockKey, KVStore
    from ucm.store.errors import StoreError

#: Page-locked memory of one direction, in bytes; two chunks share it.
STAGING_BYTES = 64 << 20


class StagedTask(Task):
    """A transfer that one of the threads works on.

    Args:
        keys: What it is to move.
        failed: What it was asked for, and is not going to be tried.
    """

    def __init__(self, keys: Sequence[BlockKey], failed: Mapping[BlockKey, StoreError] | None = None) -> None:
        self.keys = keys
        self.finished = threading.Event()
        self.done: dict[BlockKey, str] = {}
        self.failed: dict[BlockKey, StoreError] = dict(failed or {})
        self.nbytes = 0
        self.started = time.monotonic()
        self.seconds = 0.0

    def take(self, result: TaskResult) -> None:
        """Add the outcome of a chunk."""
        self.done.update(result.done)
        self.failed.update(result.failed)
        self.nbytes += result.nbytes

    def give_up(self, error: Exception) -> None:
        """The device failed: what is not done by now has failed."""
        reason = StoreUnavailableError(f"the device could not copy: {error}")
        self.failed.update({key: reason for key in self.keys if key not in self.done})

    def finish(self) -> None:
        """No more chunks."""
        self.seconds = time.monotonic() - self.started
        self.finished.set()


@dataclass(slots=True)
class Stream:
    """A device stream with its module; on the host there is none, and nothing to wait for."""

    module: Any = None
    stream: Any = None
    device: Any = None
    _nothing: AbstractContextManager[None] = field(default_factory=nullcontext)

    @classmethod
    def on(cls, device: Any) -> Stream:
        """A new stream of a device (CUDA, or another backend of torch with the same interface, as Ascend's)."""
        if device.type == "cpu":
            return cls()
        import torch  # noqa: PLC0415 - the room may be imported without torch

        module = getattr(torch, device.type)
        return cls(module, module.Stream(device=device), device)

    def use_device(self) -> None:
        """Make the stream's device that of the calling thread.

        A new thread has the first device, and its first copy would leave a context there: on the GPU of another rank.
        """
        if self.module is not None:
            self.module.set_device(self.device)

    def mark(self) -> Any:
        """An event after all that was asked of the device until now."""
        return None if self.module is None else self.module.current_stream().record_event()

    def after(self, event: Any) -> AbstractContextManager[Any]:
        """Work on this stream, after an event."""
        if self.stream is None:
            return self._nothing
        self.stream.wait_event(event)
        return self.module.stream(self.stream)  # type: ignore[no-any-return] # torch is untyped here

    def synchronize(self) -> None:
        """Wait until the stream is idle."""
        if self.stream is not None:
            self.stream.synchronize()


class StagedTransfer(GroupTransfer):
    """The KV cache lies on a device.

    Args:
        memory: Where the blocks are.
        store: Their store.
        staging_bytes: Page-locked host memory for each direction.
        dump_queue_bytes: What may wait for being written. The store sees no more than two chunks of it at a time, so
            its own limit never shows; until a block is written, the KV cache cannot be written there either.
    """

    def __init__(
        self,
        memory: DeviceMemory,
        store: KVStore,
        staging_bytes: int = STAGING_BYTES,
        *,
        dump_queue_bytes: int = StoreConfig.dump_queue_bytes,
    ) -> None:
        self._memory = memory
        self._store = store
        self.layer_names = [layout.name for layout in memory.layouts]
        self.block_bytes = memory.geometry.nbytes
        self.tokens_per_block = memory.group.block_size
        self._chunk = max(1, staging_bytes // 2 // self.block_bytes)
        self._loader = _Lane(memory, self._chunk, "ucm-load")
        self._dumper = _Lane(memory, self._chunk, "ucm-dump")
        self._room = DumpRoom(dump_queue_bytes)

    def load(
        self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range, *, lease: str | None = None
    ) -> Task:
        """Bring some layers of blocks onto the device."""
        task = StagedTask(keys)
        return self._loader.submit(task, lambda event: self._load(task, event, keys, block_ids, layers, lease))

    def dump(self, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range) -> Task:
        """Take some layers of blocks off the device; blocks that there is no room for fail at once."""
        nbytes = sum(self._memory.geometry.shard_sizes[layer] for layer in layers)
        places = self._room.take(keys, nbytes)
        taken, ids = [keys[place] for place in places], [block_ids[place] for place in places]
        let_in, full = set(taken), self._room.error()
        task = StagedTask(taken, {key: full for key in keys if key not in let_in})
        if not taken:
            task.finish()
            return task

        def work(event: Any) -> None:
            try:
                self._dump(task, event, taken, ids, layers)
            finally:
                self._room.give_back(nbytes * len(taken))

        return self._dumper.submit(task, work)

    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Make blocks visible; those that something was refused of fail, and leave nothing."""
        refused = self._room.forget(keys)
        whole = [key for key in keys if key not in refused]
        incomplete = {key: IncompleteBlockError(f"block {key.hex()} had no room among the dumps") for key in refused}
        task = StagedTask(whole, incomplete)

        def work(_: Any) -> None:
            self._store.discard(list(refused))
            task.take(self._store.wait(self._store.commit(whole)))

        return self._dumper.submit(task, work)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Forget what was dumped of blocks."""
        self._room.forget(keys)
        self._dumper.submit(StagedTask(keys), lambda _: self._store.discard(keys))

    def check(self, task: Task) -> bool:
        """Whether a task is finished."""
        return _staged(task).finished.is_set()

    def wait(self, task: Task) -> TaskResult:
        """Wait for a task."""
        staged = _staged(task)
        staged.finished.wait()
        return TaskResult(staged.done, staged.failed, staged.nbytes, staged.seconds)

    def close(self) -> None:
        """Finish what was asked for, and close the store."""
        self._loader.close()
        self._dumper.close()
        self._store.close()

    def _load(
        self,
        task: StagedTask,
        event: Any,
        keys: Sequence[BlockKey],
        block_ids: Sequence[int],
        layers: range,
        lease: str | None,
    ) -> None:
        lane = self._loader
        reading: list[tuple[list[Any], Sequence[BlockKey], Sequence[int], Task]] = []
        try:
            for number, (some_keys, some_ids) in enumerate(_chunks(keys, block_ids, self._chunk)):
                if len(reading) == len(lane.staging):
                    self._place(task, event, layers, reading.pop(0))
                staging = lane.staging[number % len(lane.staging)]
                transfers = _transfers(some_keys, staging, layers)
                reading.append((staging, some_keys, some_ids, load_from(self._store, transfers, lease)))
            while reading:
                self._place(task, event, layers, reading.pop(0))
        finally:
            # Should the device have failed: the next task must find the staging memory at rest.
            for *_, portion in reading:
                self._store.wait(portion)

    def _place(
        self,
        task: StagedTask,
        event: Any,
        layers: range,
        portion: tuple[list[Any], Sequence[BlockKey], Sequence[int], Task],
    ) -> None:
        staging, keys, block_ids, reading = portion
        result = self._store.wait(reading)
        rows = [row for row, key in enumerate(keys) if key in result.done]
        if rows:
            with self._loader.stream.after(event):
                self._memory.scatter(rows, [block_ids[row] for row in rows], layers, staging)
            self._loader.stream.synchronize()
        task.take(result)

    def _dump(
        self, task: StagedTask, event: Any, keys: Sequence[BlockKey], block_ids: Sequence[int], layers: range
    ) -> None:
        lane = self._dumper
        writing: list[Task] = []
        try:
            for number, (some_keys, some_ids) in enumerate(_chunks(keys, block_ids, self._chunk)):
                if len(writing) == len(lane.staging):
                    task.take(self._store.wait(writing.pop(0)))
                staging = lane.staging[number % len(lane.staging)]
                with lane.stream.after(event):
                    self._memory.gather(some_ids, layers, staging)
                lane.stream.synchronize()
                writing.append(self._store.dump(_transfers(some_keys, staging, layers)))
        finally:
            for portion in writing:
                task.take(self._store.wait(portion))


class _Lane:
    """A thread that works off transfers in one direction, with its stream and its staging memory."""

    def __init__(self, memory: DeviceMemory, chunk: int, name: str) -> None:
        self.stream = Stream.on(memory.device)
        self.staging = [memory.staging(chunk), memory.staging(chunk)]
        self._queue: queue.SimpleQueue[tuple[StagedTask, Callable[[Any], None], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: StagedTask, work: Callable[[Any], None]) -> StagedTask:
        self._queue.put((task, work, self.stream.mark()))
        return task

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        enter_background()
        while (item := self._queue.get()) is not None:
            task, work, event = item
            try:
                self.stream.use_device()
                work(event)
            except Exception as error:  # noqa: BLE001 - what the device says ends no thread; it is told per block
                with suppress(Exception):
                    self.stream.synchronize()  # copies that were begun must not end later than the task
                task.give_up(error)
            task.finish()


def _chunks(
    keys: Sequence[BlockKey], block_ids: Sequence[int], size: int
) -> Iterator[tuple[Sequence[BlockKey], Sequence[int]]]:
    for start in range(0, len(keys), size):
        yield keys[start : start + size], block_ids[start : start + size]


def _transfers(keys: Sequence[BlockKey], staging: list[Any], layers: range) -> list[BlockTransfer]:
    arrays = [staging[layer].numpy() for layer in layers]
    return [
        BlockTransfer(key, [memoryview(array[row]) for array in arrays], layers.start) for row, key in enumerate(keys)
    ]


def _staged(task: Task) -> StagedTask:
    if not isinstance(task, StagedTask):
        raise TypeError(f"a task of another transfer: {type(task).__name__}")
    return task
