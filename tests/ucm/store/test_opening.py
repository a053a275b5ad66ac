"""A store whose medium does not answer while it is opened delays no one; at most the calls to it meanwhile fail."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import create_autospec

import pytest

from tests.ucm.store.frozen import FrozenDirectory
from ucm.errors import ConfigError
from ucm.store.base import BlockTransfer, KVStore, Task, TransferTask
from ucm.store.factory import OpeningStore, open_store
from ucm.testing.blocks import EVEN, content, fetch, filled, key, save

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.clock import SimulatedClock
    from ucm.store.config import StoreConfig

KEYS = [key(number) for number in range(8)]


class Frozen:
    """A store under a directory that does not answer."""

    def __init__(self, config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock) -> None:
        self.config, self.clock = config, clock
        self.directory = FrozenDirectory(monkeypatch, config.directories[0], clock=clock)
        self.store = OpeningStore(
            partial(open_store, config, "n", EVEN, clock=clock), config.stuck_seconds, clock=clock
        )
        self.directory.held.wait()

    def thaw(self) -> None:
        self.directory.thawed.set()
        self.clock.run_until(lambda: bool(self.store.stats()))
        assert self.store.flush(60)

    def stored(self) -> list[bytes]:
        with open_store(self.config, "n", EVEN, clock=self.clock) as other:
            return list(fetch(other, KEYS, EVEN)[0].values())


@pytest.fixture
def frozen(config: StoreConfig, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Frozen]:
    found = Frozen(config, monkeypatch, clock)
    yield found
    found.directory.thawed.set()
    found.store.close()


@pytest.mark.parametrize("clock", range(5), indirect=True, ids="order {}".format)
def test_what_is_asked_or_saved_waits_until_it_is_open(frozen: Frozen, clock: SimulatedClock) -> None:
    store, found = frozen.store, list[object]()
    assert store.stats() == {}
    assert not store.flush(0)
    for ask in (lambda: store.lookup(KEYS), lambda: store.lookup_on_prefix(KEYS)):
        clock.thread(lambda ask=ask: found.append(ask()), "asks").start()  # type: ignore[misc] # a default argument
    memories = filled(KEYS, EVEN)
    tasks = [store.save([memory.transfer() for memory in memories[first : first + 4]]) for first in (0, 4)]
    into = filled(KEYS, EVEN, version=1)
    assert not any(task.check() for task in tasks)
    assert found == []
    frozen.thaw()
    clock.run_until(lambda: len(found) == 2)
    for first, task in zip((0, 4), tasks, strict=True):
        assert dict(task.wait().done) == dict.fromkeys(KEYS[first : first + 4], "posix")
    tasks.append(store.load([memory.transfer() for memory in into]))
    assert set(tasks[2].wait().done) == set(KEYS)
    assert all(task.check() for task in tasks)
    assert [bytes(memory.data) for memory in into] == [content(block, EVEN) for block in KEYS]
    assert store.lookup(KEYS) == [True] * 8


def test_after_a_while_what_waits_is_refused_and_its_memory_never_read_again(
    frozen: Frozen, clock: SimulatedClock
) -> None:
    store, memories = frozen.store, filled(KEYS, EVEN)
    tasks = [store.save([memory.transfer() for memory in memories])]
    began = clock.monotonic()
    assert (store.lookup(KEYS), store.lookup_on_prefix(KEYS)) == ([False] * 8, 0)
    store.renew(dict.fromkeys(KEYS, 0))
    store.retain(dict.fromkeys(KEYS, 0), clock.time() + 60)
    assert clock.monotonic() - began == frozen.config.stuck_seconds
    tasks.append(store.load([memory.transfer() for memory in filled(KEYS, EVEN)]))
    assert all(task.check() for task in tasks)
    failed = [task.wait().failed for task in tasks]
    assert [{error.cause for error in of_task.values()} for of_task in failed] == [{"timeout"}] * 2
    assert [set(of_task) for of_task in failed] == [set(KEYS)] * 2
    for memory in memories:
        memory.data[:] = bytes(len(memory.data))
    frozen.thaw()
    assert frozen.stored() == []
    save(store, KEYS, EVEN)
    assert frozen.stored() == [content(block, EVEN) for block in KEYS]


def test_whoever_waits_for_a_task_waits_no_longer_than_the_patience(frozen: Frozen, clock: SimulatedClock) -> None:
    task = frozen.store.save([memory.transfer() for memory in filled(KEYS, EVEN)])
    began = clock.monotonic()
    assert set(task.wait().failed) == set(KEYS)
    assert clock.monotonic() - began == frozen.config.stuck_seconds


def test_closing_leaves_the_opening_to_itself(frozen: Frozen, clock: SimulatedClock) -> None:
    clock.advance(frozen.config.stuck_seconds)
    frozen.store.close()
    with pytest.raises(ValueError, match="closed"):
        frozen.store.save([memory.transfer() for memory in filled(KEYS, EVEN)])


def test_what_is_opened_after_the_end_is_closed(clock: SimulatedClock) -> None:
    begun, goes_on, closed = clock.event(), clock.event(), clock.event()
    inner = create_autospec(KVStore, instance=True)
    inner.close.side_effect = closed.set

    def make() -> KVStore:
        begun.set()
        goes_on.wait()
        return inner  # type: ignore[no-any-return] # a mock is Any

    store = OpeningStore(make, 10.0, clock=clock)
    begun.wait()
    clock.advance(10.0)
    store.close()
    goes_on.set()
    closed.wait()


def test_what_is_opened_at_the_very_end_is_closed(clock: SimulatedClock) -> None:
    begun, closed = clock.event(), clock.event()
    inner = create_autospec(KVStore, instance=True)
    inner.close.side_effect = closed.set

    def save(_: object) -> Task:
        begun.set()
        clock.sleep(1.0)  # until after the end
        return create_autospec(Task, instance=True)  # type: ignore[no-any-return] # a mock is Any

    def make() -> KVStore:
        clock.sleep(9.5)
        return inner  # type: ignore[no-any-return] # a mock is Any

    inner.save.side_effect = save
    store = OpeningStore(make, 10.0, clock=clock)
    store.save([memory.transfer() for memory in filled(KEYS, EVEN)])
    begun.wait()
    store.close()
    closed.wait()
    inner.close.assert_called_once_with()


def test_an_open_store_hears_of_uses_and_leases(clock: SimulatedClock) -> None:
    inner = create_autospec(KVStore, instance=True)
    store = OpeningStore(lambda: inner, 10.0, clock=clock)
    store.renew({KEYS[0]: 16})
    store.retain({KEYS[0]: 16}, 60.0, pinned=True)
    inner.renew.assert_called_once_with({KEYS[0]: 16})
    inner.retain.assert_called_once_with({KEYS[0]: 16}, 60.0, pinned=True)
    store.close()


def test_a_store_that_cannot_be_opened_is_told_and_costs_its_blocks(
    config: StoreConfig, tmp_path: Path, said: list[str], clock: SimulatedClock
) -> None:
    def fail() -> KVStore:
        raise ConfigError("it is not there", where=str(tmp_path))

    store = OpeningStore(fail, config.stuck_seconds, clock=clock)
    result = store.save([memory.transfer() for memory in filled(KEYS, EVEN)]).wait()
    assert {error.cause for error in result.failed.values()} == {"unavailable"}
    assert store.lookup(KEYS) == [False] * 8
    assert sum("nothing is loaded or saved here: the store could not be opened" in line for line in said) == 1
    store.close()


def test_without_a_thread_to_open_it_in_nothing_is_found_or_saved(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler opens stores, and an error there ends the engine."""
    refuse = create_autospec(clock.thread)
    refuse.return_value.start.side_effect = RuntimeError("can't start new thread")
    monkeypatch.setattr(clock, "thread", refuse)
    store = OpeningStore(lambda: create_autospec(KVStore, instance=True), 10.0, clock=clock)
    assert store.lookup(KEYS) == [False] * 8
    result = store.save([memory.transfer() for memory in filled(KEYS, EVEN)]).wait()
    assert {error.cause for error in result.failed.values()} == {"unavailable"}
    store.close()
    assert clock.monotonic() == 1000.0


