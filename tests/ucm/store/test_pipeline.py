"""Memory in front of files: writes go to memory and on to files, reads to the first tier with the block."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

from ucm.store.base import BlockCorruptError, BlockMissingError, StoreUnavailableError
from ucm.store.factory import open_store
from ucm.store.memory.segment import delete_blocks, segments
from ucm.store.posix.layout import Layout
from ucm.store.posix.tier import PosixTier
from ucm.store.tiered import TieredStore
from ucm.testing.blocks import EVEN, content, fetch, filled, key, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.clock import SimulatedClock
    from ucm.store.base import BlockKey, KVStore
    from ucm.store.config import StoreConfig

NAMESPACE = "n"
KEYS = [key(number) for number in range(6)]
ALL = {block: content(block, EVEN) for block in KEYS}


@pytest.fixture
def both(config: StoreConfig, memory: str) -> StoreConfig:
    return replace(
        config, pipeline="Cache|Posix", dram_directory=memory, dram_capacity_bytes=64 << 20, rest_seconds=0.0
    )


@pytest.fixture
def store(both: StoreConfig, clock: SimulatedClock) -> Iterator[KVStore]:
    with open_store(both, NAMESPACE, EVEN, clock=clock) as opened:
        save(opened, KEYS, EVEN)
        assert opened.flush(60)
        yield opened


@pytest.fixture
def cached(both: StoreConfig, store: KVStore) -> Layout:
    del store
    return Layout(both.dram_directory, NAMESPACE)


@pytest.fixture
def kept(both: StoreConfig, store: KVStore) -> Layout:
    del store
    return Layout(both.directories[0], NAMESPACE)


@pytest.mark.parametrize("refused", ["ucm-behind", "ucm-evictor"])
def test_a_thread_that_the_system_refuses_is_started_by_the_next_use(
    both: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock, refused: str
) -> None:
    made, refuses = clock.thread, create_autospec(threading.Thread, instance=True)
    refuses.start.side_effect = RuntimeError("can't start new thread")

    def make(target: Callable[[], object], name: str) -> Any:
        return refuses if name == refused else made(target, name)

    with open_store(both, NAMESPACE, EVEN, clock=clock) as store:
        with monkeypatch.context() as patch:
            patch.setattr(clock, "thread", make)
            assert save(store, KEYS[:1], EVEN).failed == {}
            assert store.flush(1) == (refused == "ucm-evictor")
        assert save(store, KEYS[1:], EVEN).failed == {}
        assert store.flush(60)
        assert store.stats()["posix"].saved_blocks == len(KEYS)
    assert refuses.start.called


def served_by(store: KVStore, keys: list[BlockKey]) -> set[str]:
    memories = filled(keys, EVEN)
    return set(store.load([memory.transfer() for memory in memories]).wait().done.values())


def empty(layout: Layout) -> None:
    delete_blocks(layout, KEYS)
    for block in KEYS:
        Path(layout.block(block)).unlink(missing_ok=True)


def blocks_in(layout: Layout) -> list[BlockKey]:
    """The keys of a namespace's blocks in memory."""
    return [block for segment in segments(layout) for block, _ in segment.blocks()]


def damage(layout: Layout, block: BlockKey) -> None:
    """Change the last byte of a block in memory."""
    for segment in segments(layout):
        for found, number in segment.blocks():
            if found == block:
                segment.slot(number)[len(segment.file_of(number, block)[0]) - 1] ^= 1


def wait_for(clock: SimulatedClock, layout: Layout, keys: list[BlockKey]) -> None:
    clock.run_until(lambda: set(keys) <= set(blocks_in(layout)))


def test_both_tiers_have_it(store: KVStore, cached: Layout, kept: Layout) -> None:
    assert sorted(blocks_in(cached)) == sorted(KEYS)
    assert all(Path(kept.block(block)).exists() for block in KEYS)
    for segment in segments(cached):
        for block, number in segment.blocks():
            assert segment.file_of(number, block)[0] == Path(kept.block(block)).read_bytes()
    assert served_by(store, KEYS) == {"dram"}
    assert list(store.stats()) == ["dram", "posix"]


def spoil(root: Path) -> None:
    """Replace a directory by a file; unlike a missing directory, it cannot be created again."""
    shutil.rmtree(root)
    root.write_bytes(b"")


@pytest.mark.parametrize("clock", range(5), indirect=True, ids="order {}".format)
def test_what_the_cache_lost_comes_from_files_and_returns(
    store: KVStore, cached: Layout, clock: SimulatedClock
) -> None:
    empty(cached)
    assert store.lookup(KEYS) == [True] * 6
    assert store.lookup_on_prefix(KEYS) == 6
    assert served_by(store, KEYS) == {"posix"}
    wait_for(clock, cached, KEYS)
    assert served_by(store, KEYS) == {"dram"}
    assert fetch(store, KEYS, EVEN)[0] == ALL
    # A cache that lacks a block has not failed.
    assert store.stats()["dram"].failures == {}


def test_what_another_engine_has_copied_meanwhile_is_not_written_again(store: KVStore, clock: SimulatedClock) -> None:
    assert isinstance(store, TieredStore)
    before = store.stats()["dram"].saved_blocks
    store._promote(filled(KEYS[:1], EVEN)[0].transfer())
    clock.advance(1.0)
    assert store.stats()["dram"].saved_blocks == before
    assert not store._promoting


