"""A store that keeps nothing, to measure the cost of everything around a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucm.store.base import KVStore, Task, TierStats
from ucm.store.errors import BlockMissingError
from ucm.store.tasks import TransferTask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.store.base import BlockGeometry, BlockKey, BlockTransfer, TaskResult
    from ucm.store.config import StoreConfig


class EmptyStore(KVStore):
    """Accepts every block and keeps none.

    Args:
        config: Unused; all back ends take the same three arguments.
        namespace: Unused.
        geometry: Unused.
    """

    def __init__(self, config: StoreConfig, namespace: str, geometry: BlockGeometry | None) -> None:
        del config, namespace, geometry
        self._stats = TierStats()

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Find nothing."""
        self._stats.lookups += len(keys)
        return [False] * len(keys)

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Find nothing."""
        self._stats.lookups += min(1, len(keys))
        return 0

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Do nothing."""

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Fail every block as missing."""
        task = TransferTask(len(blocks))
        for block in blocks:
            task.failed(block.key, BlockMissingError("nothing is ever in the empty store"))
        return task

    def save(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Accept every block."""
        task = TransferTask(len(blocks))
        for block in blocks:
            task.succeeded(block.key, "empty", 0)
        return task

    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Report every block as done and drop it."""
        distinct = dict.fromkeys(keys)
        task = TransferTask(len(distinct))
        for key in distinct:
            task.succeeded(key, "empty", 0)
        self._stats.saved_blocks += len(distinct)
        return task

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Do nothing."""

    def wait(self, task: Task) -> TaskResult:
        """Return the result; the task is finished already."""
        if not isinstance(task, TransferTask):
            raise TypeError(f"{task!r} is not a task of this store")
        return task.result()

    def check(self, task: Task) -> bool:
        """Return True: tasks are finished when they are returned."""
        del task
        return True

    def stats(self) -> Mapping[str, TierStats]:
        """Return the statistics of the one tier."""
        return {"empty": self._stats}

    def close(self) -> None:
        """Do nothing."""
