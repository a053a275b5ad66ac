"""A process's index of block names, and how it learns of removals."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm.store.base import StoreUnavailableError
from ucm.store.factory import open_store
from ucm.store.posix import index as posix_index
from ucm.store.posix.index import Position, evict, log_removals, read_removals, scan
from ucm.store.posix.layout import Layout
from ucm.store.posix.tier import PosixTier
from ucm.store.tiered import TieredStore
from ucm.testing.blocks import ODD, fetch, key, save

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.store.base import BlockKey, KVStore
    from ucm.store.config import StoreConfig
    from ucm.store.posix.index import NameIndex
    from ucm.testing.clock import SimulatedClock

NAMESPACE = "n"
KEYS = [key(number) for number in range(40)]


@pytest.fixture
def layout(config: StoreConfig) -> Layout:
    found = Layout(config.directories[0], NAMESPACE)
    found.make()
    return found


@pytest.fixture
def store(config: StoreConfig, clock: SimulatedClock) -> Iterator[KVStore]:
    with open_store(config, NAMESPACE, ODD, clock=clock) as opened:
        save(opened, KEYS[:30], ODD)
        learn(clock, opened)
        yield opened


def indexes_of(store: KVStore) -> list[NameIndex]:
    assert isinstance(store, TieredStore)
    tier = store._tiers[0]
    assert isinstance(tier, PosixTier)
    return [directory.index for directory in tier._directories]


def index_of(store: KVStore) -> NameIndex:
    [found] = indexes_of(store)
    return found


def learn(clock: SimulatedClock, store: KVStore) -> None:
    """Make the store list the block names."""
    for index in indexes_of(store):
        index.tested(posix_index.WORTH)
    wait_until_listed(clock, store)


def wait_until_listed(clock: SimulatedClock, store: KVStore) -> None:
    clock.run_until(lambda: posix_index.INDEX_THREAD not in clock.alive)
    assert all(index._names is not None for index in indexes_of(store))


def watch_tests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the directory entries that are checked from now on."""
    access = os.access
    made: list[str] = []

    def counted(path: str, mode: int, **options: Any) -> bool:
        made.append(path)
        return access(path, mode, **options)

    monkeypatch.setattr(os, "access", counted)
    return made


