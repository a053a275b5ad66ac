"""Background writing stays away while its caller computes, and never for good."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ucm.store import guard
from ucm.store.factory import open_store
from ucm.store.guard import Throttle
from ucm.testing.blocks import EVEN, filled, key, save

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.store.base import KVStore, Task
    from ucm.store.config import StoreConfig

KEYS = [key(number) for number in range(4)]
#: Seconds in which what must not happen would have happened; far more than what must happen takes; and what nobody
#: waits for.
MOMENT, LONG, NEVER = 0.2, 60.0, 3600.0


@pytest.fixture
def store(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[KVStore]:
    monkeypatch.setattr(guard, "LONGEST_DELAY", NEVER)
    with open_store(replace(config, save_threads=1), "n", EVEN) as opened:
        yield opened


def saved_in_the_background(store: KVStore) -> Task:
    store.throttle(active=True)
    return store.save([memory.transfer() for memory in filled(KEYS, EVEN)])


def is_finished_after(store: KVStore, task: Task, seconds: float) -> bool:
    over = threading.Event()
    watch = threading.Thread(target=lambda: [None for _ in iter(lambda: store.check(task) or over.wait(0.005), True)])
    watch.start()
    watch.join(seconds)
    over.set()
    watch.join()
    return store.check(task)


def test_nothing_is_written_while_the_caller_computes(store: KVStore) -> None:
    task = saved_in_the_background(store)
    assert not is_finished_after(store, task, MOMENT)
    store.throttle(active=False)
    assert is_finished_after(store, task, LONG)


def test_nothing_is_written_right_after_it_computed(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "GRACE", NEVER)
    task = saved_in_the_background(store)
    store.throttle(active=False)
    assert not is_finished_after(store, task, MOMENT)
    assert set(store.wait(task).done) == set(KEYS), "who waits is served at once"


def test_a_caller_that_waits_is_served(store: KVStore) -> None:
    task = saved_in_the_background(store)
    assert set(store.wait(task).done) == set(KEYS)


def test_loads_are_not_held_back(store: KVStore) -> None:
    save(store, KEYS, EVEN)
    store.throttle(active=True)
    task = store.load([memory.transfer() for memory in filled(KEYS, EVEN)])
    assert is_finished_after(store, task, LONG)


def test_what_is_too_much_is_written_at_once(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MOST_WAITING", 2 * EVEN.nbytes)
    task = saved_in_the_background(store)
    # All but the last: with that alone waiting, there is time.
    assert not is_finished_after(store, task, MOMENT)
    store.throttle(active=False)
    assert is_finished_after(store, task, LONG)


def test_the_more_waits_the_less_patient_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LONGEST_DELAY", NEVER)
    monkeypatch.setattr(guard, "MOST_WAITING", 10_000)
    held = Throttle()
    held.switch(active=True)
    turns = [threading.Thread(target=held.take_turn, args=(waiting,), daemon=True) for waiting in (9_999, 5_000)]
    for turn in turns:
        turn.start()
    turns[0].join(LONG)
    assert [turn.is_alive() for turn in turns] == [False, True]
    held.hurry()
    turns[1].join(LONG)
    assert not turns[1].is_alive()


def test_a_store_can_be_closed_meanwhile(store: KVStore) -> None:
    task = saved_in_the_background(store)
    store.close()
    assert store.check(task)


def test_a_long_computation_does_not_hold_it_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LONGEST_DELAY", 0.001)
    held = Throttle()
    held.switch(active=True)
    held.take_turn(0)
