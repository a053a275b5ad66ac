"""The store that keeps nothing: what everything around a store costs."""

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
    """Accepts every block and has none.

    Args:
        config: Unused; every back end is made from the same three things.
        namespace: Unused.
        geometry: Unused.
    """

    def __init__(self, config: StoreConfig, namespace: str, geometry: BlockGeometry | None) -> None:
        del config, namespace, geometry
        self._stats = TierStats()

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Nothing is there."""
        self._stats.lookups += len(keys)
        return [False] * len(keys)

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Nothing is there."""
        self._stats.lookups += min(1, len(keys))
        return 0

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Nothing is there."""

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Every block is missing."""
        task = TransferTask(len(blocks))
        for block in blocks:
            task.failed(block.key, BlockMissingError("nothing is ever in the empty store"))
        return task

    def dump(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Every block is taken."""
        task = TransferTask(len(blocks))
        for block in blocks:
            task.succeeded(block.key, "empty", 0)
        return task

    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Every block is gone."""
        distinct = dict.fromkeys(keys)
        task = TransferTask(len(distinct))
        for key in distinct:
            task.succeeded(key, "empty", 0)
        self._stats.dumped_blocks += len(distinct)
        return task

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Nothing was kept."""

    def wait(self, task: Task) -> TaskResult:
        """It is finished."""
        if not isinstance(task, TransferTask):
            raise TypeError(f"{task!r} is not a task of this store")
        return task.result()

    def check(self, task: Task) -> bool:
        """It is finished."""
        del task
        return True

    def stats(self) -> Mapping[str, TierStats]:
        """One tier, with nothing in it."""
        return {"empty": self._stats}

    def close(self) -> None:
        """Nothing is open."""
