"""The capacity of a store, and the eviction of blocks above it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.simulated import begin_span
from tests.ucm.store.evicting import evict_unpinned
from ucm.clock import SYSTEM
from ucm.store.factory import open_store
from ucm.store.format import HeaderCodec
from ucm.store.posix import scan as posix_scan
from ucm.store.posix import space
from ucm.store.posix.layout import Layout, owner_name
from ucm.store.posix.scan import SAMPLE_BLOCKS, Scan, scan
from ucm.store.tier import used_until
from ucm.testing.blocks import EVEN, content, fetch, key, save

if TYPE_CHECKING:
    from tests.clock import SimulatedClock
    from ucm.clock import Clock
    from ucm.store.base import BlockKey, KVStore
    from ucm.store.config import StoreConfig

NAMESPACE = "n"
FILE = HeaderCodec(NAMESPACE, EVEN).file_nbytes
KEYS = [key(number) for number in range(40)]


def age(layout: Layout, keys: list[bytes], first: float = 1_000_000_000.0) -> None:
    """Set the blocks' last use one second apart."""
    for number, block in enumerate(keys):
        os.utime(layout.block(block), (first + number, first + number))  # type: ignore[arg-type]


@pytest.fixture
def layout(config: StoreConfig) -> Layout:
    return Layout(config.directories[0], NAMESPACE)


@pytest.fixture
def full(config: StoreConfig, layout: Layout, clock: SimulatedClock) -> StoreConfig:
    """A root with 40 blocks, of which the first is the least recently used."""
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS, EVEN)
    age(layout, list(KEYS))
    return config


def saved(clock: SimulatedClock, store: KVStore, keys: list[BlockKey]) -> None:
    """Save blocks; repeat those that were dropped because the evictor lagged behind."""
    clock.run_until(lambda: not save(store, keys, EVEN).failed)


def there(store: KVStore) -> list[int]:
    return [number for number, found in enumerate(store.lookup(KEYS)) if found]


