"""Save blocks from rows of host memory into a store."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from ucm.integration.vllm.connector.dump_room import DumpRoom
from ucm.store.base import BlockTransfer, Task, TaskResult
from ucm.store.errors import IncompleteBlockError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucm.store.base import BlockKey, Buffer, KVStore
    from ucm.store.errors import StoreError

#: Bytes handed to the store at once; this is how much memory a stuck write blocks.
WRITE_BYTES = 8 << 20


class DumpTask(Task):
    """A dump: shards of blocks that are copied into rows and written from there; or a commit of blocks.

    Args:
        keys: The blocks.
        rows: The indexes of the blocks that have a row, each with its row.
        sizes: The shards' sizes in bytes.
        first_shard: The index of the first shard.
    """

    def __init__(
        self,
        keys: Sequence[BlockKey],
        rows: Sequence[tuple[int, Buffer]] = (),
        sizes: Sequence[int] = (),
        first_shard: int = 0,
    ) -> None:
        self.keys = keys
        self.rows = rows
        self.sizes = sizes
        self.first_shard = first_shard
        self.copied = threading.Event()  #: the KV cache is no longer read, and nothing more is handed to the store
        self.writing: deque[tuple[Task, list[Buffer]]] = deque()
        self.done: dict[BlockKey, str] = {}
        self.failed: dict[BlockKey, StoreError] = {}
        self.nbytes = 0
        self.seconds = 0.0


class Saver:
    """Hands rows to a store and reclaims them once written, without waiting for the store.

    Args:
        store: The store.
        limit: Bytes that may wait to be written.
    """

    def __init__(self, store: KVStore, limit: int) -> None:
        self._store = store
        self._room = DumpRoom(limit)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were dumped and are not written yet."""
        return self._room.taken_bytes

    def begin(self, keys: Sequence[BlockKey], sizes: Sequence[int], first_shard: int) -> DumpTask:
        """Begin a dump with rows for the blocks' shards; blocks without a row fail."""
        rows = self._room.take(keys, sum(sizes))
        task = DumpTask(keys, rows, sizes, first_shard)
        if len(rows) < len(keys):
            let_in, full = {place for place, _ in rows}, self._room.error()
            task.failed = {key: full for place, key in enumerate(keys) if place not in let_in}
        return task

    def write(self, task: DumpTask, rows: Sequence[tuple[int, Buffer]]) -> None:
        """Start to write some rows of a task; their content must not change any more."""
        at_once = max(1, WRITE_BYTES // max(1, sum(task.sizes)))
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            transfers = [
                BlockTransfer(task.keys[place], _shards(row, task.sizes), task.first_shard) for place, row in some
            ]
            task.writing.append((self._store.dump(transfers), [row for _, row in some]))

    def drop(self, task: DumpTask, rows: Iterable[tuple[int, Buffer]], error: StoreError) -> None:
        """Drop some rows of a task and fail their blocks."""
        for place, row in rows:
            task.failed[task.keys[place]] = error
            self._room.give_back([row])

    def begin_commit(self, keys: Sequence[BlockKey]) -> DumpTask:
        """Begin a commit; blocks with refused shards fail."""
        refused = self._room.forget(keys)
        task = DumpTask(keys)
        task.failed = {key: IncompleteBlockError(f"block {key.hex()} had no room among the dumps") for key in refused}
        return task

    def commit(self, task: DumpTask) -> DumpTask:
        """Make blocks visible; discard the failed ones."""
        if task.failed:
            self._store.discard(list(task.failed))
        task.writing.append((self._store.commit([key for key in task.keys if key not in task.failed]), []))
        task.copied.set()
        return task

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Note that blocks will not be committed, so that they can be dumped again."""
        self._room.forget(keys)

    def check(self, task: DumpTask) -> bool:
        """Reclaim written rows, and return whether the whole task is finished."""
        copied = task.copied.is_set()
        for _ in range(len(task.writing)):
            writing, rows = task.writing.popleft()
            if not self._store.check(writing):
                task.writing.append((writing, rows))
                continue
            self._take(task, self._store.wait(writing), rows)
        return copied and not task.writing

    def wait(self, task: DumpTask) -> TaskResult:
        """Wait for a task and return its result."""
        task.copied.wait()
        while task.writing:
            writing, rows = task.writing.popleft()
            self._take(task, self._store.wait(writing), rows)
        done = {key: tier for key, tier in task.done.items() if key not in task.failed}
        return TaskResult(done, task.failed, task.nbytes, task.seconds)

    def _take(self, task: DumpTask, result: TaskResult, rows: list[Buffer]) -> None:
        task.done.update(result.done)
        task.failed.update(result.failed)
        task.nbytes += result.nbytes
        task.seconds = max(task.seconds, result.seconds)
        if rows:
            self._room.give_back(rows)


def _shards(row: Buffer, sizes: Sequence[int]) -> list[Buffer]:
    found, at = [], 0
    for size in sizes:
        found.append(row[at : at + size])
        at += size
    return found
