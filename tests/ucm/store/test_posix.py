"""The Posix tier: permissions, leftovers, and cached lookups."""

from __future__ import annotations

import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ucm.errors import ConfigError
from ucm.store.base import IncompleteBlockError, StoreFullError
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.posix import tier as posix_tier
from ucm.store.posix.layout import Layout
from ucm.store.posix.paths import NewFile, file_system_of
from ucm.store.posix.scan import clean_up
from ucm.store.tiered import TieredStore
from ucm.testing.blocks import EVEN, ODD, Memory, content, fetch, files, filled, key, save

if TYPE_CHECKING:
    from ucm.clock import Clock
    from ucm.store.base import KVStore
    from ucm.testing.clock import SimulatedClock

NAMESPACE = "a/b"
KEYS = [key(number) for number in range(12)]


def save_one(store: KVStore, number: int) -> Memory:
    """Save a block without committing it; the memory must live as long as nobody waited."""
    memory = filled([key(number)], ODD)[0]
    store.wait(store.save([memory.transfer()]))
    return memory


def test_only_the_owner_reads(config: StoreConfig, clock: SimulatedClock) -> None:
    umask = os.umask(0)
    try:
        with open_store(config, NAMESPACE, ODD, clock=clock) as store:
            save(store, KEYS, ODD)
            save_one(store, 100)
            root = Path(config.directories[0])
            for path in root.rglob("*"):
                assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    finally:
        os.umask(umask)


def test_a_lookup_alone_makes_nothing(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, None, clock=clock) as store:
        assert store.lookup(KEYS) == [False] * len(KEYS)
    assert list(Path(config.directories[0]).iterdir()) == []


def test_the_type_of_a_file_system() -> None:
    assert [file_system_of(path) for path in ("/proc", "/proc/self/task", "/sys")] == ["proc", "proc", "sysfs"]
    assert file_system_of("/process") == file_system_of("/") != ""


