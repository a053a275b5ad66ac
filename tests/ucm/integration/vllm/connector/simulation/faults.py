"""A slow store with failures."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar

from ucm.store.base import BlockMissingError, KVStore, StoreFullError, Task, TaskResult

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from ucm.clock import Clock
    from ucm.store.base import BlockKey, BlockTransfer, StoreError, TierStats

Item = TypeVar("Item")


class Deferred(Task):
    """A deferred call."""

    def __init__(self, store: FaultyStore, queue: deque[Deferred], run: Callable[[], TaskResult]) -> None:
        self._store = store
        self._queue = queue
        self.run = run
        self.result: TaskResult | None = None

    def wait(self) -> TaskResult:
        with self._store.lock:
            while self.result is None:
                _carry_out(self._queue)
            return self.result

    def check(self) -> bool:
        with self._store.lock:
            self._store.some(self._queue)
        return self.result is not None


class FaultyStore(KVStore):
    """Executes transfers late, at the latest when waited for, and makes some of them fail.

    Loads keep their order among themselves, and so do saves.

    Args:
        inner: A real store.
        clock: The store's clock.
        chance: The source of random choices.
        failing_loads: The share of loads of single blocks that fail.
        failing_saves: The share of saves of single blocks that fail.
        late: The share of calls after which no waiting call is executed.
    """

    def __init__(
        self,
        inner: KVStore,
        clock: Clock,
        chance: random.Random,
        failing_loads: float,
        failing_saves: float,
        late: float,
    ) -> None:
        self.inner = inner
        self._chance = chance
        self._failing_loads = failing_loads
        self._failing_saves = failing_saves
        self._late = late
        self.lock = clock.condition()  # a reentrant lock: the scheduler side calls it from several threads
        self._loads: deque[Deferred] = deque()
        self._saves: deque[Deferred] = deque()
        self.failed = 0
        #: Also recorded here, because the waiting caller may attribute the error to the device.
        self.overwritten = False

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self.inner.lookup(keys)

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        return self.inner.lookup_on_prefix(keys)

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        error = BlockMissingError("injected")
        good, failed = self._split(blocks, lambda block: block.key, error, self._failing_loads)

        def run() -> TaskResult:
            result = self.inner.load(good).wait()
            for block in blocks:
                if block.key in failed or block.key in result.failed:
                    for layer_slice in block.slices:  # the memory of a failed block may contain anything
                        layer_slice[:] = self._chance.randbytes(layer_slice.nbytes)
            return _with(result, failed)

        return self._defer(self._loads, run)

    def save(self, blocks: Sequence[BlockTransfer]) -> Task:
        error = StoreFullError("injected")
        good, failed = self._split(blocks, lambda block: block.key, error, self._failing_saves)
        seen = [[bytes(layer_slice) for layer_slice in block.slices] for block in good]

        def run() -> TaskResult:
            if seen != [[bytes(layer_slice) for layer_slice in block.slices] for block in good]:
                self.overwritten = True
                raise AssertionError("a block was written while it was being saved")
            return _with(self.inner.save(good).wait(), failed)

        return self._defer(self._saves, run)

    def renew(self, depths: Mapping[BlockKey, int]) -> None:
        self.inner.renew(depths)

    def stats(self) -> Mapping[str, TierStats]:
        return self.inner.stats()

    def close(self) -> None:
        while self._saves:
            _carry_out(self._saves)
        self.inner.close()

    def _defer(self, queue: deque[Deferred], run: Callable[[], TaskResult]) -> Deferred:
        task = Deferred(self, queue, run)
        with self.lock:
            queue.append(task)
            self.some(queue)
        return task

    def some(self, queue: deque[Deferred]) -> None:
        while queue and self._chance.random() >= self._late:
            _carry_out(queue)

    def _split(
        self, items: Sequence[Item], key_of: Callable[[Item], BlockKey], error: StoreError, share: float
    ) -> tuple[list[Item], dict[BlockKey, StoreError]]:
        good: list[Item] = []
        failed: dict[BlockKey, StoreError] = {}
        for item in items:
            if self._chance.random() < share:
                failed[key_of(item)] = error
            else:
                good.append(item)
        self.failed += len(failed)
        return good, failed


def _carry_out(queue: deque[Deferred]) -> None:
    task = queue.popleft()
    task.result = task.run()


def _with(result: TaskResult, failed: Mapping[BlockKey, StoreError]) -> TaskResult:
    return TaskResult(result.done, {**result.failed, **failed}, result.nbytes, result.seconds)
