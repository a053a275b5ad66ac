"""Background writing stays away while its caller computes, and never for good."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ucm.background import call_later
from ucm.store import guard
from ucm.store.factory import open_store
from ucm.store.guard import Throttle
from ucm.testing.blocks import EVEN, filled, key, save

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.clock import SimulatedClock
    from ucm.store.base import KVStore, Task
    from ucm.store.config import StoreConfig

KEYS = [key(number) for number in range(4)]
#: Longer than a test lets pass, in seconds.
NEVER = 3600.0


@pytest.fixture
def store(config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock) -> Iterator[KVStore]:
    monkeypatch.setattr(guard, "LONGEST_DELAY", NEVER)
    with open_store(replace(config, save_threads=1), "n", EVEN, clock=clock) as opened:
        yield opened


def saved_in_the_background(store: KVStore) -> Task:
    store.throttle(active=True)
    return store.save([memory.transfer() for memory in filled(KEYS, EVEN)])


def test_nothing_is_written_while_the_caller_computes(store: KVStore, clock: SimulatedClock) -> None:
    task = saved_in_the_background(store)
    clock.advance(60)
    assert not task.check()
    store.throttle(active=False)
    clock.advance(guard.GRACE)
    assert task.check()


def test_nothing_is_written_right_after_it_computed(store: KVStore, clock: SimulatedClock) -> None:
    task = saved_in_the_background(store)
    store.throttle(active=False)
    clock.advance(0.9 * guard.GRACE)
    assert not task.check()
    assert set(task.wait().done) == set(KEYS), "who waits is served at once"


def test_a_caller_that_waits_is_served(store: KVStore) -> None:
    task = saved_in_the_background(store)
    assert set(task.wait().done) == set(KEYS)


def test_loads_are_not_held_back(store: KVStore, clock: SimulatedClock) -> None:
    save(store, KEYS, EVEN)
    store.throttle(active=True)
    task = store.load([memory.transfer() for memory in filled(KEYS, EVEN)])
    clock.run_until_idle()
    assert task.check()


def test_what_is_too_much_is_written_at_once(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    """More than half of what may wait, however little that is."""
    monkeypatch.setattr(guard, "LONGEST_DELAY", NEVER)
    narrow = replace(config, save_threads=1, save_queue_bytes=len(KEYS) * EVEN.nbytes)
    with open_store(narrow, "n", EVEN, clock=clock) as store:
        task = saved_in_the_background(store)
        clock.advance(60)
        assert store.stats()["posix"].saved_blocks == 3, "with one alone waiting, there is time"
        store.throttle(active=False)
        clock.advance(guard.GRACE)
        assert task.check()


def test_the_more_waits_the_less_patient_it_is(monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock) -> None:
    monkeypatch.setattr(guard, "LONGEST_DELAY", NEVER)
    held = Throttle(20_000, clock=clock)
    held.switch(active=True)
    turns = [call_later(partial(held.take_turn, waiting), "turn", clock=clock) for waiting in (9_999, 5_000)]
    clock.advance(NEVER / 10_000)
    assert [turn.done() for turn in turns] == [True, False]
    clock.advance(0.4 * NEVER)
    assert not turns[1].done()
    held.hurry()
    clock.run_until_idle()
    assert turns[1].done()


def test_a_store_can_be_closed_meanwhile(store: KVStore) -> None:
    task = saved_in_the_background(store)
    store.close()
    assert task.check()


def test_a_long_computation_does_not_hold_it_for_ever(clock: SimulatedClock) -> None:
    held = Throttle(1, clock=clock)
    held.switch(active=True)
    began = clock.monotonic()
    held.take_turn(0)
    assert clock.monotonic() - began == pytest.approx(guard.LONGEST_DELAY)
