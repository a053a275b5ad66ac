"""The tier of files: who may read them, what is left behind, and directories that fail."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ucm.store.blocks import EVEN, ODD, Memory, content, fetch, filled, key, save
from ucm.errors import ConfigError
from ucm.store import health, posix_space, recent
from ucm.store.base import BlockGeometry
from ucm.store.config import StoreConfig
from ucm.store.errors import StoreFullError, StoreUnavailableError
from ucm.store.factory import open_store
from ucm.store.posix_layout import Layout

if TYPE_CHECKING:
    from ucm.store.base import KVStore

NAMESPACE = "a/b"
KEYS = [key(number) for number in range(12)]


class Clock:
    """A clock that stands still until the test moves it."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What tells when a rest is over, and what was seen is old."""
    found = Clock()
    monkeypatch.setattr(health, "time", found)
    monkeypatch.setattr(recent, "time", found)
    return found


def files(root: str | Path) -> list[Path]:
    return sorted(path for path in Path(root).rglob("*") if path.is_file() and path.name != "NAMESPACE")


def dump(store: KVStore, number: int) -> Memory:
    """Dump a block without committing it; the memory must live as long as nobody waited."""
    memory = filled([key(number)], ODD)[0]
    store.wait(store.dump([memory.transfer()]))
    return memory


def test_only_the_owner_reads(config: StoreConfig) -> None:
    umask = os.umask(0)
    try:
        with open_store(config, NAMESPACE, ODD) as store:
            save(store, KEYS, ODD)
            dump(store, 100)
            root = Path(config.directories[0])
            for path in root.rglob("*"):
                assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    finally:
        os.umask(umask)


def test_a_lookup_alone_makes_nothing(config: StoreConfig) -> None:
    with open_store(config, NAMESPACE, None) as store:
        assert store.lookup(KEYS) == [False] * len(KEYS)
    assert list(Path(config.directories[0]).iterdir()) == []


def test_nothing_is_left_when_a_block_is_dropped(config: StoreConfig) -> None:
    with open_store(config, NAMESPACE, ODD) as store:
        dump(store, 1)
        assert len(files(config.directories[0])) == 1
        store.discard([key(1)])
        dump(store, 2)
        store.wait(store.dump([filled([key(3)], ODD)[0].transfer(0, 1)]))
        store.wait(store.commit([key(3)]))
    assert files(config.directories[0]) == []


