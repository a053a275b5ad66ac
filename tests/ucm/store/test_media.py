"""Failing directories: they vanish, refuse access, run full, or transfer only parts."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.store.base import (
    BlockGeometry,
    BlockMissingError,
    StoreFullError,
    StoreUnavailableError,
)
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.posix import directory as posix_directory
from ucm.store.posix import files as posix_files
from ucm.store.posix import paths as posix_paths
from ucm.store.posix.layout import Layout
from ucm.testing.blocks import ODD, content, fetch, files, filled, key, save

if TYPE_CHECKING:
    from tests.clock import SimulatedClock

NAMESPACE = "a/b"
KEYS = [key(number) for number in range(12)]


def test_an_emptied_directory_is_filled_again_at_once(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, ODD, clock=clock) as store:
        save(store, KEYS, ODD)
        Path(config.directories[0], "USED").unlink()
        for child in Path(config.directories[0]).iterdir():
            shutil.rmtree(child)
        assert store.lookup(KEYS) == [False] * len(KEYS)
        assert fetch(store, KEYS, ODD)[0] == {}
        assert save(store, KEYS, ODD).failed == {}
        assert store.lookup(KEYS) == [True] * len(KEYS)


def test_a_deleted_directory_is_made_again_at_once(config: StoreConfig, said: list[str], clock: SimulatedClock) -> None:
    root = Path(config.directories[0])
    with open_store(config, NAMESPACE, ODD, clock=clock) as store:
        save(store, KEYS, ODD)
        shutil.rmtree(root)
        assert fetch(store, KEYS, ODD)[0] == {}
        assert save(store, KEYS, ODD).failed == {}
        assert fetch(store, KEYS, ODD)[0] == {block: content(block, ODD) for block in KEYS}
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
    assert not any("rests" in line for line in said)


def test_a_directory_whose_file_system_went_comes_back_after_a_rest(
    config: StoreConfig, said: list[str], clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may not unmount: the directory is deleted, and its parent made to look like another file system."""
    root = Path(config.directories[0])
    with open_store(config, NAMESPACE, ODD, clock=clock) as store:
        save(store, KEYS, ODD)
        shutil.rmtree(root)
        monkeypatch.setattr(posix_directory, "_device", lambda path: 0)
        assert fetch(store, KEYS, ODD)[0] == {}
        for block in KEYS[:5]:
            assert isinstance(save(store, [block], ODD).failed[block], StoreUnavailableError)
        assert not root.exists()
        assert any("rests for 30 s after 3 failures" in line for line in said)
        clock.advance(config.rest_seconds)
        assert save(store, KEYS, ODD).failed == {}, "what is queued behind the probe waits for it"
        assert fetch(store, KEYS, ODD)[0] == {block: content(block, ODD) for block in KEYS}
        assert any(line.endswith("works again") for line in said)
        assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_directory_without_a_parent_stays_away(config: StoreConfig, tmp_path: Path, clock: SimulatedClock) -> None:
    root = tmp_path / "mount" / "root"
    root.mkdir(parents=True)
    with open_store(
        replace(config, directories=(str(root),), rest_seconds=0.0, failures_until_rest=1), NAMESPACE, ODD, clock=clock
    ) as store:
        shutil.rmtree(root.parent)
        for _ in range(3):
            assert isinstance(save(store, KEYS[:1], ODD).failed[KEYS[0]], StoreUnavailableError)
        assert not root.parent.exists()


def test_the_other_directories_go_on(tmp_path: Path, clock: SimulatedClock) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    config = StoreConfig(directories=tuple(map(str, roots)))
    keys = [key(number) for number in range(60)]
    with open_store(config, NAMESPACE, ODD, clock=clock) as store:
        save(store, keys, ODD)
        held = [sum(Path(Layout(str(root), NAMESPACE).block(block)).exists() for block in keys) for root in roots]
        assert sum(held) == len(keys)
        assert min(held) > 10
        shutil.rmtree(roots[0])
        roots[0].write_bytes(b"")
        assert store.lookup(keys).count(True) == held[1]
        loaded, failed = fetch(store, keys, ODD)
        assert len(loaded) == held[1]
        assert len(failed) == held[0]
        outcome = save(store, keys, ODD)
        assert len(outcome.done) == held[1]
        assert {type(error) for error in outcome.failed.values()} == {StoreUnavailableError}


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
    clock: SimulatedClock,
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with open_store(config, NAMESPACE, ODD, clock=clock) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", refuse)
            result = store.save([memory.transfer() for memory in filled(KEYS[:2], ODD)]).wait()
            assert {type(found) for found in result.failed.values()} == {error}
        assert store.stats()["posix"].failures == {f"save.{cause}": 2}
        assert save(store, KEYS, ODD).failed == {}
    assert len(files(config.directories[0])) == len(KEYS)