def test_misuse_of_one_that_is_not_open_is_told_with_the_task(frozen: Frozen) -> None:
    memory = filled(KEYS[:1], EVEN)[0]
    task = frozen.store.save([memory.transfer()])
    wrong = frozen.store.save([BlockTransfer(KEYS[1], [memoryview(b"short")])])
    frozen.thaw()
    assert task.wait().failed == {}
    assert "layer slice" in str(wrong.wait().failed[KEYS[1]])


def test_no_call_waits_while_what_waited_is_begun(clock: SimulatedClock) -> None:
    may_open, beginning, may_begin = clock.event(), clock.event(), clock.event()
    inner, saved = create_autospec(KVStore, instance=True), list[object]()

    def save_slowly(blocks: list[BlockTransfer]) -> Task:
        saved.append(blocks)
        beginning.set()
        may_begin.wait()
        task = TransferTask(1, clock=clock)
        task.succeeded(blocks[0].key, "posix", 1)
        return task

    def make() -> KVStore:
        may_open.wait()
        return inner  # type: ignore[no-any-return] # a mock is Any

    inner.save.side_effect = save_slowly
    store = OpeningStore(make, 60, clock=clock)
    blocks = [[memory.transfer()] for memory in filled(KEYS[:3], EVEN)]
    tasks = [store.save(blocks[0]), store.save(blocks[1])]
    may_open.set()
    beginning.wait()
    tasks.append(store.save(blocks[2]))
    assert not any(task.check() for task in tasks)
    may_begin.set()
    assert [list(task.wait().done) for task in tasks] == [[block] for block in KEYS[:3]]
    assert saved == blocks, "in the order of the calls"
    store.close()


def test_an_open_store_is_the_store_itself(config: StoreConfig, clock: SimulatedClock) -> None:
    store = OpeningStore(partial(open_store, config, "n", EVEN, clock=clock), config.stuck_seconds, clock=clock)
    assert store.flush(60)
    assert set(save(store, KEYS, EVEN).done.values()) == {"posix"}
    assert store.lookup_on_prefix(KEYS) == 8
    assert fetch(store, KEYS, EVEN) == ({block: content(block, EVEN) for block in KEYS}, {})
    assert store.stats()["posix"].saved_blocks == 8
    store.close()
