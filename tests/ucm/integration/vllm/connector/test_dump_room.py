"""What is let in to wait for being written, and what is not."""

from __future__ import annotations

from ucm.integration.vllm.connector.dump_room import DumpRoom
from ucm.store.base import BlockKey

KEYS = [BlockKey(number.to_bytes(16, "big")) for number in range(6)]


def test_blocks_are_let_in_up_to_the_limit() -> None:
    room = DumpRoom(limit=100)
    assert room.take(KEYS[:4], 30) == [0, 1, 2]
    room.give_back(60)
    assert room.take(KEYS[4:], 35) == [0, 1]
    assert (room.error().cause, room.error().what) == ("full", "more than 100 bytes wait for being written")


def test_something_is_let_in_whenever_nothing_waits() -> None:
    room = DumpRoom(limit=1)
    for _ in range(2):
        assert room.take(KEYS[:2], 50) == [0]
        room.give_back(50)
        room.forget(KEYS)


def test_a_block_that_was_refused_stays_out_until_it_is_forgotten() -> None:
    room = DumpRoom(limit=100)
    assert room.take(KEYS[:3], 50) == [0, 1]
    room.give_back(100)
    assert room.take(KEYS[:4], 25) == [0, 1, 3]
    assert room.forget(KEYS) == {KEYS[2]}
    assert room.forget(KEYS) == set()
    assert room.take(KEYS[2:3], 25) == [0]
