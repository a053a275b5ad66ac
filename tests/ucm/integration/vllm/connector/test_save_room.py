"""Which saves are admitted to the write queue, and the memory that they occupy."""

from __future__ import annotations

import gc
import mmap
import weakref
from typing import TYPE_CHECKING
from unittest.mock import create_autospec

import pytest

from ucm.integration.vllm.connector import transfer
from ucm.integration.vllm.connector.metadata import BlockMoves
from ucm.integration.vllm.connector.transfer import EXTENT_BYTES, GroupTransfer, SaveRoom, SaveTask
from ucm.store.base import BlockGeometry, BlockKey, KVStore, StoreError, Task, TransferTask
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.memory.slab import KEEP_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.clock import SimulatedClock

GEOMETRY = BlockGeometry((4096,) * 4, b"0123456789abcdef")
KEYS = [BlockKey(number.to_bytes(16, "big")) for number in range(6)]


def test_blocks_are_let_in_up_to_the_limit() -> None:
    room = SaveRoom(100, 30)
    taken = room.take(4)
    assert len(taken) == 3
    assert room.taken_bytes == 90
    room.give_back(taken[:2])
    assert len(room.take(3)) == 2


def test_something_is_let_in_whenever_nothing_waits() -> None:
    room = SaveRoom(1, 50)
    for _ in range(2):
        [row] = room.take(2)
        assert row.nbytes == 50
        room.give_back([row])


def test_rows_are_apart_and_used_again() -> None:
    room = SaveRoom(1 << 20, 1000)
    first = room.take(6)
    for number, row in enumerate(first):
        row[:] = bytes([number]) * 1000
    assert [bytes(row) for row in first] == [bytes([number]) * 1000 for number in range(6)]
    held = room.held_bytes
    room.give_back(first)
    room.take(6)
    assert room.held_bytes == held


def test_no_more_memory_is_held_than_may_be_used() -> None:
    room = SaveRoom(100, 30)
    assert len(room.take(3)) == 3
    assert room.held_bytes == 90


def test_where_the_system_has_no_memory_a_block_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    room = SaveRoom(1 << 20, 1000)
    with monkeypatch.context() as patched:
        patched.setattr(mmap, "mmap", create_autospec(mmap.mmap, side_effect=OSError("no memory")))
        assert room.take(1) == []
    assert len(room.take(1)) == 1


def test_memory_that_a_burst_took_is_given_back() -> None:
    block = EXTENT_BYTES // 2
    room = SaveRoom(1 << 40, block)
    room.give_back(room.take(6))
    room.trim()
    assert room.held_bytes == 6 * block  # as many may be needed again
    room.give_back(room.take(1))
    room.trim()
    assert room.held_bytes == 2 * block
    room.trim()
    assert room.held_bytes == 0
    assert len(room.take(6)) == 6


def test_an_allocation_with_a_row_that_is_taken_stays() -> None:
    block = EXTENT_BYTES // 4
    room = SaveRoom(1 << 40, block)
    rows = room.take(6)
    room.give_back(rows[1:])
    for _ in range(2):
        room.trim()
    assert (room.taken_bytes, room.held_bytes) == (block, EXTENT_BYTES)
    room.give_back(rows[:1])
    room.trim()
    room.trim()
    assert room.held_bytes == 0


class Saver(GroupTransfer):
    """Saves rows as they are."""

    def _copy(self, task: SaveTask) -> None:
        """Leave the rows as they are."""

    def begin(self, count: int) -> SaveTask:
        """Begin to save the first keys."""
        return self.save(BlockMoves("r", 0, KEYS[:count], list(range(count)), list(range(count))))


@pytest.fixture
def saver(tmp_path: Path, clock: SimulatedClock) -> Iterator[Saver]:
    store = open_store(StoreConfig(directories=(str(tmp_path),)), "saver", GEOMETRY, clock=clock)
    made = Saver(GEOMETRY, [], store, 1 << 30, clock=clock)
    yield made
    made.close()


def save(saver: Saver) -> tuple[SaveTask, weakref.ref[object]]:
    """Save a block, and check its task no more, like an engine that has no request left.

    Returns:
        The task, and a reference to the memory of its rows.
    """
    task = saver.begin(1)
    memory: weakref.ref[object] = weakref.ref(task.rows[0].obj)
    task.confirm()
    return task, memory


def until_nothing_is_held(clock: SimulatedClock, saver: Saver) -> None:
    """Let as much time pass as unused memory is kept at most."""
    clock.advance(KEEP_SECONDS - 0.001)
    assert saver.room.held_bytes
    clock.advance(KEEP_SECONDS + 0.001)
    assert saver.room.held_bytes == 0
    assert "ucm-free" not in clock.alive


