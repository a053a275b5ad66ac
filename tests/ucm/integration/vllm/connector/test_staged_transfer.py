"""Transfers between a device and a store through staging memory, with torch's CPU as the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.ucm.integration.vllm.connector.tensors import tensor
from ucm.integration.vllm.connector.kv_cache import CacheGroup, DeviceMemory
from ucm.integration.vllm.connector.metadata import BlockMoves
from ucm.store.base import BlockKey, BlockTransfer, Task
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.memory.slab import PAGE, Slab, SlabReader
from ucm.testing.blocks import files

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests beside vLLM")

from tests.ucm.integration.vllm.connector.torch_tensors import all_as_torch
from ucm.integration.vllm.connector.transfer import SaveTask, StagedTransfer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.clock import SimulatedClock
    from tests.ucm.integration.vllm.connector.tensors import Tensor
    from ucm.store.base import KVStore, TaskResult

pytest_plugins = ("tests.simulated",)

BLOCKS, LAYERS = 12, 3
ALL = range(LAYERS)
#: What a chunk's load takes in simulated seconds.
LOAD_SECONDS = 2.0
KEYS = [BlockKey(number.to_bytes(16, "big")) for number in range(BLOCKS)]


class Watched:
    """A store that records which of its transfers were not waited for."""

    def __init__(self, inner: KVStore, clock: SimulatedClock) -> None:
        self.inner = inner
        self.clock = clock
        self.left: set[int] = set()
        self.writes = clock.event()  # the medium does not answer while it is not set
        self.writes.set()

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        self.clock.sleep(LOAD_SECONDS)
        return self._begun(self.inner.load(blocks))

    def save(self, blocks: Sequence[BlockTransfer]) -> Task:
        self.writes.wait()
        return self._begun(self.inner.save(blocks))

    def _begun(self, task: Task) -> Task:
        self.left.add(id(task))
        return Waited(task, self.left)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Waited(Task):
    """A task that is crossed off a list once it was waited for."""

    def __init__(self, inner: Task, left: set[int]) -> None:
        self._inner, self._left = inner, left

    def wait(self) -> TaskResult:
        result = self._inner.wait()
        self._left.discard(id(self._inner))
        return result

    def check(self) -> bool:
        return self._inner.check()


class Failing(DeviceMemory):
    """A device that fails some of its copies, numbered from 0."""

    at: frozenset[int] = frozenset()
    copies = 0

    def gather(self, block_ids: Sequence[int], layers: range, staging: list[Any]) -> None:
        self._count()
        super().gather(block_ids, layers, staging)

    def scatter(self, rows: Sequence[int], block_ids: Sequence[int], layers: range, staging: list[Any]) -> None:
        self._count()
        super().scatter(rows, block_ids, layers, staging)

    def _count(self) -> None:
        self.copies += 1
        if self.copies - 1 in self.at:
            raise RuntimeError("out of memory")


def moves(keys: Sequence[BlockKey], blocks: Sequence[int]) -> BlockMoves:
    return BlockMoves("r", 0, list(keys), list(blocks), list(range(len(keys))))


class Setup:
    """KV caches, the device, the store and the transfer between them, with chunks of two blocks and a small queue."""

    def __init__(self, clock: SimulatedClock, directory: Path, room: int = BLOCKS) -> None:
        self.clock, self.directory = clock, directory
        self.caches: dict[str, Tensor] = {f"layer {layer}": tensor((2, BLOCKS, 4, 8)) for layer in ALL}
        group = CacheGroup(0, 4, None, {}, tuple(self.caches))
        self.device = Failing(group, all_as_torch(self.caches), BLOCKS, {})
        config = StoreConfig(directories=(str(directory),))
        self.store = Watched(open_store(config, "model/rank0", self.device.geometry, clock=clock), clock)
        block, self.reader = self.device.geometry.nbytes, SlabReader(clock=clock)
        self.transfer = StagedTransfer(
            self.device,
            self.store,  # type: ignore[arg-type] # as much of a store as is used
            self.reader,
            4 * block,
            save_queue_bytes=room * block,
            clock=clock,
        )

    def content(self, block: int) -> list[bytes]:
        return [cache.view()[:, block].tobytes() for cache in self.caches.values()]

    def contents(self) -> list[list[bytes]]:
        return [self.content(block) for block in range(BLOCKS)]

    def save(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> TaskResult:
        return self.start_save(keys, blocks).wait()

    def start_save(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> SaveTask:
        """Save blocks, and confirm it."""
        task = self.transfer.save(moves(keys, blocks))
        self.transfer.confirm(task)
        return task

    def delete(self, keys: Sequence[BlockKey]) -> None:
        for path in files(self.directory):
            if f"{path.parent.name}{path.name}" in {key.hex() for key in keys}:
                path.unlink()

    def load(self, keys: Sequence[BlockKey], blocks: Sequence[int]) -> TaskResult:
        return self.transfer.load(moves(keys, blocks), ALL, 0).wait()

    def wipe(self) -> None:
        for cache in self.caches.values():
            cache.raw[:] = 0xEE


@pytest.fixture
def setup(clock: SimulatedClock, tmp_path: Path) -> Iterator[Setup]:
    found = Setup(clock, tmp_path)
    yield found
    found.transfer.close()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_what_was_saved_is_loaded_into_other_blocks(setup: Setup, count: int) -> None:
    were = setup.contents()
    saved = setup.save(KEYS[:count], range(count))
    assert set(saved.done) == set(KEYS[:count])
    setup.wipe()
    empty = setup.contents()
    target = list(range(BLOCKS - 1, BLOCKS - 1 - count, -1))
    loaded = setup.load(KEYS[:count], target)
    assert set(loaded.done) == set(KEYS[:count])
    assert loaded.nbytes == count * setup.transfer.chunk_bytes
    for block in range(BLOCKS):
        assert setup.content(block) == (were[target.index(block)] if block in target else empty[block])


def test_staged_layers_are_loaded_apart(setup: Setup) -> None:
    were, nbytes = setup.contents(), setup.transfer.chunk_bytes
    assert set(setup.save(KEYS[:5], range(5)).done) == set(KEYS[:5])
    slab = Slab(5 * PAGE, 1, clock=setup.clock)
    slab.lay_out(nbytes)
    loads = moves(KEYS[:5], range(5))
    for key in loads.keys:
        claimed = slab.claim(0, key)
        assert claimed is not None
        setup.store.load([BlockTransfer(key, [slab.memory(claimed[0], 0, nbytes)])]).wait()
        slab.filled(claimed[0], "posix")
        loads.places.append(slab.offset(claimed[0]))
        loads.tiers.append("posix")
    assert setup.reader.attach(slab.address, 0, {})
    setup.wipe()
    empty = setup.contents()
    assert set(setup.transfer.load(loads, range(1, 3), 0).wait().done) == set(KEYS[:5])
    for block in range(5):
        assert setup.content(block) == [empty[block][0], *were[block][1:]]


def test_nothing_is_visible_before_it_is_confirmed(setup: Setup) -> None:
    tasks = [setup.transfer.save(moves(KEYS[at], range(8)[at])) for at in (slice(3), slice(3, 5))]
    for task in tasks:
        task.copied.wait()
        assert not task.check()
    setup.transfer.confirm(tasks[0])
    setup.transfer.drop(tasks[1])
    assert set(tasks[0].wait().done) == set(KEYS[:3])
    assert tasks[1].wait().done == {}
    assert setup.store.inner.lookup(KEYS[:5]) == [True] * 3 + [False] * 2
    assert setup.transfer.room.taken_bytes == 0


def test_what_is_missing_is_told_and_the_rest_arrives(setup: Setup) -> None:
    were = setup.contents()
    setup.save([KEYS[0], KEYS[2], KEYS[3]], [0, 2, 3])
    setup.wipe()
    empty = setup.contents()
    loaded = setup.load(KEYS[:5], range(5))
    assert {key: error.cause for key, error in loaded.failed.items()} == {KEYS[1]: "missing", KEYS[4]: "missing"}
    assert [setup.content(block) for block in (0, 2, 3)] == [were[block] for block in (0, 2, 3)]
    assert [setup.content(block) for block in (1, 4)] == [empty[1], empty[4]]


def test_a_finished_task_is_told_as_such(setup: Setup) -> None:
    task = setup.start_save(KEYS[:3], range(3))
    assert not task.check()
    first = task.wait()
    assert task.check()
    assert task.wait().done == first.done
    loading = setup.transfer.load(moves(KEYS[:3], range(3)), ALL, 0)
    setup.clock.advance(2 * LOAD_SECONDS - 0.5)
    assert not loading.check()
    setup.clock.advance(0.5)
    assert loading.check()
    assert loading.wait().seconds == 2 * LOAD_SECONDS, "of two chunks"


def test_closing_finishes_what_was_confirmed(setup: Setup, tmp_path: Path) -> None:
    were = setup.contents()
    setup.start_save(KEYS[:7], range(7))
    setup.transfer.close()
    again = Setup(setup.clock, tmp_path)
    again.wipe()
    assert set(again.load(KEYS[:7], range(7)).done) == set(KEYS[:7])
    assert again.contents()[:7] == were[:7]
    again.transfer.close()


@pytest.mark.parametrize("at", range(3))
def test_what_did_not_reach_the_device_is_not_told_as_loaded(setup: Setup, at: int) -> None:
    were = setup.contents()
    setup.save(KEYS[:6], range(6))
    setup.wipe()
    setup.device.at, setup.device.copies = frozenset({at}), 0
    loaded = setup.load(KEYS[:6], range(6))
    assert set(loaded.done) == set(KEYS[: 2 * at])
    assert set(loaded.failed) == set(KEYS[2 * at : 6])
    assert {error.cause for error in loaded.failed.values()} == {"unavailable"}
    assert setup.contents()[: 2 * at] == were[: 2 * at]
    assert not setup.store.left, "the staging memory is still being written"
    # The device works again.
    assert set(setup.load(KEYS[:6], range(6)).done) == set(KEYS[:6])
    assert setup.contents()[:6] == were[:6]


@pytest.mark.parametrize("at", range(3))
def test_what_did_not_leave_the_device_is_not_stored(setup: Setup, at: int) -> None:
    """A save fails as a whole: a device that fails a copy rarely makes the others."""
    setup.device.at = frozenset({at})
    saved = setup.save(KEYS[:6], range(6))
    assert (saved.done, set(saved.failed)) == ({}, set(KEYS[:6]))
    assert {error.cause for error in saved.failed.values()} == {"unavailable"}
    assert not setup.store.left, "rows are still being read"
    assert setup.store.inner.lookup(KEYS[:6]) == [False] * 6


class Lost:
    """Like ``torch.cuda`` once the device has failed."""

    def set_device(self, device: Any) -> None:
        raise RuntimeError("lost")

    def current_stream(self) -> Any:
        return SimpleNamespace(record_event=lambda: None)


@pytest.mark.parametrize("confirmed", [False, True])
def test_a_device_that_is_lost_after_the_copies_keeps_no_save_waiting(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, *, confirmed: bool
) -> None:
    task = setup.transfer.save(moves(KEYS[:2], range(2)))
    task.copied.wait()
    monkeypatch.setattr(setup.transfer._gatherer, "_module", Lost())
    (setup.transfer.confirm if confirmed else setup.transfer.drop)(task)
    setup.clock.advance(1.0)
    assert task.check()
    assert set(task.wait().done) == (set(KEYS[:2]) if confirmed else set())
    assert setup.transfer.room.taken_bytes == 0


def test_loads_and_saves_at_once(setup: Setup) -> None:
    """Each direction has its own staging memory."""
    were = setup.contents()
    setup.save(KEYS[:4], range(4))
    for cache in setup.caches.values():
        cache.view()[:, :4] = 0
    for _ in range(20):
        loads = setup.transfer.load(moves(KEYS[:4], range(4)), ALL, 0)
        saves = setup.start_save(KEYS[6:], range(6, 12))
        assert not loads.wait().failed
        assert not saves.wait().failed
        setup.delete(KEYS[6:])
        assert setup.contents()[:4] == were[:4]
    setup.save(KEYS[6:], range(6, 12))
    setup.wipe()
    setup.load(KEYS[6:], range(6, 12))
    assert setup.contents()[6:] == were[6:]
    assert np.all(setup.caches["layer 0"].view()[:, :6].view(np.uint8) == 0xEE)


@pytest.fixture
def narrow(clock: SimulatedClock, tmp_path: Path) -> Iterator[Setup]:
    """A setup whose queue of four blocks is full, because the medium does not answer."""
    found = Setup(clock, tmp_path, room=4)
    found.store.writes.clear()
    yield found
    found.store.writes.set()
    found.transfer.close()


def test_blocks_beyond_the_room_are_refused_at_once_and_the_rest_is_saved(narrow: Setup) -> None:
    partly = narrow.start_save(KEYS[:6], range(6))
    refused = narrow.start_save(KEYS[6:8], range(6, 8))
    narrow.clock.run_until_idle()
    assert not partly.check()
    refused.copied.wait()
    narrow.store.writes.set()
    result = refused.wait()
    assert (result.done, set(result.failed), result.nbytes) == ({}, set(KEYS[6:8]), 0)
    result = partly.wait()
    assert (set(result.done), set(result.failed)) == (set(KEYS[:4]), set(KEYS[4:6]))
    assert {error.cause for error in result.failed.values()} == {"full"}
    assert "raise save_queue," in str(result.failed[KEYS[4]])
    assert narrow.store.inner.lookup(KEYS[:8]) == [True] * 4 + [False] * 4
    # There is room again.
    assert set(narrow.save(KEYS[6:10], range(6, 10)).done) == set(KEYS[6:10])


def test_what_the_device_could_not_give_waits_no_longer(clock: SimulatedClock, tmp_path: Path) -> None:
    setup = Setup(clock, tmp_path, room=2)
    setup.device.at = frozenset({0})
    assert set(setup.save(KEYS[:2], range(2)).failed) == set(KEYS[:2])
    assert set(setup.save(KEYS[:2], range(2)).done) == set(KEYS[:2])
    setup.transfer.close()