def test_the_first_cause_is_kept_through_a_rest(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    """For instance, a save refused by a full disk is counted as such, also while the directory rests."""

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with open_store(replace(config, save_threads=1), NAMESPACE, ODD, clock=clock) as store:
        number = errno.ENOSPC
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", refuse)
            assert {type(error) for error in save(store, KEYS[:8], ODD).failed.values()} == {StoreFullError}
            assert store.stats()["posix"].failures == {"save.full": 8}
            clock.advance(config.rest_seconds)
            number = errno.ESTALE
            assert {type(error) for error in save(store, KEYS[:8], ODD).failed.values()} == {StoreUnavailableError}
        clock.advance(config.rest_seconds)
        assert save(store, KEYS, ODD).failed == {}


def test_a_medium_that_fails_while_publishing(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "made up")

    with open_store(config, NAMESPACE, ODD, clock=clock) as store:
        save(store, KEYS[1:2], ODD)
        with monkeypatch.context() as patch:
            patch.setattr(posix_paths, "rename_new", refuse)
            assert isinstance(save(store, KEYS[:1], ODD).failed[KEYS[0]], StoreUnavailableError)
        assert store.stats()["posix"].failures == {"save.unavailable": 1}
        assert len(files(config.directories[0])) == 1


def test_a_medium_that_fails_while_reading_rests(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    calls = 0

    def refuse(*_: object) -> int:
        nonlocal calls
        calls += 1
        raise OSError(errno.ETIMEDOUT, "made up")

    with open_store(replace(config, load_threads=1), NAMESPACE, ODD, clock=clock) as store:
        save(store, KEYS, ODD)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refuse)
            assert len(fetch(store, KEYS, ODD)[1]) == len(KEYS)
            assert calls == config.failures_until_rest
        assert store.lookup(KEYS) == [False] * len(KEYS)
        clock.advance(config.rest_seconds)
        # The probe is the first load, not a lookup.
        assert store.lookup(KEYS) == [True] * len(KEYS)
        assert store.lookup_on_prefix(KEYS) == len(KEYS)
        assert fetch(store, KEYS[:1], ODD)[0] == {KEYS[0]: content(KEYS[0], ODD)}
        assert fetch(store, KEYS, ODD)[1] == {}
        assert store.stats()["posix"].quarantined_blocks == 0


def test_a_medium_that_says_that_a_block_is_gone_works_again(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ETIMEDOUT, "made up")

    with open_store(config, NAMESPACE, ODD, clock=clock) as store:
        save(store, KEYS, ODD)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refuse)
            fetch(store, KEYS, ODD)
        clock.advance(config.rest_seconds)
        assert isinstance(fetch(store, [key(99)], ODD)[1][key(99)], BlockMissingError)  # the probe
        assert store.lookup(KEYS) == [True] * len(KEYS)
        assert fetch(store, KEYS, ODD)[1] == {}


def test_short_transfers_are_continued(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    """A signal or a network file system may cause them."""
    pwritev, preadv = os.pwritev, os.preadv

    def some_written(descriptor: int, buffers: list[memoryview], *rest: int) -> int:
        return pwritev(descriptor, [memoryview(buffers[0]).cast("B")[:1000]], *rest)

    def some_read(descriptor: int, buffers: list[memoryview], *rest: int) -> int:
        return preadv(descriptor, [memoryview(buffers[0]).cast("B")[:1000]], *rest)

    monkeypatch.setattr(os, "pwritev", some_written)
    monkeypatch.setattr(os, "preadv", some_read)
    with open_store(config, NAMESPACE, ODD, clock=clock) as store:
        save(store, KEYS, ODD)
        assert fetch(store, KEYS, ODD)[0] == {block: content(block, ODD) for block in KEYS}


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINTR, None])
def test_claiming_space_is_left_where_it_cannot_be(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, number: int | None, clock: SimulatedClock
) -> None:
    calls = 0

    def refuse(*_: int) -> int:
        nonlocal calls
        calls += 1
        ctypes.set_errno(number or 0)
        return -1

    monkeypatch.setattr(posix_files, "system_call", lambda *_: refuse if number else None)
    large = BlockGeometry((posix_files.CLAIM_FROM,), bytes(16))
    with open_store(replace(config, save_threads=1), NAMESPACE, large, clock=clock) as store:
        assert save(store, KEYS[:3], large).failed == {}
        assert fetch(store, KEYS[:3], large)[0] == {block: content(block, large) for block in KEYS[:3]}
    assert calls == {errno.EOPNOTSUPP: 1, errno.EINTR: 3, None: 0}[number]


def test_a_block_for_which_no_space_can_be_claimed(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    def refuse(*_: int) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(posix_files, "system_call", lambda *_: refuse)
    large = BlockGeometry((posix_files.CLAIM_FROM,), bytes(16))
    with open_store(config, NAMESPACE, large, clock=clock) as store:
        assert isinstance(save(store, KEYS[:1], large).failed[KEYS[0]], StoreFullError)
        assert files(config.directories[0]) == []
