"""Which saves are admitted to the write queue, and the memory that they occupy."""

from __future__ import annotations

import mmap
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import create_autospec

from ucm.integration.vllm.connector import saving
from ucm.integration.vllm.connector.saving import EXTENT_BYTES, SaveRoom
from ucm.store.base import BlockKey

if TYPE_CHECKING:
    import pytest

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


def test_memory_that_a_burst_took_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now[0]))
    room = SaveRoom(limit=1 << 40)
    block = EXTENT_BYTES // 2
    burst = [row for _, row in room.take(KEYS, block)]
    room.give_back(burst)
    assert room.held_bytes == 6 * block
    for _ in range(3):
        now[0] += saving.KEEP_SECONDS
        room.give_back([row for _, row in room.take(KEYS[:1], block)])
    assert room.held_bytes == 2 * block
    assert let_in(room, KEYS, block) == list(range(6))