def test_what_is_known_is_not_asked_for(store: KVStore, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    made = watch_tests(monkeypatch)
    assert store.lookup(KEYS) == [True] * 30 + [False] * 10
    assert store.lookup_on_prefix(KEYS) == 30
    assert sorted(set(made)) == sorted(layout.block(block) for block in KEYS[30:])


def test_the_names_are_listed_after_many_questions(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    monkeypatch.setattr(posix_index, "WORTH", 100)
    with (
        open_store(config, NAMESPACE, ODD, clock=clock) as writer,
        open_store(config, NAMESPACE, None, clock=clock) as finder,
    ):
        save(writer, KEYS[:30], ODD)
        finder.lookup(KEYS)
        finder.lookup(KEYS)
        assert index_of(finder)._names is None
        finder.lookup_on_prefix(KEYS)
        wait_until_listed(clock, finder)
        made = watch_tests(monkeypatch)
        assert finder.lookup(KEYS[:30]) == [True] * 30
        assert made == []


def test_others_blocks_are_found_and_then_known(
    store: KVStore, config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    with open_store(config, NAMESPACE, ODD, clock=clock) as other:
        save(other, KEYS[30:35], ODD)
    save(store, KEYS[35:], ODD)
    made = watch_tests(monkeypatch)
    assert store.lookup(KEYS) == [True] * 40
    assert len(made) == 5
    assert store.lookup(KEYS) == [True] * 40
    assert store.lookup_on_prefix(KEYS) == 40
    assert len(made) == 5


def test_what_another_evicts_is_forgotten(store: KVStore, layout: Layout) -> None:
    for age, block in enumerate(KEYS[:30]):
        os.utime(layout.block(block), (1000 + age, 1000 + age))
    nbytes = scan(layout.root).nbytes
    evict(layout.root, scan(layout.root), nbytes / 3, lambda _: None)
    assert store.lookup(KEYS) == [False] * 10 + [True] * 20 + [False] * 10
    assert store.lookup_on_prefix(KEYS) == 0
    save(store, KEYS[:5], ODD)
    assert store.lookup(KEYS) == [True] * 5 + [False] * 5 + [True] * 20 + [False] * 10


def test_what_another_quarantines_is_forgotten(
    store: KVStore, config: StoreConfig, layout: Layout, clock: SimulatedClock
) -> None:
    path = Path(layout.block(KEYS[3]))
    path.write_bytes(path.read_bytes()[:-1])
    with open_store(config, NAMESPACE, ODD, clock=clock) as other:
        assert KEYS[3] in fetch(other, KEYS[:5], ODD)[1]
    assert store.lookup(KEYS[:5]) == [True, True, True, False, True]


def test_what_somebody_deleted_is_found_out_by_loading(store: KVStore, layout: Layout) -> None:
    Path(layout.block(KEYS[3])).unlink()
    assert store.lookup(KEYS[:5]) == [True] * 5
    assert KEYS[3] in fetch(store, KEYS[:5], ODD)[1]
    assert store.lookup(KEYS[:5]) == [True, True, True, False, True]
    save(store, KEYS[3:4], ODD)
    assert store.lookup(KEYS[:5]) == [True] * 5


def test_or_when_the_names_are_listed_again(store: KVStore, layout: Layout, clock: SimulatedClock) -> None:
    Path(layout.block(KEYS[3])).unlink()
    save(store, KEYS[30:31], ODD)
    clock.advance(posix_index._LISTED_SECONDS + 1)
    store.lookup(KEYS[:1])
    wait_until_listed(clock, store)
    assert store.lookup(KEYS) == [index != 3 and index <= 30 for index in range(40)]


def test_a_directory_that_vanished_is_forgotten(store: KVStore, layout: Layout) -> None:
    shutil.rmtree(layout.base)
    assert store.lookup(KEYS) == [False] * 40
    assert index_of(store)._names is None


def test_a_deleted_or_new_log_begins_anew(
    store: KVStore, layout: Layout, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    log_removals(layout, [KEYS[0]])
    store.lookup(KEYS)
    Path(posix_index.removals_path(layout)).unlink()
    assert store.lookup(KEYS) == [True] * 30 + [False] * 10  # by checking files, as the next line shows
    assert index_of(store)._names is None
    learn(clock, store)
    monkeypatch.setattr(posix_index, "_LONGEST", 10)
    log_removals(layout, [KEYS[1], KEYS[2]])
    assert store.lookup(KEYS) == [True] * 30 + [False] * 10
    assert index_of(store)._names is None


def test_a_resting_directory_has_nothing(store: KVStore, config: StoreConfig) -> None:
    assert isinstance(store, TieredStore)
    tier = store._tiers[0]
    assert isinstance(tier, PosixTier)
    for _ in range(config.failures_until_rest):
        tier._directories[0].reads.failed(StoreUnavailableError("made up"))
    assert store.lookup(KEYS) == [False] * 40


def test_much_that_is_new_is_merged(store: KVStore, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix_index, "_APART", 3)
    save(store, KEYS[30:], ODD)
    index = index_of(store)
    assert len(index._added) <= 3
    assert index._names is not None
    assert index._names.size >= 36
    for block in KEYS[:10]:
        Path(layout.block(block)).unlink()
    fetch(store, KEYS[:10], ODD)
    assert len(index._dropped) <= 3
    assert store.lookup(KEYS) == [False] * 10 + [True] * 30
    evict(layout.root, scan(layout.root), 1e12, lambda _: None)
    assert store.lookup(KEYS) == [False] * 40


def test_files_that_are_no_blocks_do_not_hide_those_that_are(
    store: KVStore, layout: Layout, clock: SimulatedClock
) -> None:
    for name in ("x", "0" * 13, "zz" * 31):
        Path(layout.block(KEYS[0])).with_name(name).write_bytes(b"")
    index_of(store).forget()
    learn(clock, store)
    assert index_of(store).known(KEYS) == [True] * 30 + [False] * 10


def test_several_directories(tmp_path: Path, config: StoreConfig, clock: SimulatedClock) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    several = replace(config, directories=tuple(map(str, roots)))
    with open_store(several, NAMESPACE, ODD, clock=clock) as store:
        save(store, KEYS, ODD)
        learn(clock, store)
        known = [index.known(KEYS) or [] for index in indexes_of(store)]
        assert [sum(of_key) for of_key in zip(*known, strict=True)] == [1] * 40
        evict(str(roots[0]), scan(str(roots[0])), 1e12, lambda _: None)
        expected = [Path(Layout(str(roots[1]), NAMESPACE).block(block)).exists() for block in KEYS]
        assert store.lookup(KEYS) == expected
        assert 0 < sum(expected) < 40


def test_an_empty_store_can_be_listed(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, ODD, clock=clock) as store:
        save(store, KEYS[:1], ODD)
        Path(Layout(config.directories[0], NAMESPACE).block(KEYS[0])).unlink()
        learn(clock, store)
        assert index_of(store).known(KEYS) == [False] * 40
        save(store, KEYS[:2], ODD)
        assert store.lookup(KEYS) == [True] * 2 + [False] * 38


@settings(max_examples=50, deadline=None)
@given(batches=st.lists(st.lists(st.sampled_from(KEYS), max_size=5), max_size=8), data=st.data())
def test_readers_learn_every_removal_once(batches: list[list[BlockKey]], data: st.DataObject) -> None:

    with tempfile.TemporaryDirectory() as directory:
        layout = Layout(directory, NAMESPACE)
        layout.make()
        first = read_removals(layout, None)[0]
        assert first == Position()
        log_removals(layout, [])
        assert read_removals(layout, first)[1] is None  # unknown whether it is the first log ever
        position, _ = read_removals(layout, None)
        seen: list[bytes] = []
        for batch in batches:
            log_removals(layout, batch)
            if data.draw(st.booleans()):
                position, removed = read_removals(layout, position)
                assert removed is not None
                seen += [prefix.tobytes() for prefix in removed]
        position, removed = read_removals(layout, position)
        assert removed is not None
        seen += [prefix.tobytes() for prefix in removed]
        assert seen == [block[:8] for batch in batches for block in batch]
        assert read_removals(layout, position)[0] == position
        assert read_removals(layout, None)[0] == position


def test_a_log_that_cannot_be_written_harms_nobody(layout: Layout) -> None:
    shutil.rmtree(layout.base)
    log_removals(layout, KEYS)
    with pytest.raises(FileNotFoundError):
        read_removals(layout, None)


def test_half_a_record_waits_for_its_other_half(layout: Layout) -> None:
    log_removals(layout, KEYS[:1])
    position, _ = read_removals(layout, None)
    with Path(posix_index.removals_path(layout)).open("ab") as log:
        log.write(KEYS[1][:5])
    position, removed = read_removals(layout, position)
    assert removed is not None
    assert removed.size == 0
    with Path(posix_index.removals_path(layout)).open("ab") as log:
        log.write(KEYS[1][5:8])
    _, removed = read_removals(layout, position)
    assert removed is not None
    assert removed.tolist() == np.frombuffer(KEYS[1][:8], dtype=np.uint64).tolist()