def test_a_prefix_across_the_tiers(store: KVStore, cached: Layout, kept: Layout) -> None:
    delete_blocks(cached, [KEYS[index] for index in (1, 2, 4)])
    for index in (0, 3):
        Path(kept.block(KEYS[index])).unlink()
    assert store.lookup_on_prefix(KEYS) == 6
    Path(kept.block(KEYS[4])).unlink()
    assert store.lookup_on_prefix(KEYS) == 4
    assert store.lookup(KEYS) == [True, True, True, True, False, True]


def test_a_damaged_copy_in_the_cache_is_replaced(store: KVStore, cached: Layout, clock: SimulatedClock) -> None:
    damage(cached, KEYS[0])
    assert served_by(store, KEYS[:1]) == {"posix"}
    assert store.stats()["dram"].failures == {"load.corrupt": 1}
    wait_for(clock, cached, KEYS[:1])
    assert fetch(store, KEYS, EVEN)[0] == ALL


def test_damage_below_is_never_promoted(store: KVStore, cached: Layout, kept: Layout, clock: SimulatedClock) -> None:
    empty(cached)
    path = Path(kept.block(KEYS[0]))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    store.load([memory.transfer() for memory in filled(KEYS, EVEN)]).wait()
    wait_for(clock, cached, KEYS[1:])
    clock.advance(1.0)
    assert KEYS[0] not in blocks_in(cached)
    assert not path.exists()
    assert isinstance(fetch(store, KEYS[:1], EVEN)[1][KEYS[0]], BlockMissingError)


def test_a_block_that_was_loaded_in_part_is_not_promoted(store: KVStore, cached: Layout, clock: SimulatedClock) -> None:
    empty(cached)
    store.load([memory.transfer(0, 1) for memory in filled(KEYS, EVEN)]).wait()
    clock.advance(1.0)
    assert blocks_in(cached) == []


def test_damage_in_both(store: KVStore, cached: Layout, kept: Layout) -> None:
    damage(cached, KEYS[0])
    path = Path(kept.block(KEYS[0]))
    path.write_bytes(path.read_bytes()[:-1])
    assert isinstance(fetch(store, KEYS[:1], EVEN)[1][KEYS[0]], BlockCorruptError)
    assert store.lookup(KEYS[:1]) == [False]


@pytest.mark.parametrize(("lost", "left"), [("dram", "posix"), ("posix", "dram")])
def test_one_tier_takes_what_the_other_cannot(both: StoreConfig, lost: str, left: str, clock: SimulatedClock) -> None:
    root = Path(both.dram_directory if lost == "dram" else both.directories[0])
    with open_store(replace(both, rest_seconds=3600.0), NAMESPACE, EVEN, clock=clock) as store:
        spoil(root)
        outcome = save(store, KEYS, EVEN)
        assert set(outcome.done) == set(KEYS)
        assert set(outcome.done.values()) == {left}
        assert served_by(store, KEYS) == {left}
        # A write-behind waits for the end of the rest; a save that no other tier accepts fails at once.
        failures = 3 if lost == "posix" else 6
        clock.run_until(lambda: store.stats()[lost].failures.get("save.unavailable") == failures)
        assert set(store.stats()[lost].failures) <= {"save.unavailable", "load.unavailable", "promote.unavailable"}
        assert store.stats()[left].failures == {}


def test_none_takes_it(both: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(both, NAMESPACE, EVEN, clock=clock) as store:
        spoil(Path(both.dram_directory))
        spoil(Path(both.directories[0]))
        outcome = save(store, KEYS[:1], EVEN)
        assert isinstance(outcome.failed[KEYS[0]], StoreUnavailableError)


def test_what_is_read_from_the_cache_counts_as_used_below(
    both: StoreConfig, store: KVStore, kept: Layout, clock: SimulatedClock
) -> None:
    del store
    for block in KEYS:
        os.utime(kept.block(block), (1000, 1000))
    with open_store(both, NAMESPACE, EVEN, clock=clock) as other:
        assert served_by(other, KEYS[:3]) == {"dram"}
    assert [os.stat(kept.block(block)).st_mtime > 1000 for block in KEYS] == [True] * 3 + [False] * 3  # noqa: PTH116


def test_a_block_that_the_lower_tier_has_is_written_to_the_cache(store: KVStore, cached: Layout) -> None:
    empty(cached)
    assert set(save(store, KEYS, EVEN).done.values()) == {"dram"}
    assert sorted(blocks_in(cached)) == sorted(KEYS)


def test_a_block_that_one_tier_has_is_written_to_the_other(store: KVStore, kept: Layout) -> None:
    empty(kept)
    assert set(save(store, KEYS, EVEN).done.values()) == {"dram"}
    assert store.flush(60)
    assert all(Path(kept.block(block)).exists() for block in KEYS)
    assert store.stats()["dram"].saved_blocks == 6
    assert store.stats()["posix"].saved_blocks == 12


def test_a_lookup_without_an_answer_ends_no_thread(
    both: StoreConfig, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, contains = [None], PosixTier.contains

    def once(self: PosixTier, keys: Sequence[BlockKey], deadline: float) -> Any:
        return answers.pop() if answers else contains(self, keys, deadline)

    monkeypatch.setattr(PosixTier, "contains", once)
    with open_store(both, NAMESPACE, EVEN, clock=clock) as store:
        for block in KEYS[:2]:
            assert save(store, [block], EVEN).failed == {}
            assert store.flush(60)
        assert store.stats()["posix"].failures == {"lookup.other": 1}


def test_a_block_that_cannot_be_read_for_a_lower_tier_is_counted_by_its_cause(
    store: KVStore, cached: Layout, kept: Layout
) -> None:
    empty(kept)
    damage(cached, KEYS[0])
    save(store, KEYS[:1], EVEN)
    assert store.flush(60)
    assert store.stats()["posix"].failures == {"save.corrupt": 1}