def test_an_engine_without_requests_gives_its_memory_back(clock: SimulatedClock, saver: Saver) -> None:
    for number in range(3):  # the thread ends with the memory, and starts again
        task, memory = save(saver)
        assert saver.room.held_bytes
        assert memory() is not None
        until_nothing_is_held(clock, saver)
        assert memory() is None
        assert saver.room.taken_bytes == 0
        assert task.check()
        assert list(task.wait().done) == KEYS[:1], number


def test_saves_are_looked_at_in_their_order(
    clock: SimulatedClock, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in that of their addresses, which are others in every process."""
    looked, check = list[SaveTask](), SaveTask.check

    def noted(self: SaveTask) -> bool:
        looked.append(self)
        return check(self)

    monkeypatch.setattr(SaveTask, "check", noted)
    tasks = [save(saver)[0] for _ in range(40)]
    clock.advance(KEEP_SECONDS + 0.001)
    assert looked == tasks


def test_a_task_that_nobody_holds_is_no_reason_to_keep_memory(clock: SimulatedClock, saver: Saver) -> None:
    task, _ = save(saver)
    task.wait()
    gone = weakref.ref(task)
    del task
    gc.collect()
    assert gone() is None
    until_nothing_is_held(clock, saver)


@pytest.mark.parametrize("call", ["save", "check", "wait"])
def test_what_a_store_raises_fails_the_blocks_and_their_rows_are_not_used_again(saver: Saver, call: str) -> None:
    saver.store = store = create_autospec(KVStore, instance=True)
    broken = store.save.return_value = create_autospec(Task, instance=True)
    (store.save if call == "save" else getattr(broken, call)).side_effect = OSError("broken")
    task, _ = save(saver)
    result = task.wait() if call == "wait" else None
    assert task.check()
    if result is None:
        result = task.wait()
    assert (str(result.failed[KEYS[0]]), result.done) == ("OSError: broken", {})
    assert saver.room.taken_bytes == GEOMETRY.nbytes


def test_what_is_not_confirmed_is_not_written_and_its_rows_serve_others(saver: Saver) -> None:
    task = saver.begin(2)
    assert not task.check(), "it waits for the confirmation"
    assert saver.room.taken_bytes == 2 * GEOMETRY.nbytes
    task.drop()
    assert task.check()
    result = task.wait()
    assert (result.done, result.failed, saver.room.taken_bytes) == ({}, {}, 0)
    failing = saver.begin(2)
    failing.drop(StoreError("the device failed"))
    failing.confirm()
    assert set(failing.wait().failed) == set(KEYS[:2])
    assert saver.store.lookup(KEYS[:2]) == [False, False]


def test_blocks_beyond_the_limit_fail_and_say_so(saver: Saver, clock: SimulatedClock) -> None:
    narrow = Saver(GEOMETRY, [], saver.store, 2 * GEOMETRY.nbytes, clock=clock)
    task = narrow.begin(3)
    task.confirm()
    result = task.wait()
    assert (set(result.done), set(result.failed)) == (set(KEYS[:2]), set(KEYS[2:3]))
    assert "raise save_queue," in str(result.failed[KEYS[2]])
    assert saver.store.lookup(KEYS[:3]) == [True, True, False]
    narrow.close()


@pytest.mark.parametrize("answers", [True, False])
def test_closing_waits_for_the_thread_because_the_store_is_closed_next(
    clock: SimulatedClock, saver: Saver, monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    checks, takes = [], 3.0 if answers else 3600.0

    def check(self: TransferTask) -> bool:
        checks.append(self)
        clock.sleep(takes)
        return False

    monkeypatch.setattr(TransferTask, "check", check)
    tasks = [save(saver) for _ in range(3)]
    clock.advance(KEEP_SECONDS)
    begun = clock.monotonic()
    saver.close()
    assert clock.monotonic() - begun == (takes if answers else transfer.CLOSE_SECONDS)
    assert ("ucm-free" in clock.alive) == (not answers)
    assert (len(checks), len(tasks)) == (1, 3)


def test_a_store_that_does_not_answer_keeps_no_thread_waiting_for_another(
    clock: SimulatedClock, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that frees memory is stuck in the store; the engine's step goes on."""
    answer, real = clock.event(), TransferTask.check

    def check(self: TransferTask) -> bool:
        answer.wait()
        return real(self)

    monkeypatch.setattr(TransferTask, "check", check)
    task, _ = save(saver)
    clock.advance(KEEP_SECONDS)
    monkeypatch.setattr(TransferTask, "check", real)
    begun = clock.monotonic()
    assert not task.check(), "another thread asks the store"
    other, _ = save(saver)
    assert list(other.wait().done) == KEYS[:1]
    assert clock.monotonic() == begun
    answer.set()
    assert list(task.wait().done) == KEYS[:1]
    assert task.check()