def test_blocks_are_touched_on_ceph_alone(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    touched: list[NewFile] = []

    def touch(self: NewFile) -> None:
        touched.append(self)

    monkeypatch.setattr(NewFile, "touch", touch)
    for number, (system, expected) in enumerate([("ext4", 0), ("fuse.ceph-fuse", 1), ("ceph", 2)]):
        monkeypatch.setattr(posix_tier, "file_system_of", lambda path, system=system: system if path else "")
        with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
            assert save(store, [key(number)], EVEN).failed == {}
        assert len(touched) == expected


def test_nothing_is_left_when_a_block_is_dropped(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, ODD, clock=clock) as store:
        save_one(store, 1)
        assert len(files(config.directories[0])) == 1
        store.discard([key(1)])
        save_one(store, 2)
        store.wait(store.save([filled([key(3)], ODD)[0].transfer(0, 1)]))
        store.wait(store.commit([key(3)]))
    assert files(config.directories[0]) == []


def test_forgotten_blocks_are_dropped_in_time(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(replace(config, stale_seconds=300.0), NAMESPACE, ODD, clock=clock) as store:
        save_one(store, 1)
        for number in range(2, 8):
            clock.advance(60)
            save_one(store, number)
        committed = store.wait(store.commit([key(1), key(3)]))
        assert set(committed.done) == {key(3)}
        assert store.lookup([key(1)]) == [False]


def test_what_waits_while_an_engine_idles_is_not_forgotten(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, ODD, clock=clock) as store:
        save_one(store, 1)
        (temporary,) = files(config.directories[0])
        os.utime(temporary, (1, 1))
        assert clean_up(config.directories[0], config.stale_seconds) == 0
        clock.advance(10 * config.stale_seconds)
        save_one(store, 2)
        assert store.wait(store.commit([key(1), key(2)])).failed == {}


def test_two_writers_leave_one_whole_block(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, ODD, clock=clock) as one, open_store(config, NAMESPACE, ODD, clock=clock) as two:
        memories = filled([KEYS[0]], ODD, version=1), filled([KEYS[0]], ODD, version=2)
        for first, count in ((0, 3), (3, None)):
            one.wait(one.save([memories[0][0].transfer(first, count)]))
            two.wait(two.save([memories[1][0].transfer(first, count)]))
        one.wait(one.commit(KEYS[:1]))
        assert fetch(two, KEYS[:1], ODD)[0] == {KEYS[0]: content(KEYS[0], ODD, 1)}
        assert two.wait(two.commit(KEYS[:1])).failed == {}
        assert fetch(one, KEYS[:1], ODD)[0] == {KEYS[0]: content(KEYS[0], ODD, 1)}  # with its lease, if it has one
    assert len(files(config.directories[0])) == 1


def test_a_directory_more_moves_only_its_share(tmp_path: Path, clock: SimulatedClock) -> None:
    roots = [tmp_path / name for name in "abc"]
    for root in roots:
        root.mkdir()
    keys = [key(number) for number in range(400)]  # their directories depend on the directories' names
    with open_store(
        StoreConfig(directories=(str(roots[0]), str(roots[1])), save_nice=0), NAMESPACE, ODD, clock=clock
    ) as store:
        save(store, keys, ODD)
    with open_store(StoreConfig(directories=tuple(map(str, reversed(roots)))), NAMESPACE, ODD, clock=clock) as store:
        found = store.lookup(keys)
        assert 200 < found.count(True) < 340


def test_a_save_too_many_is_refused_and_nothing_waits(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    small = replace(config, save_queue_bytes=2 * ODD.nbytes, save_threads=1)
    pwritev = os.pwritev

    def slow(*arguments: Any) -> int:
        clock.sleep(0.01)
        return pwritev(*arguments)

    monkeypatch.setattr(os, "pwritev", slow)
    with open_store(small, NAMESPACE, ODD, clock=clock) as store:
        memories = filled(KEYS[:4], ODD)
        result = store.wait(store.save([memory.transfer() for memory in memories]))
        assert set(result.done) == set(KEYS[:2])
        assert {type(error) for error in result.failed.values()} == {StoreFullError}
        assert {error.fix.split(",")[0] for error in result.failed.values()} == {"raise save_queue"}
        committed = store.wait(store.commit(KEYS[:4]))
        assert set(committed.done) == set(KEYS[:2])
        assert {type(error) for error in committed.failed.values()} == {IncompleteBlockError}
        assert store.stats()["posix"].failures == {"save.full": 2}
        # A block larger than the queue is accepted when the queue is empty.
        with open_store(replace(small, save_queue_bytes=1), "other", ODD, clock=clock) as narrow:
            assert save(narrow, KEYS[:1], ODD).failed == {}


@pytest.mark.parametrize("what", ["missing", "file"])
def test_a_root_that_is_no_directory_is_refused(tmp_path: Path, what: str, clock: SimulatedClock) -> None:
    path = tmp_path / what
    if what == "file":
        path.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        open_store(StoreConfig(directories=(str(path),)), NAMESPACE, EVEN, clock=clock)
    assert "directories" in caught.value.where
    assert str(path) in caught.value.where


def test_without_a_thread_until_it_is_used(config: StoreConfig, clock: SimulatedClock) -> None:
    before = set(threading.enumerate())  # those of other tests may end meanwhile
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        assert (clock.alive, set(threading.enumerate()) - before) == ([], set())
        store.lookup(KEYS)
        save(store, KEYS[:1], EVEN)
        assert {"ucm-lookup-0", "ucm-save-0", "ucm-evictor"} <= set(clock.alive)
    assert clock.alive == []


def test_what_was_seen_is_believed_for_a_moment_only(config: StoreConfig, clock: SimulatedClock) -> None:
    cached = replace(config, lookup_cache_keys=100, lookup_cache_seconds=3.0)
    with (
        open_store(config, NAMESPACE, ODD, clock=clock) as writer,
        open_store(cached, NAMESPACE, ODD, clock=clock) as store,
    ):
        save(writer, KEYS, ODD)
        assert store.lookup(KEYS) == [True] * len(KEYS)
        clock.advance(2.9)
        assert store.lookup(KEYS) == [True] * len(KEYS)
        for path in files(config.directories[0]):
            path.unlink()
        clock.advance(2.9)
        assert store.lookup_on_prefix(KEYS) == len(KEYS)
        clock.advance(0.3)
        # However often it is looked up, a cached result is used for at most twice the time.
        assert store.lookup(KEYS) == [False] * len(KEYS)
        save(writer, KEYS, ODD)
        assert store.lookup(KEYS) == [True] * len(KEYS)
        for path in files(config.directories[0]):
            path.unlink()
        clock.advance(100)
        assert store.lookup(KEYS) == [False] * len(KEYS)


def test_a_bounded_number_is_remembered(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(replace(config, lookup_cache_keys=4), NAMESPACE, ODD, clock=clock) as store:
        save(store, KEYS, ODD)
        clock.advance(100)
        for block in KEYS:
            assert store.lookup([block]) == [True]
        for path in files(config.directories[0]):
            path.unlink()
        assert 1 <= store.lookup(KEYS).count(True) <= 6


def test_a_failed_load_ends_the_belief(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(
        replace(config, lookup_cache_keys=100, lookup_cache_seconds=60.0), NAMESPACE, ODD, clock=clock
    ) as store:
        save(store, KEYS, ODD)
        assert store.lookup(KEYS) == [True] * len(KEYS)
        Path(Layout(config.directories[0], NAMESPACE).block(KEYS[3])).unlink()
        fetch(store, KEYS, ODD)
        assert store.lookup(KEYS) == [index != 3 for index in range(len(KEYS))]


class Gate:
    """A lock that the test's thread can acquire right after another thread has released it."""

    def __init__(self, clock: Clock) -> None:
        self.inner = clock.lock()
        self.left, self.go_on = clock.event(), clock.event()

    def __enter__(self) -> None:
        self.inner.acquire()

    def __exit__(self, *_: object) -> None:
        self.inner.release()
        if threading.current_thread() is not threading.main_thread():
            self.left.set()
            self.go_on.wait()


def test_a_commit_right_after_the_last_slice_finishes_a_block_once(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    with open_store(replace(config, save_threads=2), NAMESPACE, EVEN, clock=clock) as store:
        assert isinstance(store, TieredStore)
        gate = Gate(clock)
        monkeypatch.setattr(store, "_lock", gate)
        saved = store.save([memory.transfer() for memory in filled(KEYS[:1], EVEN)])
        gate.left.wait()  # the save's thread knows that nothing is pending
        committed = store.commit(KEYS[:1])
        gate.go_on.set()
        assert store.wait(saved).failed == {}
        result = store.wait(committed)
    assert (set(result.done), result.failed) == (set(KEYS[:1]), {})
    assert store.stats()["posix"].failures == {}