def test_forgotten_blocks_are_dropped_in_time(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucm.store.tiered._SWEEP_SECONDS", 0.0)
    with open_store(replace(config, stale_seconds=0.0), NAMESPACE, ODD) as store:
        dump(store, 1)
        dump(store, 2)
        store.wait(store.commit([key(1)]))
        assert store.lookup([key(1)]) == [False]


def test_two_writers_leave_one_whole_block(config: StoreConfig) -> None:
    with open_store(config, NAMESPACE, ODD) as one, open_store(config, NAMESPACE, ODD) as two:
        memories = filled([KEYS[0]], ODD, version=1), filled([KEYS[0]], ODD, version=2)
        for first, count in ((0, 3), (3, None)):
            one.wait(one.dump([memories[0][0].transfer(first, count)]))
            two.wait(two.dump([memories[1][0].transfer(first, count)]))
        one.wait(one.commit(KEYS[:1]))
        assert fetch(two, KEYS[:1], ODD)[0] == {KEYS[0]: content(KEYS[0], ODD, 1)}
        assert two.wait(two.commit(KEYS[:1])).failed == {}
        assert fetch(one, KEYS[:1], ODD)[0] == {KEYS[0]: content(KEYS[0], ODD, 2)}
    assert len(files(config.directories[0])) == 1


def test_an_emptied_directory_is_filled_again_at_once(config: StoreConfig) -> None:
    with open_store(config, NAMESPACE, ODD) as store:
        save(store, KEYS, ODD)
        for child in Path(config.directories[0]).iterdir():
            shutil.rmtree(child)
        assert store.lookup(KEYS) == [False] * len(KEYS)
        assert fetch(store, KEYS, ODD)[0] == {}
        assert save(store, KEYS, ODD).failed == {}
        assert store.lookup(KEYS) == [True] * len(KEYS)


def test_a_vanished_directory_comes_back_after_a_rest(config: StoreConfig, said: list[str], clock: Clock) -> None:
    root = Path(config.directories[0])
    with open_store(config, NAMESPACE, ODD) as store:
        save(store, KEYS, ODD)
        shutil.rmtree(root)
        assert fetch(store, KEYS, ODD)[0] == {}
        for block in KEYS[:5]:
            assert isinstance(save(store, [block], ODD).failed[block], StoreUnavailableError)
        assert not root.exists()
        assert any("rests for 30 s after 3 failures" in line for line in said)
        clock.now += config.rest_seconds
        assert save(store, KEYS[:1], ODD).failed == {}  # the probe
        assert save(store, KEYS, ODD).failed == {}
        assert fetch(store, KEYS, ODD)[0] == {block: content(block, ODD) for block in KEYS}
        assert any(line.endswith("works again") for line in said)
        assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_directory_without_a_parent_stays_away(config: StoreConfig, tmp_path: Path) -> None:
    root = tmp_path / "mount" / "root"
    root.mkdir(parents=True)
    with open_store(
        replace(config, directories=(str(root),), rest_seconds=0.0, failures_until_rest=1), NAMESPACE, ODD
    ) as store:
        shutil.rmtree(root.parent)
        for _ in range(3):
            assert isinstance(save(store, KEYS[:1], ODD).failed[KEYS[0]], StoreUnavailableError)
        assert not root.parent.exists()


@pytest.mark.usefixtures("clock")
def test_the_other_directories_go_on(tmp_path: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    config = StoreConfig(directories=tuple(map(str, roots)), lookup_cache_keys=0)
    keys = [key(number) for number in range(60)]
    with open_store(config, NAMESPACE, ODD) as store:
        save(store, keys, ODD)
        held = [sum(Path(Layout(str(root), NAMESPACE).block(block)).exists() for block in keys) for root in roots]
        assert sum(held) == len(keys)
        assert min(held) > 10
        shutil.rmtree(roots[0])
        assert store.lookup(keys).count(True) == held[1]
        loaded, failed = fetch(store, keys, ODD)
        assert len(loaded) == held[1]
        assert len(failed) == held[0]
        outcome = save(store, keys, ODD)
        assert len(outcome.done) == held[1]
        assert {type(error) for error in outcome.failed.values()} == {StoreUnavailableError}


def test_a_directory_more_moves_only_its_share(tmp_path: Path) -> None:
    roots = [tmp_path / name for name in "abc"]
    for root in roots:
        root.mkdir()
    keys = [key(number) for number in range(100)]
    with open_store(StoreConfig(directories=(str(roots[0]), str(roots[1]))), NAMESPACE, ODD) as store:
        save(store, keys, ODD)
    with open_store(StoreConfig(directories=tuple(map(str, reversed(roots)))), NAMESPACE, ODD) as store:
        found = store.lookup(keys)
        assert 50 < found.count(True) < 85


@pytest.mark.parametrize(
    ("number", "error", "cause"),
    [
        (errno.ENOSPC, StoreFullError, "full"),
        (errno.EDQUOT, StoreFullError, "full"),
        (errno.EIO, StoreUnavailableError, "unavailable"),
        (errno.EROFS, StoreUnavailableError, "unavailable"),
    ],
)
def test_what_the_medium_refuses_while_writing(
    config: StoreConfig,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    error: type[Exception],
    cause: str,
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with open_store(config, NAMESPACE, ODD) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", refuse)
            result = store.wait(store.dump([memory.transfer() for memory in filled(KEYS[:2], ODD)]))
            assert {type(found) for found in result.failed.values()} == {error}
        committed = store.wait(store.commit(KEYS[:2]))
        assert {type(found) for found in committed.failed.values()} == {error}
        assert store.stats()["posix"].failures == {f"dump.{cause}": 2}
        assert save(store, KEYS, ODD).failed == {}
    assert len(files(config.directories[0])) == len(KEYS)


def test_a_medium_that_fails_while_publishing(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "made up")

    with open_store(config, NAMESPACE, ODD) as store:
        save(store, KEYS[1:2], ODD)
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", refuse)
            assert isinstance(save(store, KEYS[:1], ODD).failed[KEYS[0]], StoreUnavailableError)
        assert store.stats()["posix"].failures == {"commit.unavailable": 1}
        assert len(files(config.directories[0])) == 1


def test_a_medium_that_fails_while_reading_rests(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    calls = 0

    def refuse(*_: object) -> int:
        nonlocal calls
        calls += 1
        raise OSError(errno.EIO, "made up")

    with open_store(replace(config, load_threads=1), NAMESPACE, ODD) as store:
        save(store, KEYS, ODD)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refuse)
            assert len(fetch(store, KEYS, ODD)[1]) == len(KEYS)
            assert calls == config.failures_until_rest
        assert store.lookup(KEYS) == [False] * len(KEYS)
        clock.now += config.rest_seconds
        # Lookups are not the probe: the first load is.
        assert store.lookup(KEYS) == [True] * len(KEYS)
        assert store.lookup_on_prefix(KEYS) == len(KEYS)
        assert fetch(store, KEYS[:1], ODD)[0] == {KEYS[0]: content(KEYS[0], ODD)}
        assert fetch(store, KEYS, ODD)[1] == {}
        assert store.stats()["posix"].set_aside_blocks == 0


def test_short_transfers_are_continued(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal, or a network file system, may cause them."""
    pwritev, preadv = os.pwritev, os.preadv

    def some_written(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return pwritev(descriptor, [memoryview(buffers[0]).cast("B")[:1000]], offset)

    def some_read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return preadv(descriptor, [memoryview(buffers[0]).cast("B")[:1000]], offset)

    monkeypatch.setattr(os, "pwritev", some_written)
    monkeypatch.setattr(os, "preadv", some_read)
    with open_store(config, NAMESPACE, ODD) as store:
        save(store, KEYS, ODD)
        assert fetch(store, KEYS, ODD)[0] == {block: content(block, ODD) for block in KEYS}


def test_direct_io_gives_way_where_it_is_refused(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    plain = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    direct = replace(config, direct_io=True)
    with open_store(direct, NAMESPACE, ODD) as store, open_store(direct, NAMESPACE, ODD) as reader:
        save(store, KEYS, ODD)
        assert fetch(reader, KEYS, ODD)[0] == {block: content(block, ODD) for block in KEYS}
    assert len([line for line in said if "refuses direct I/O" in line]) == 2


def test_a_dump_too_many_is_refused_and_nothing_waits(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(config, dump_queue_bytes=2 * ODD.nbytes, dump_threads=1)
    pwritev = os.pwritev

    def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        time.sleep(0.01)
        return pwritev(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    with open_store(small, NAMESPACE, ODD) as store:
        memories = filled(KEYS[:4], ODD)
        result = store.wait(store.dump([memory.transfer() for memory in memories]))
        assert set(result.done) == set(KEYS[:2])
        assert {type(error) for error in result.failed.values()} == {StoreFullError}
        committed = store.wait(store.commit(KEYS[:4]))
        assert set(committed.done) == set(KEYS[:2])
        assert {type(error) for error in committed.failed.values()} == {StoreFullError}
        # A block larger than the queue is taken when nothing else waits.
        with open_store(replace(small, dump_queue_bytes=1), "other", ODD) as narrow:
            assert save(narrow, KEYS[:1], ODD).failed == {}


@pytest.mark.parametrize("what", ["missing", "file"])
def test_a_root_that_is_no_directory_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "file":
        path.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        open_store(StoreConfig(directories=(str(path),)), NAMESPACE, EVEN)
    assert "directories" in caught.value.where
    assert str(path) in caught.value.where


def test_without_a_thread_until_the_first_transfer(config: StoreConfig) -> None:
    before = threading.active_count()
    with open_store(config, NAMESPACE, EVEN) as store:
        store.lookup(KEYS)
        store.lookup_on_prefix(KEYS)
        assert threading.active_count() == before
        save(store, KEYS[:1], EVEN)
        assert threading.active_count() > before
    assert threading.active_count() == before


def test_what_was_seen_is_believed_for_a_moment_only(config: StoreConfig, clock: Clock) -> None:
    cached = replace(config, lookup_cache_keys=100, lookup_cache_seconds=3.0)
    with open_store(config, NAMESPACE, ODD) as writer, open_store(cached, NAMESPACE, ODD) as store:
        save(writer, KEYS, ODD)
        assert store.lookup(KEYS) == [True] * len(KEYS)
        clock.now += 2.9
        assert store.lookup(KEYS) == [True] * len(KEYS)
        for path in files(config.directories[0]):
            path.unlink()
        clock.now += 2.9
        assert store.lookup_on_prefix(KEYS) == len(KEYS)
        clock.now += 0.3
        # However often it was asked for, it is not believed for longer than twice the time.
        assert store.lookup(KEYS) == [False] * len(KEYS)
        save(writer, KEYS, ODD)
        assert store.lookup(KEYS) == [True] * len(KEYS)
        for path in files(config.directories[0]):
            path.unlink()
        clock.now += 100
        assert store.lookup(KEYS) == [False] * len(KEYS)


def test_a_bounded_number_is_remembered(config: StoreConfig, clock: Clock) -> None:
    with open_store(replace(config, lookup_cache_keys=4), NAMESPACE, ODD) as store:
        save(store, KEYS, ODD)
        clock.now += 100
        for block in KEYS:
            assert store.lookup([block]) == [True]
        for path in files(config.directories[0]):
            path.unlink()
        assert 1 <= store.lookup(KEYS).count(True) <= 6


def test_a_failed_load_ends_the_belief(config: StoreConfig) -> None:
    with open_store(replace(config, lookup_cache_keys=100, lookup_cache_seconds=60.0), NAMESPACE, ODD) as store:
        save(store, KEYS, ODD)
        assert store.lookup(KEYS) == [True] * len(KEYS)
        Path(Layout(config.directories[0], NAMESPACE).block(KEYS[3])).unlink()
        fetch(store, KEYS, ODD)
        assert store.lookup(KEYS) == [index != 3 for index in range(len(KEYS))]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINTR, None])
def test_claiming_space_is_left_where_it_cannot_be(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    calls = 0

    def refuse(*_: int) -> int:
        nonlocal calls
        calls += 1
        ctypes.set_errno(number or 0)
        return -1

    monkeypatch.setattr(posix_space, "_fallocate", lambda: refuse if number else None)
    large = BlockGeometry((posix_space.CLAIM_FROM,), bytes(16))
    with open_store(replace(config, dump_threads=1), NAMESPACE, large) as store:
        assert save(store, KEYS[:3], large).failed == {}
        assert fetch(store, KEYS[:3], large)[0] == {block: content(block, large) for block in KEYS[:3]}
    assert calls == {errno.EOPNOTSUPP: 1, errno.EINTR: 3, None: 0}[number]


def test_a_block_for_which_no_space_can_be_claimed(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(posix_space, "_fallocate", lambda: refuse)
    large = BlockGeometry((posix_space.CLAIM_FROM,), bytes(16))
    with open_store(config, NAMESPACE, large) as store:
        assert isinstance(save(store, KEYS[:1], large).failed[KEYS[0]], StoreFullError)
        assert files(config.directories[0]) == []
