"""The memory tier: segments that several engines share, are recycled, and never hold more than they may."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.store.config import StoreConfig
from ucm.store.errors import BlockCorruptError, BlockForeignError, BlockMissingError, StoreFullError
from ucm.store.factory import open_store
from ucm.store.posix.layout import PRIVATE, Layout, owner_name
from ucm.store.segment import Segment, delete_blocks, directory_of, remove_empty, segments
from ucm.testing.blocks import EVEN, ODD, content, fetch, filled, key, save

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockKey, KVStore

NAMESPACE = "n"
KEYS = [key(number) for number in range(60)]
MIB = 1 << 20
#: Room for 20 blocks of 132 KiB, in segments of one.
CAPACITY = 20 * (136 << 10)


@pytest.fixture
def config(memory: str) -> StoreConfig:
    found = StoreConfig(pipeline="Dram", dram_directory=memory, dram_capacity_bytes=CAPACITY)
    return replace(found, save_nice=0, rest_seconds=0.0)


def held(config: StoreConfig) -> int:
    """The bytes that the tier takes in the file system, apart from its directories."""
    return sum(path.stat().st_blocks * 512 for path in Path(config.dram_directory).rglob("*") if path.is_file())


def right(keys: Sequence[BlockKey]) -> dict[BlockKey, bytes]:
    return {block: content(block, EVEN) for block in keys}


def there(store: KVStore, keys: Sequence[BlockKey]) -> list[BlockKey]:
    return [block for block, found in zip(keys, store.lookup(keys), strict=True) if found]


def layout_of(config: StoreConfig, namespace: str = NAMESPACE) -> Layout:
    return Layout(config.dram_directory, namespace)


def test_it_never_holds_more_than_it_may(config: StoreConfig) -> None:
    with open_store(config, NAMESPACE, EVEN) as store, open_store(config, "m", EVEN) as other:
        for number in range(0, 60, 4):
            one, two = KEYS[number : number + 4], KEYS[number : number + 2]
            assert save(store, one, EVEN).failed == save(other, two, EVEN).failed == {}
            assert held(config) <= CAPACITY + 8192  # the files that say what a namespace is
        left, lefts = there(store, KEYS), there(other, KEYS)
        assert 15 <= len(left) + len(lefts) <= 20
        assert KEYS[-1] in left
        assert KEYS[0] not in left
        assert fetch(store, left, EVEN) == (right(left), {})
        assert fetch(other, lefts, EVEN) == (right(lefts), {})
        stats = [one.stats()["dram"] for one in (store, other)]
        assert sum(one.evicted_blocks for one in stats) == 90 - len(left) - len(lefts)
        assert all(one.used_bytes is not None and one.used_bytes <= CAPACITY for one in stats)


def test_the_least_recently_used_goes_and_its_memory_serves_again(config: StoreConfig) -> None:
    with open_store(config, NAMESPACE, EVEN) as store:
        save(store, KEYS[:20], EVEN)
        kept = there(store, KEYS[:20])
        inodes = {path.stat().st_ino for path in Path(directory_of(layout_of(config))).iterdir()}
        assert fetch(store, kept[:2], EVEN)[1] == {}
        save(store, KEYS[20:30], EVEN)
        assert {path.stat().st_ino for path in Path(directory_of(layout_of(config))).iterdir()} == inodes
        assert set(kept[:2]) <= set(there(store, kept))
        assert kept[2] not in there(store, kept)


def test_a_reader_elsewhere_misses_what_was_evicted_and_finds_what_is_new(config: StoreConfig) -> None:
    with open_store(config, NAMESPACE, EVEN) as store, open_store(config, NAMESPACE, EVEN) as reader:
        save(store, KEYS[:10], EVEN)
        assert fetch(reader, KEYS[:10], EVEN) == (right(KEYS[:10]), {})
        save(store, KEYS[10:40], EVEN)
        # The reader has looked up nothing since: what it remembers lies in memory of other blocks.
        loaded, failed = fetch(reader, KEYS[:40], EVEN)
        assert loaded == right(list(loaded))
        assert {type(error) for error in failed.values()} == {BlockMissingError}
        assert KEYS[39] in loaded
        assert reader.stats()["dram"].quarantined_blocks == 0
        assert reader.lookup(KEYS[:40]) == store.lookup(KEYS[:40])


def test_a_damaged_block_is_counted_once_and_its_slot_serves_again(config: StoreConfig) -> None:
    with open_store(config, NAMESPACE, EVEN) as store:
        save(store, KEYS[:3], EVEN)
        for segment in segments(layout_of(config)):
            for block, number in segment.blocks():
                if block == KEYS[1]:
                    segment.slot(number)[-1 - 4096] ^= 1
        loaded, failed = fetch(store, KEYS[:3], EVEN)
        assert set(loaded) == {KEYS[0], KEYS[2]}
        assert isinstance(failed[KEYS[1]], BlockCorruptError)
        assert store.lookup(KEYS[:3]) == [True, False, True]
        assert isinstance(fetch(store, KEYS[1:2], EVEN)[1][KEYS[1]], BlockMissingError)
        assert store.stats()["dram"].quarantined_blocks == 1
        assert save(store, KEYS[1:2], EVEN).failed == {}
        assert fetch(store, KEYS[:3], EVEN) == (right(KEYS[:3]), {})


def test_another_geometry_of_a_namespace_is_foreign(config: StoreConfig) -> None:
    with open_store(config, NAMESPACE, ODD) as small, open_store(config, NAMESPACE, EVEN) as store:
        save(small, KEYS[:1], ODD)
        assert isinstance(fetch(store, KEYS[:1], EVEN)[1][KEYS[0]], BlockForeignError)
        assert small.lookup(KEYS[:1]) == [False]


def test_a_block_beyond_the_capacity_is_refused(config: StoreConfig) -> None:
    small = replace(config, dram_capacity_bytes=100_000)
    with open_store(small, NAMESPACE, EVEN) as store:
        failed = save(store, KEYS[:1], EVEN).failed
        assert isinstance(failed[KEYS[0]], StoreFullError)
        assert held(small) < 8192


def test_what_is_being_written_is_never_evicted(config: StoreConfig) -> None:
    with open_store(config, NAMESPACE, EVEN) as store, open_store(config, "m", EVEN) as other:
        memories = filled(KEYS[:40], EVEN)
        saved = store.wait(store.save([memory.transfer(0, 1) for memory in memories]))
        assert {type(error) for error in saved.failed.values()} == {StoreFullError}
        begun = list(saved.done)
        assert 15 <= len(begun) <= 20
        assert isinstance(save(other, KEYS[:1], EVEN).failed[KEYS[0]], StoreFullError)
        store.wait(store.save([memory.transfer(1) for memory in memories if memory.key in begun]))
        assert store.wait(store.commit(begun)).failed == {}
        assert fetch(store, begun, EVEN) == (right(begun), {})
        assert save(other, KEYS[:1], EVEN).failed == {}


def test_private_blocks_stay(config: StoreConfig) -> None:
    private = f"{PRIVATE}/{owner_name()}/0"
    with open_store(config, private, EVEN) as mine, open_store(config, NAMESPACE, EVEN) as store:
        save(mine, KEYS[:5], EVEN)
        save(store, KEYS, EVEN)
        assert there(mine, KEYS) == KEYS[:5]
        delete_blocks(layout_of(config, private), KEYS[:2])
        assert there(mine, KEYS) == KEYS[2:5]
        assert save(mine, KEYS[5:7], EVEN).failed == {}, "their memory serves again"
        assert fetch(mine, KEYS[2:7], EVEN) == (right(KEYS[2:7]), {})


def test_a_killed_process_leaves_whole_blocks_and_no_lock(config: StoreConfig, memory: str) -> None:
    program = f"""
        import sys, time
        from tests.ucm.store.test_dram import CAPACITY, EVEN, KEYS, StoreConfig, filled, open_store, save
        config = StoreConfig(pipeline="Dram", dram_directory={memory!r}, dram_capacity_bytes=CAPACITY, save_nice=0)
        store = open_store(config, "n", EVEN)
        save(store, KEYS[:5], EVEN)
        store.wait(store.save([memory.transfer(0, 2) for memory in filled(KEYS[5:15], EVEN)]))
        print("ready", flush=True)
        time.sleep(600)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    stale = Path(layout_of(config).temporary, f"{'0' * 16}-1-1-x")
    stale.write_bytes(b"a segment that a process of another host did not finish")
    with open_store(replace(config, stale_seconds=0.0), NAMESPACE, EVEN) as store:
        assert there(store, KEYS) == KEYS[:5]
        time.sleep(0.01)
        assert save(store, KEYS[20:], EVEN).failed == {}
        assert not stale.exists()
        assert fetch(store, there(store, KEYS), EVEN)[1] == {}
        assert KEYS[-1] in there(store, KEYS)


