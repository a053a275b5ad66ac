"""Which saves are admitted to the write queue, and the memory that they occupy."""

from __future__ import annotations

import gc
import mmap
import weakref
from typing import TYPE_CHECKING
from unittest.mock import create_autospec

import pytest

from ucm.integration.vllm.connector import saving
from ucm.integration.vllm.connector.saving import EXTENT_BYTES, Saver, SaveRoom, SaveTask
from ucm.store.base import BlockGeometry, BlockKey, KVStore, StoreError, Task
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ucm.testing.clock import SimulatedClock

GEOMETRY = BlockGeometry((4096,) * 4, b"0123456789abcdef")
KEYS = [BlockKey(number.to_bytes(16, "big")) for number in range(6)]


def let_in(room: SaveRoom, keys: list[BlockKey], nbytes: int) -> list[int]:
    return [place for place, _ in room.take(keys, nbytes)]


def test_blocks_are_let_in_up_to_the_limit() -> None:
    room = SaveRoom(limit=100)
    taken = room.take(KEYS[:4], 30)
    assert [place for place, _ in taken] == [0, 1, 2]
    assert room.taken_bytes == 90
    room.give_back([row for _, row in taken[:2]])
    assert let_in(room, KEYS[4:], 35) == [0, 1]
    assert (room.error().cause, room.error().what) == ("full", "more than 100 bytes wait for being written")


def test_something_is_let_in_whenever_nothing_waits() -> None:
    room = SaveRoom(limit=1)
    for _ in range(2):
        [(place, row)] = room.take(KEYS[:2], 50)
        assert (place, row.nbytes) == (0, 50)
        room.give_back([row])
        room.forget(KEYS)


def test_a_block_that_was_refused_stays_out_until_it_is_forgotten() -> None:
    room = SaveRoom(limit=100)
    taken = room.take(KEYS[:3], 50)
    assert len(taken) == 2
    room.give_back([row for _, row in taken])
    assert let_in(room, KEYS[:4], 25) == [0, 1, 3]
    assert room.forget(KEYS) == {KEYS[2]}
    assert room.forget(KEYS) == set()
    assert let_in(room, KEYS[2:3], 25) == [0]


def test_rows_are_apart_and_used_again() -> None:
    room = SaveRoom(limit=1 << 20)
    first = [row for _, row in room.take(KEYS, 1000)]
    for number, row in enumerate(first):
        row[:] = bytes([number]) * 1000
    assert [bytes(row) for row in first] == [bytes([number]) * 1000 for number in range(len(KEYS))]
    held = room.held_bytes
    room.give_back(first)
    room.take(KEYS, 1000)
    assert room.held_bytes == held


def test_no_more_memory_is_held_than_may_be_used() -> None:
    room = SaveRoom(limit=100)
    assert let_in(room, KEYS[:3], 30) == [0, 1, 2]
    assert room.held_bytes == 90


def test_where_the_system_has_no_memory_a_block_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    room = SaveRoom(limit=1 << 20)
    refuses = create_autospec(mmap.mmap, side_effect=OSError("no memory"))
    with monkeypatch.context() as patched:
        patched.setattr(saving, "mmap", create_autospec(mmap, mmap=refuses))
        assert room.take(KEYS[:1], 1000) == []
    assert room.forget(KEYS) == {KEYS[0]}
    assert let_in(room, KEYS[:1], 1000) == [0]


def test_memory_that_a_burst_took_is_given_back() -> None:
    room = SaveRoom(limit=1 << 40)
    block = EXTENT_BYTES // 2
    burst = [row for _, row in room.take(KEYS, block)]
    room.give_back(burst)
    room.trim()
    assert room.held_bytes == 6 * block  # as many may be needed again
    room.give_back([row for _, row in room.take(KEYS[:1], block)])
    room.trim()
    assert room.held_bytes == 2 * block
    room.trim()
    assert room.held_bytes == 0
    assert let_in(room, KEYS, block) == list(range(6))


def test_an_allocation_with_a_row_that_is_taken_stays() -> None:
    room = SaveRoom(limit=1 << 40)
    block = EXTENT_BYTES // 4
    rows = [row for _, row in room.take(KEYS, block)]
    room.give_back(rows[1:])
    for _ in range(2):
        room.trim()
    assert (room.taken_bytes, room.held_bytes) == (block, EXTENT_BYTES)
    room.give_back(rows[:1])
    room.trim()
    room.trim()
    assert room.held_bytes == 0


@pytest.fixture
def saver(tmp_path: Path, clock: SimulatedClock) -> Iterator[Saver]:
    store = open_store(StoreConfig(directories=(str(tmp_path),)), "saver", GEOMETRY, clock=clock)
    made = Saver(store, 1 << 30, clock=clock)
    yield made
    made.close()
    store.close()


