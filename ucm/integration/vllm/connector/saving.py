"""Save blocks from rows of host memory into a store, so that slow media do not hold blocks of the KV cache.

A row holds a whole block. Its layers may arrive one after the other, and it waits there until it is confirmed that its
KV was computed with the weights that its key stands for.
"""

from __future__ import annotations

import mmap
import weakref
from collections import Counter, deque
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING

from ucm.background import enter_background
from ucm.clock import SYSTEM
from ucm.logger import get_logger
from ucm.store.base import BlockTransfer, StoreError, Task, TaskResult, too_far_behind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.clock import Clock, Thread
    from ucm.store.base import BlockKey, Buffer, KVStore

#: Bytes handed to the store at once; this is how much memory a stuck write blocks.
WRITE_BYTES = 8 << 20
#: Rows are cut from allocations of about this many bytes, or of the whole limit if that is less, and of no more rows
#: than this: cutting takes time per row, which tiny blocks would need in one step.
EXTENT_BYTES, EXTENT_ROWS = 8 << 20, 256
#: Rows that were not needed for this many seconds, at most twice as many, are given back to the system. The first use
#: of a page costs ten times as much as copying it.
KEEP_SECONDS = 60.0
#: How long `Saver.close` waits for its thread, in seconds.
CLOSE_SECONDS = 5.0


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
        try:
            extent = memoryview(mmap.mmap(-1, self._extent_rows * size))
        except OSError:
            return False
        self._free += [extent[at * size : (at + 1) * size] for at in range(self._extent_rows)]
        return True


class SaveTask(Task):
    """A save of whole blocks: each is copied into a row, and written from there once `confirm` says so.

    Args:
        saver: Whose rows they are.
        keys: The blocks that have a row.
        rows: Their rows; none any more once they were handed to the store, or dropped.
        depths: The depths of all blocks of the save, see ``BlockTransfer``.
        retain_until: See ``BlockTransfer``.
        failed: The blocks for which there was no row.
        clock: Time and threads.
    """

    def __init__(
        self,
        saver: Saver,
        keys: Sequence[BlockKey],
        rows: Sequence[Buffer],
        depths: Sequence[int],
        retain_until: float,
        failed: dict[BlockKey, StoreError],
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._saver = saver
        self.keys = keys
        self.rows = rows
        self.depths = depths
        self._retain_until = retain_until
        self._checking = clock.lock()  # held by the one thread that asks the store, which may not answer
        self.copied = clock.event()  #: set while nothing reads the KV cache
        self.copied.set()
        self._handed_over = clock.event()  # nothing more is handed to the store
        self._writing: deque[tuple[Task, Sequence[Buffer]]] = deque()
        self._done: dict[BlockKey, str] = {}
        self._failed = failed
        self._nbytes = 0
        self._seconds = 0.0

    def confirm(self) -> None:
        """Start to write the rows, whose content is complete and does not change any more."""
        rows, self.rows = self.rows, ()
        at_once = max(1, WRITE_BYTES // max(1, self._saver.row_bytes))
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            transfers = [
                BlockTransfer(
                    self.keys[number],
                    [row],
                    depth=self.depths[number],
                    retain_until=self._retain_until,
                )
                for number, row in enumerate(some, first)
            ]
            try:
                self._writing.append((self._saver.store.save(transfers), some))
            except Exception as error:  # noqa: BLE001 - of any kind: the engine goes on
                self._raised(error)
        self._handed_over.set()

    def drop(self, error: StoreError | None = None) -> None:
        """Write nothing of a task that was not confirmed; with an error, its blocks fail."""
        if error is not None:
            self._failed.update(dict.fromkeys(self.keys, error))
        rows, self.rows = self.rows, ()
        self._saver.room.give_back(rows)
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
        self._saver.room.give_back(rows)

    def _raised(self, error: Exception) -> None:
        """Fail the blocks because the store raised, as a third-party one may; it may still write their rows."""
        get_logger(__name__).error("[UCM.Save] a store failed unexpectedly", exc_info=error)
        self._failed.update(dict.fromkeys(self.keys, StoreError(f"{type(error).__name__}: {error}")))


class Saver:
    """Has the rows of saves, and reclaims them once written, without waiting for the store.

    A thread that lives while memory is held frees what is not needed. It also reclaims written rows, because an engine
    without requests has no steps in which its saves are checked.

    Args:
        store: The store.
        row_bytes: The size of a row, which holds a block, in bytes.
        limit: Bytes that may wait to be written.
        clock: Time and threads.
    """

    def __init__(self, store: KVStore, row_bytes: int, limit: int, *, clock: Clock = SYSTEM) -> None:
        self.store = store
        self.row_bytes = row_bytes
        self._clock = clock
        self.room = SaveRoom(limit, row_bytes)
        self._lock = clock.lock()
        self._tasks: weakref.WeakValueDictionary[int, SaveTask] = weakref.WeakValueDictionary()  # in their order
        self._begun = count()
        self._thread: Thread | None = None
        self._closed = clock.event()

    def begin(self, keys: Sequence[BlockKey], depths: Sequence[int], retain_until: float = 0.0) -> SaveTask:
        """Begin a save; the last blocks fail if there are not enough rows. Who keeps a row keeps its memory."""
        rows = self.room.take(len(keys))
        failed: dict[BlockKey, StoreError] = {}
        if len(rows) < len(keys):
            failed = dict.fromkeys(keys[len(rows) :], too_far_behind(self.room.limit))
        task = SaveTask(self, keys[: len(rows)], rows, depths, retain_until, failed, clock=self._clock)
        if rows:
            self._watch(task)
        return task

    def close(self) -> None:
        """End the thread that frees memory, which uses the store; a thread that is stuck in it is abandoned."""
        self._closed.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_SECONDS)

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