def test_what_is_no_segment_is_left_alone(config: StoreConfig) -> None:
    with open_store(config, NAMESPACE, EVEN) as store:
        save(store, KEYS[:1], EVEN)
        folder = Path(directory_of(layout_of(config)))
        (folder / "text").write_bytes(b"not a segment")
        (folder / "empty").touch()
        (folder / "link").symlink_to(next(iter(folder.iterdir())))
        (folder / "folder").mkdir()
        assert there(store, KEYS) == KEYS[:1]
        assert save(store, KEYS, EVEN).failed == {}
        assert (folder / "text").read_bytes() == b"not a segment"


def test_empty_segments_go_and_others_stay(config: StoreConfig) -> None:
    with open_store(config, NAMESPACE, EVEN) as store:
        save(store, KEYS[:4], EVEN)
    delete_blocks(layout_of(config), KEYS[1:4])
    remove_empty(layout_of(config))
    assert [block for segment in segments(layout_of(config)) for block, _ in segment.blocks()] == KEYS[:1]


def test_a_file_of_another_length_is_no_segment(config: StoreConfig) -> None:
    with open_store(config, NAMESPACE, EVEN) as store:
        save(store, KEYS[:1], EVEN)
    (path,) = Path(directory_of(layout_of(config))).iterdir()
    with path.open("ab") as file:
        file.write(b"?")
    with pytest.raises(ValueError, match="no segment"):
        Segment.open(str(path))
    with open_store(config, NAMESPACE, EVEN) as store:
        assert store.lookup(KEYS[:1]) == [False]
        assert save(store, KEYS[:1], EVEN).failed == {}
