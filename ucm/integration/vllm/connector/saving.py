"""Save blocks from rows of host memory into a store, so that slow media do not hold blocks of the KV cache."""

from __future__ import annotations

import mmap
import weakref
from collections import Counter, deque
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING

from ucm.background import enter_background
from ucm.clock import SYSTEM
from ucm.logger import get_logger
from ucm.store.base import BlockTransfer, IncompleteBlockError, StoreError, Task, TaskResult, too_far_behind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ucm.clock import Clock, Thread
    from ucm.store.base import BlockKey, Buffer, KVStore, StoreFullError

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
    """Allocates rows up to a limit of bytes, and remembers the blocks that it refused.

    One thread takes rows; any thread gives them back, or trims.

    Args:
        limit: Bytes of blocks that may wait or be in progress.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = Lock()
        self._taken = 0
        self._refused: set[BlockKey] = set()
        self._free: dict[int, list[Buffer]] = {}  # by the size of the rows in bytes
        self._free_bytes = 0
        self._most = 0  # peak of taken bytes since the last call of `trim`

    @property
    def held_bytes(self) -> int:
        """The memory allocated from the system, in bytes."""
        with self._lock:
            return self._taken + self._free_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes of blocks that wait or are being written."""
        with self._lock:
            return self._taken

    def take(self, keys: Sequence[BlockKey], nbytes: int) -> list[tuple[int, Buffer]]:
        """Take rows for blocks of ``nbytes`` each; at least one row is granted if none is in use.

        Once a layer of a block was refused, the block cannot become complete: its further layers are refused as well.

        Returns:
            The indexes in ``keys`` of the accepted blocks, each with its row.
        """
        found = []
        with self._lock:
            for place, key in enumerate(keys):
                if key in self._refused:
                    continue
                row = None if self._taken and self._taken + nbytes > self._limit else self._row(nbytes)
                if row is None:
                    self._refused.add(key)
                    continue
                self._taken += nbytes
                found.append((place, row))
            self._most = max(self._most, self._taken)
        return found

    def give_back(self, rows: Sequence[Buffer]) -> None:
        """Return rows that are no longer read."""
        with self._lock:
            for row in rows:
                self._free.setdefault(row.nbytes, []).append(row)
                self._free_bytes += row.nbytes
                self._taken -= row.nbytes

    def trim(self) -> None:
        """Free rows beyond the most that were taken at once since the last call."""
        with self._lock:
            most, self._most = self._most, self._taken
            sizes = list(self._free)
        for nbytes in sizes:
            freed = self._trim(nbytes, most)
            freed.clear()  # here, because freeing memory takes time that no other thread should wait for the lock

    def forget(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Forget which of the keys were refused, so that they can be saved again; return them."""
        found = self._refused.intersection(keys)
        self._refused -= found
        return found

    def error(self) -> StoreFullError:
        """Return the error for refused blocks."""
        return too_far_behind(self._limit)

    def _row(self, nbytes: int) -> Buffer | None:
        """Return memory for one block; None if the system has none."""
        rows = self._free.setdefault(nbytes, [])
        if not rows:
            count = self._rows_per_extent(nbytes)
            try:
                extent = memoryview(mmap.mmap(-1, count * nbytes))
            except OSError:
                return None
            rows.extend(extent[at * nbytes : (at + 1) * nbytes] for at in range(count))
            self._free_bytes += extent.nbytes
        self._free_bytes -= nbytes
        return rows.pop()

    def _rows_per_extent(self, nbytes: int) -> int:
        return min(EXTENT_ROWS, max(1, min(EXTENT_BYTES, self._limit) // nbytes))

    def _trim(self, nbytes: int, most: int) -> list[Buffer]:
        """Remove and return free rows of one size, whole allocations; at least ``most`` bytes remain in all."""
        with self._lock:
            rows = self._free[nbytes]
            extent = self._rows_per_extent(nbytes) * nbytes
            spare = (self._taken + self._free_bytes - most) // extent
            if spare <= 0:
                return []
            unused = [idle for idle, count in Counter(id(row.obj) for row in rows).items() if count * nbytes == extent]
            gone = set(unused[:spare])
            self._free[nbytes] = [row for row in rows if id(row.obj) not in gone]
            self._free_bytes -= len(gone) * extent
            return [row for row in rows if id(row.obj) in gone]


class SaveTask(Task):
    """A save: layer slices of blocks that are copied into rows and written from there; or a commit of blocks.

    Args:
        keys: The blocks.
        sizes: The layer slices' sizes in bytes.
        first_slice: The index of the first layer slice.
        depth: How many blocks their chain has before the first of them.
        retain_until: See ``BlockTransfer``.
        clock: Time and threads.
    """

    def __init__(
        self,
        keys: Sequence[BlockKey],
        sizes: Sequence[int] = (),
        first_slice: int = 0,
        depth: int = 0,
        retain_until: float = 0.0,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self.keys = keys
        self.sizes = sizes
        self.first_slice = first_slice
        self.depth = depth
        self.retain_until = retain_until
        self.checking = clock.lock()  #: held by the one thread that asks the store, which may not answer
        self.copied = clock.event()  #: the KV cache is no longer read, and nothing more is handed to the store
        self.writing: deque[tuple[Task, list[Buffer]]] = deque()
        self.done: dict[BlockKey, str] = {}
        self.failed: dict[BlockKey, StoreError] = {}
        self.nbytes = 0
        self.seconds = 0.0


class Saver:
    """Hands rows to a store and reclaims them once written, without waiting for the store.

    A thread that lives while memory is held frees what is not needed. It also reclaims written rows, because an engine
    without requests has no steps in which its saves are checked.

    Args:
        store: The store.
        limit: Bytes that may wait to be written.
        clock: Time and threads.
    """

    def __init__(self, store: KVStore, limit: int, *, clock: Clock = SYSTEM) -> None:
        self._store = store
        self._clock = clock
        self._room = SaveRoom(limit)
        self._lock = clock.lock()
        self._tasks: weakref.WeakSet[SaveTask] = weakref.WeakSet()
        self._thread: Thread | None = None
        self._closed = clock.event()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were saved and are not written yet."""
        return self._room.taken_bytes

    def begin(
        self,
        keys: Sequence[BlockKey],
        sizes: Sequence[int],
        first_slice: int,
        depth: int = 0,
        retain_until: float = 0.0,
    ) -> tuple[SaveTask, list[tuple[int, Buffer]]]:
        """Begin a save; blocks without a row for their layer slices fail.

        Returns:
            The task, and the indexes of the other blocks, each with its row. Who keeps a row keeps its memory.
        """
        rows = self._room.take(keys, sum(sizes))
        task = SaveTask(keys, sizes, first_slice, depth, retain_until, clock=self._clock)
        if rows:
            self._watch(task)
        if len(rows) < len(keys):
            let_in, full = {place for place, _ in rows}, self._room.error()
            task.failed = {key: full for place, key in enumerate(keys) if place not in let_in}
        return task, rows

    def write(self, task: SaveTask, rows: Sequence[tuple[int, Buffer]]) -> None:
        """Start to write some rows of a task; their content must not change any more."""
        at_once = max(1, WRITE_BYTES // max(1, sum(task.sizes)))
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            transfers = [
                BlockTransfer(
                    task.keys[place],
                    _slices(row, task.sizes),
                    task.first_slice,
                    task.depth + place,
                    task.retain_until,
                )
                for place, row in some
            ]
            with self._fails(task):
                task.writing.append((self._store.save(transfers), [row for _, row in some]))

    def drop(self, task: SaveTask, rows: Iterable[tuple[int, Buffer]], error: StoreError) -> None:
        """Drop some rows of a task and fail their blocks."""
        for place, row in rows:
            task.failed[task.keys[place]] = error
            self._room.give_back([row])

    def begin_commit(self, keys: Sequence[BlockKey]) -> SaveTask:
        """Begin a commit; blocks with refused layer slices fail."""
        refused = self._room.forget(keys)
        task = SaveTask(keys, clock=self._clock)
        task.failed = {key: IncompleteBlockError(f"there was no room to save block {key.hex()}") for key in refused}
        return task

    def commit(self, task: SaveTask) -> SaveTask:
        """Make blocks visible; discard the failed ones."""
        with self._fails(task):
            if task.failed:
                self._store.discard(list(task.failed))
            task.writing.append((self._store.commit([key for key in task.keys if key not in task.failed]), []))
        task.copied.set()
        return task

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks will not be committed, so that they can be saved again."""
        self._room.forget(keys)

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Drop blocks that will not be committed; a store that raises does not matter, since nothing finds them."""
        self.forget(keys)
        with self._fails(SaveTask(keys, clock=self._clock)):
            self._store.discard(keys)

    def check(self, task: SaveTask) -> bool:
        """Reclaim written rows, and return whether the whole task is finished; not while another thread does this."""
        copied = task.copied.is_set()
        if not task.checking.acquire(blocking=False):
            return False
        try:
            for _ in range(len(task.writing)):
                writing, rows = task.writing.popleft()
                with self._fails(task):
                    if not self._store.check(writing):
                        task.writing.append((writing, rows))
                        continue
                    self._take(task, self._store.wait(writing), rows)
            return copied and not task.writing
        finally:
            task.checking.release()

    def wait(self, task: SaveTask) -> TaskResult:
        """Wait for a task and return its result."""
        task.copied.wait()
        with task.checking:
            while task.writing:
                writing, rows = task.writing.popleft()
                with self._fails(task):
                    self._take(task, self._store.wait(writing), rows)
        done = {key: tier for key, tier in task.done.items() if key not in task.failed}
        return TaskResult(done, task.failed, task.nbytes, task.seconds)

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
            self._tasks.add(task)
            if self._thread is not None or self._closed.is_set():
                return
            thread = self._clock.thread(self._free, "ucm-free")
            with suppress(RuntimeError):  # the system allows no more threads: the next save tries again
                thread.start()
                self._thread = thread

    def _free(self) -> None:
        enter_background()
        while not self._closed.wait(KEEP_SECONDS):
            self._check_all()
            self._room.trim()
            with self._lock:
                if not self._room.held_bytes:
                    self._thread = None
                    return

    def _check_all(self) -> None:
        with self._lock:
            tasks = list(self._tasks)
        for task in tasks:
            if self._closed.is_set():
                return
            self.check(task)

    @contextmanager
    def _fails(self, task: SaveTask) -> Iterator[None]:
        """Fail a task's blocks if the store raises, as a third-party one may; it may still write their rows then."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - of any kind: the engine goes on
            get_logger(__name__).exception("[UCM.Save] a store failed unexpectedly")
            task.failed.update(dict.fromkeys(task.keys, StoreError(f"{type(error).__name__}: {error}")))

    def _take(self, task: SaveTask, result: TaskResult, rows: list[Buffer]) -> None:
        task.done.update(result.done)
        task.failed.update(result.failed)
        task.nbytes += result.nbytes
        task.seconds = max(task.seconds, result.seconds)
        if rows:
            self._room.give_back(rows)


def _slices(row: Buffer, sizes: Sequence[int]) -> list[Buffer]:
    found, at = [], 0
    for size in sizes:
        found.append(row[at : at + size])
        at += size
    return found
