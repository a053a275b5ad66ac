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
from ucm.store.base import StoreFullError
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.posix import directory as posix_directory
from ucm.store.posix.directory import Directory
from ucm.store.posix.paths import file_system_of, publish
from ucm.testing.blocks import EVEN, ODD, content, fetch, files, filled, key, save

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.clock import SimulatedClock
    from ucm.store.base import Buffer

NAMESPACE = "a/b"
KEYS = [key(number) for number in range(12)]


def test_only_the_owner_reads(config: StoreConfig, clock: SimulatedClock) -> None:
    umask = os.umask(0)
    try:
        with open_store(config, NAMESPACE, ODD, clock=clock) as store:
            save(store, KEYS, ODD)
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
    touched: list[str] = []

    def publish_late(source: str, target: str, *, touches: bool = False) -> None:
        publish(source, target, touches=touches)
        if touches:
            touched.append(target)

    monkeypatch.setattr(posix_directory, "publish", publish_late)
    for number, (system, expected) in enumerate([("ext4", 0), ("fuse.ceph-fuse", 1), ("ceph", 2)]):
        monkeypatch.setattr(posix_directory, "file_system_of", lambda path, system=system: system if path else "")
        with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
            assert save(store, [key(number)], EVEN).failed == {}
        assert len(touched) == expected


def test_two_writers_leave_one_whole_block(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    written, goes_on = clock.event(), clock.event()

    write = Directory._write

    def late(self: Directory, path: str, pieces: Sequence[Buffer | bytearray], nbytes: int) -> None:
        write(self, path, pieces, nbytes)
        if not written.is_set():
            written.set()
            goes_on.wait()

    monkeypatch.setattr(Directory, "_write", late)
    with open_store(config, NAMESPACE, ODD, clock=clock) as one, open_store(config, NAMESPACE, ODD, clock=clock) as two:
        (slow,) = filled(KEYS[:1], ODD, version=2)
        task = two.save([slow.transfer()])
        written.wait()
        assert save(one, KEYS[:1], ODD, version=1).failed == {}
        goes_on.set()
        assert task.wait().failed == {}
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
        result = store.save([memory.transfer() for memory in memories]).wait()
        assert set(result.done) == set(KEYS[:2])
        assert {type(error) for error in result.failed.values()} == {StoreFullError}
        assert {error.fix.split(",")[0] for error in result.failed.values()} == {"raise save_queue"}
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