def save(saver: Saver) -> tuple[SaveTask, weakref.ref[object]]:
    """Save a block, and check its task no more, like an engine that has no request left.

    Returns:
        The task, and a reference to the memory of its rows.
    """
    task, rows = saver.begin(KEYS[:1], GEOMETRY.slice_sizes, 0)
    saver.write(task, rows)
    task.copied.set()
    return task, weakref.ref(rows[0][1].obj)


def until_nothing_is_held(clock: SimulatedClock, saver: Saver) -> None:
    """Let as much time pass as unused memory is kept at most."""
    clock.advance(saving.KEEP_SECONDS - 0.001)
    assert saver._room.held_bytes
    clock.advance(saving.KEEP_SECONDS + 0.001)
    assert saver._room.held_bytes == 0
    assert "ucm-free" not in clock.alive


def test_an_engine_without_requests_gives_its_memory_back(clock: SimulatedClock, saver: Saver) -> None:
    for number in range(3):  # the thread ends with the memory, and starts again
        task, memory = save(saver)
        assert saver._room.held_bytes
        assert memory() is not None
        until_nothing_is_held(clock, saver)
        assert memory() is None
        assert saver.waiting_bytes == 0
        assert saver.check(task)
        assert list(saver.wait(task).done) == KEYS[:1], number
        saver.wait(saver.commit(saver.begin_commit(KEYS[:1])))


def test_a_task_that_nobody_holds_is_no_reason_to_keep_memory(clock: SimulatedClock, saver: Saver) -> None:
    task, _ = save(saver)
    saver.wait(task)
    gone = weakref.ref(task)
    del task
    gc.collect()
    assert gone() is None
    until_nothing_is_held(clock, saver)


@pytest.mark.parametrize("call", ["save", "check", "wait"])
def test_what_a_store_raises_fails_the_blocks_and_their_rows_are_not_used_again(saver: Saver, call: str) -> None:
    real = saver._store
    saver._store = broken = create_autospec(KVStore, instance=True)
    broken.save.side_effect, broken.check.side_effect = real.save, real.check
    getattr(broken, call).side_effect = OSError("broken")
    task, _ = save(saver)
    result = saver.wait(task) if call == "wait" else None
    assert saver.check(task)
    if result is None:
        result = saver.wait(task)
    assert (str(result.failed[KEYS[0]]), result.done) == ("OSError: broken", {})
    assert saver.waiting_bytes == GEOMETRY.nbytes


@pytest.mark.parametrize("call", ["commit", "discard"])
def test_blocks_that_a_store_cannot_commit_or_discard_fail(saver: Saver, call: str) -> None:
    saver._store = broken = create_autospec(KVStore, instance=True)
    getattr(broken, call).side_effect = OSError("broken")
    task = SaveTask(KEYS[:2])
    task.failed = {KEYS[1]: StoreError("it was not saved")}
    result = saver.wait(saver.commit(task))
    assert str(result.failed[KEYS[0]]) == "OSError: broken"
    assert (set(result.failed), result.done) == ({*KEYS[:2]}, {})
    saver.discard(KEYS[:2])


@pytest.mark.parametrize("answers", [True, False])
def test_closing_waits_for_the_thread_because_the_store_is_closed_next(
    clock: SimulatedClock, saver: Saver, monkeypatch: pytest.MonkeyPatch, *, answers: bool
) -> None:
    checks, takes = [], 3.0 if answers else 3600.0

    def check(task: Task) -> bool:
        checks.append(task)
        clock.sleep(takes)
        return False

    monkeypatch.setattr(saver._store, "check", check)
    tasks = [save(saver) for _ in range(3)]
    clock.advance(saving.KEEP_SECONDS)
    begun = clock.monotonic()
    saver.close()
    assert clock.monotonic() - begun == (takes if answers else saving.CLOSE_SECONDS)
    assert ("ucm-free" in clock.alive) == (not answers)
    assert (len(checks), len(tasks)) == (1, 3)


def test_a_store_that_does_not_answer_keeps_no_thread_waiting_for_another(
    clock: SimulatedClock, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that frees memory is stuck in the store; the engine's step goes on."""
    answer, real = clock.event(), saver._store.check

    def check(task: Task) -> bool:
        answer.wait()
        return real(task)

    monkeypatch.setattr(saver._store, "check", check)
    task, _ = save(saver)
    clock.advance(saving.KEEP_SECONDS)
    monkeypatch.setattr(saver._store, "check", real)
    begun = clock.monotonic()
    assert not saver.check(task), "another thread asks the store"
    other, _ = save(saver)
    assert list(saver.wait(other).done) == KEYS[:1]
    assert clock.monotonic() == begun
    answer.set()
    assert list(saver.wait(task).done) == KEYS[:1]
    assert saver.check(task)
