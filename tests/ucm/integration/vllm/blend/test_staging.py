"""The chunks of a request are staged concurrently, including those that another request is staging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.ucm.integration.vllm.blend.scene import Request, Scene, tokens
from ucm.store.base import Task

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.clock import SimulatedClock
    from ucm.store.base import BlockTransfer, KVStore, TaskResult


class _Slow:
    """A store whose reads end only when a number of them have begun, like a medium of high latency.

    Args:
        clock: Time and threads.
        store: The real one.
        reads: The number.
    """

    def __init__(self, clock: SimulatedClock, store: KVStore, reads: int) -> None:
        self._store = store
        self._left = reads
        self.all_begun = clock.event()
        self.late = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        self._left -= 1
        if self._left <= 0:
            self.all_begun.set()
        return _Reading(self, self._store.load(blocks))


class _Reading(Task):
    """A read of it."""

    def __init__(self, store: _Slow, task: Task) -> None:
        self._store = store
        self._task = task

    def wait(self) -> TaskResult:
        self._store.late += not self._store.all_begun.wait(5)
        return self._task.wait()

    def check(self) -> bool:
        return self._store.all_begun.is_set() and self._task.check()


def test_the_chunks_of_a_request_are_read_at_the_same_time(clock: SimulatedClock, tmp_path: Path) -> None:
    """In sequence, each would wait for the medium's latency again."""
    texts = [tokens(number, 70) for number in range(1, 5)]
    prompt = [token for text in texts for token in text] + tokens(9, 20)
    with Scene(clock, tmp_path) as scene:
        scene.begin()
        for text in texts:
            scene.put(text)
        slow = _Slow(clock, scene.stores[0], len(texts))
        scene.stager._stores = {0: [slow]}  # type: ignore[list-item]
        marks = [[70 * number, 70 * number + 70] for number in range(len(texts))]
        assert scene.matched(Request("r", prompt, marks)) == 272
        assert not slow.late


def test_requests_that_stage_the_same_chunks_in_other_orders_do_not_wait_for_each_other(
    clock: SimulatedClock, tmp_path: Path
) -> None:
    """Each reads one of the two; a request that waited for the other's first would wait for ever."""
    one, other = tokens(1, 70), tokens(2, 70)
    with Scene(clock, tmp_path, seconds=20.0) as scene:
        scene.begin()
        for text in (one, other):
            scene.put(text)
        for number in range(20):
            scene.slab.clear()
            first = Request(f"first {number}", [*one, *other, 5], [[0, 70], [70, 140]])
            second = Request(f"second {number}", [*other, *one, 5], [[0, 70], [70, 140]])
            since = clock.monotonic()
            for request in (first, second):
                scene.scheduler.matched(request, 0, 0)
            assert [scene.matched(request) for request in (first, second)] == [128, 128]
            assert clock.monotonic() == since
            for request in (first, second):
                scene.scheduler.finished(request)


def test_what_a_store_that_raises_may_write_to_is_not_used_again(clock: SimulatedClock, tmp_path: Path) -> None:
    text = tokens(1, 70)
    with Scene(clock, tmp_path) as scene:
        scene.begin()
        scene.put(text)
        (store,) = scene.stores

        class Raising(_Slow):
            def load(self, blocks: Sequence[BlockTransfer]) -> Task:
                super().load(blocks)
                raise RuntimeError("after it has begun")

        scene.stager._stores = {0: [Raising(clock, store, 1)]}  # type: ignore[list-item]
        assert scene.matched(Request("r", [*text, 5], [[0, 70]])) == 0
        assert scene.slab._used > 0


def test_a_missing_piece_of_one_chunk_leaves_the_others(clock: SimulatedClock, tmp_path: Path) -> None:
    """Even if it was evicted between the lookup and the read."""
    texts = [tokens(number, 70) for number in range(1, 5)]
    prompt = [token for text in texts for token in text] + tokens(9, 20)
    with Scene(clock, tmp_path) as scene:
        scene.begin()
        keys = [scene.put(text) for text in texts]
        (store,) = scene.stores

        class Evicting(_Slow):
            def load(self, blocks: Sequence[BlockTransfer]) -> Task:
                if blocks[0].key == keys[1][0]:
                    name = keys[1][1].hex()
                    (file,) = [found for found in tmp_path.rglob("*") if name in str(found).replace("/", "")]
                    file.unlink()
                return super().load(blocks)

        scene.stager._stores = {0: [Evicting(clock, store, 1)]}  # type: ignore[list-item]
        one = Request("r", prompt, [[70 * number, 70 * number + 70] for number in range(len(texts))])
        assert scene.matched(one) == 272
        assert scene.admit(one, 0, 272, list(range(20)))
        (blend,) = scene.step((one, list(range(20)), 272, 28)).blends
        assert [chunk.start for chunk in blend.chunks] == [0, 140, 210]
        assert scene.counted.failures == ["load.missing"]