def test_a_small_root_is_known_exactly(full: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(full, "other", EVEN, clock=clock) as store:
        save(store, KEYS[:3], EVEN)
    found = scan(full.directories[0])
    assert found.exact
    assert found.blocks == 43
    assert found.nbytes == 43 * FILE


def test_a_large_root_is_known_about(full: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(full.directories[0], "large")
    layout.make()
    chance = np.random.default_rng(7)
    for bucket in range(64):
        Path(layout.base, f"{bucket:02x}").mkdir()
        for _ in range(30 + int(chance.integers(11))):
            name = chance.bytes(31).hex()
            path = Path(layout.base, f"{bucket:02x}", name)
            path.write_bytes(b"x" * 100)
            used = 1e9 + float(chance.integers(1_000_000))
            os.utime(path, (used, used))
    monkeypatch.setattr(posix_scan, "_LEAST_SAMPLE", 400)
    found = scan(full.directories[0], sample_blocks=800)
    blocks = list(Path(layout.base).glob("??/*"))
    assert not found.exact
    assert found.blocks == pytest.approx(len(blocks) + len(KEYS), rel=0.15)

    before = {path: path.stat().st_mtime for path in blocks}
    count, freed = evict_unpinned(full.directories[0], found, 0.25 * 100 * len(blocks), lambda _: None)
    gone = [used for path, used in before.items() if not path.exists()]
    assert len(gone) == count - sum(not Path(Layout(full.directories[0], NAMESPACE).block(k)).exists() for k in KEYS)
    assert freed >= 0.2 * 100 * len(blocks)
    assert not [used for used in gone if used > 1e9 + 400_000]


def test_the_least_recently_used_go_first(full: StoreConfig, layout: Layout) -> None:
    os.utime(layout.block(KEYS[0]), (2e9, 2e9))
    gone: list[str] = []
    assert evict_unpinned(full.directories[0], scan(full.directories[0]), 10 * FILE - 1, gone.append) == (10, 10 * FILE)
    assert gone == [layout.block(block) for block in KEYS[1:11]]


def test_what_is_used_after_a_scan_stays(full: StoreConfig, layout: Layout) -> None:
    found = scan(full.directories[0])
    os.utime(layout.block(KEYS[0]))
    gone: list[str] = []
    for count in (3, 7):  # one scan suffices for both
        assert evict_unpinned(full.directories[0], found, count * FILE, gone.append) == (count, count * FILE)
    assert gone == [layout.block(block) for block in KEYS[1:11]]


def test_several_evictors_delete_no_more_than_one(full: StoreConfig) -> None:
    """Each rank has one, and all see the same excess at the same time."""
    root = full.directories[0]
    found = scan(root)
    gone: list[str] = []
    barrier = Barrier(4)

    def evict_together(_: int) -> tuple[int, int]:
        barrier.wait()
        return evict_unpinned(root, replace(found, files=[*found.files]), 10 * FILE, gone.append)

    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(evict_together, range(4)))
    assert sum(count for count, _ in outcomes) == len(gone) == 10
    assert {nbytes for _, nbytes in outcomes} == {10 * FILE}
    assert scan(root).blocks == 30


@pytest.mark.usefixtures("full")
def test_what_cannot_be_deleted_counts_for_nothing(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        if layout.block(KEYS[0]).endswith(path):
            raise PermissionError(path)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    gone: list[str] = []
    assert evict_unpinned(layout.root, scan(layout.root), 2 * FILE, gone.append) == (2, 2 * FILE)
    assert gone == [layout.block(block) for block in KEYS[1:3]]


def test_strangers_files_are_left_alone(full: StoreConfig, layout: Layout) -> None:
    root = Path(full.directories[0])
    strangers = [root / "ab" / ("c" * 38), root / "objects" / "ab" / ("c" * 38), root / "README", root / "n" / "notes"]
    strangers.append(Path(layout.block(KEYS[0])).with_name(".nfs00000000000001"))
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine", encoding="utf-8")
        os.utime(path, (1, 1))
    found = scan(str(root))
    assert found.blocks == 40
    evict_unpinned(str(root), found, 100 * FILE, lambda _: None)
    assert [path.read_text(encoding="utf-8") for path in strangers] == ["mine"] * 5
    assert not any(Path(layout.block(block)).exists() for block in KEYS)


@pytest.mark.parametrize(("seconds", "kept"), [(0.0, 18), (0.01, 17)], ids=["fast", "slow"])
def test_above_the_capacity_the_oldest_go(
    full: StoreConfig, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch, seconds: float, kept: int
) -> None:
    """Down to 95 % of the room that is left beside the new block.

    A writer that finds no room asks for it at each attempt. If deleting takes longer than that, a request arrives while
    the evictor answers the first one, and costs a block more.
    """
    unlink = os.unlink

    def slowly(path: str, *, dir_fd: int | None = None) -> None:
        clock.sleep(seconds)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", slowly)
    limited = replace(full, posix_capacity_bytes=20 * FILE)
    with open_store(limited, NAMESPACE, EVEN, clock=clock) as store:
        saved(clock, store, [key(100)])
        clock.advance(5)
        assert there(store) == list(range(40))[-kept:]
        assert store.lookup([key(100)]) == [True]
        stats = store.stats()["posix"]
        assert (stats.evicted_blocks, stats.capacity_bytes) == (40 - kept, 20 * FILE)
        assert stats.used_bytes == (kept + 1) * FILE


def test_each_directory_has_an_equal_share(tmp_path: Path, config: StoreConfig, clock: SimulatedClock) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    two = replace(config, directories=tuple(map(str, roots)), posix_capacity_bytes=20 * FILE)
    with open_store(two, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS, EVEN)
        clock.run_until(lambda: all(scan(str(root)).nbytes <= 10 * FILE for root in roots))


def test_other_models_blocks_count_and_go(full: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(replace(full, posix_capacity_bytes=20 * FILE), "newer/model", EVEN, clock=clock) as store:
        new = [key(200 + number) for number in range(15)]
        saved(clock, store, new)
        clock.run_until(lambda: scan(full.directories[0]).nbytes <= 20 * FILE)
        assert store.lookup(new) == [True] * 15


def test_a_load_renews_a_block(full: StoreConfig, layout: Layout, clock: SimulatedClock) -> None:
    span = 3600.0
    begin_span(clock, span)
    until = used_until(clock.time(), span, 0) / 1e9
    with open_store(replace(full, touch_seconds=span), NAMESPACE, EVEN, clock=clock) as store:
        fetch(store, KEYS[:2], EVEN)
        # What was used in the same span already is left alone.
        os.utime(layout.block(KEYS[2]), (until, until))
        begun = Path(layout.block(KEYS[2])).stat().st_ctime_ns
        fetch(store, KEYS[2:3], EVEN)
    assert [Path(layout.block(block)).stat().st_mtime for block in KEYS[:3]] == [until] * 3
    assert Path(layout.block(KEYS[2])).stat().st_ctime_ns == begun
    os.utime(layout.block(KEYS[2]), (1, 1))
    assert evict_unpinned(layout.root, scan(layout.root), 2 * FILE, lambda _: None)[0] == 2
    with open_store(full, NAMESPACE, EVEN, clock=clock) as store:
        assert there(store) == [0, 1, *range(4, 40)]


@pytest.mark.parametrize("clock", range(5), indirect=True, ids="order {}".format)
def test_what_is_being_used_survives_a_storm(config: StoreConfig, clock: SimulatedClock) -> None:
    """With several writers above the capacity, a reader loads only correct blocks."""
    limited = replace(config, posix_capacity_bytes=10 * FILE)
    with (
        open_store(limited, NAMESPACE, EVEN, clock=clock) as one,
        open_store(limited, NAMESPACE, EVEN, clock=clock) as two,
    ):
        for round_number in range(10):
            for store in (one, two):
                save(store, KEYS[round_number : round_number + 20], EVEN)
            for block, data in fetch(one, KEYS, EVEN)[0].items():
                assert data == content(block, EVEN)
        clock.run_until(lambda: scan(config.directories[0]).nbytes <= 10 * FILE)
        assert set(one.stats()["posix"].failures) <= {"load.missing", "save.full"}


@pytest.mark.parametrize("blocks", [1.5, 2.5, 5.9])  # with room for 1, the evictor may delete the block just saved
def test_a_root_of_a_few_blocks_takes_the_next(config: StoreConfig, blocks: float, clock: SimulatedClock) -> None:
    """It may be full far below 98 % of its capacity, above which the evictor makes room by itself."""
    capacity = int(blocks * -(-FILE // 4096) * 4096)
    with open_store(replace(config, posix_capacity_bytes=capacity), NAMESPACE, EVEN, clock=clock) as store:
        for number, block in enumerate(KEYS[:8]):
            saved(clock, store, [block])
            assert number in there(store)
            assert (store.stats()["posix"].used_bytes or 0) <= capacity


def test_a_root_in_which_nothing_may_go_is_not_scanned_all_the_time(
    config: StoreConfig, layout: Layout, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where unfinished files, or blocks of running requests, fill it: writers ask for room again and again."""
    scans: list[str] = []

    def count(root: str, sample_blocks: int = SAMPLE_BLOCKS, *, clock: Clock = SYSTEM) -> Scan:
        scans.append(root)
        return scan(root, sample_blocks, clock=clock)

    monkeypatch.setattr(space, "scan", count)
    with open_store(replace(config, posix_capacity_bytes=1 << 20), NAMESPACE, EVEN, clock=clock) as store:
        saved(clock, store, [key(0)])
        unfinished = Path(layout.temporary, owner_name())
        unfinished.write_bytes(bytes(1 << 20))
        clock.advance(700.0)
        scans.clear()
        for number in range(1, 11):
            assert save(store, [key(number)], EVEN).failed
            clock.advance(1.0)
        assert 5 <= len(scans) <= 20
        unfinished.unlink()
        clock.advance(2.0)
        saved(clock, store, [key(20)])
