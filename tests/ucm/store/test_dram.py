"""The memory tier: segments that several engines share, are recycled, and never hold more than they may."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.simulated import begin_span
from ucm.clock import SYSTEM
from ucm.store.base import (
    BlockCorruptError,
    BlockForeignError,
    BlockMissingError,
    StoreError,
    StoreFullError,
    StoreTimeoutError,
    StoreUnavailableError,
)
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.format import HeaderCodec, gather
from ucm.store.memory import dram
from ucm.store.memory.dram import DramTier
from ucm.store.memory.segment import LOCK_FILE, Segment, delete_blocks, directory_of, remove_empty, segments
from ucm.store.posix.layout import PRIVATE, Layout, owner_name
from ucm.store.tier import LeaseRules, TierOptions, TierPlace
from ucm.testing.blocks import EVEN, ODD, content, fetch, filled, in_order, key, save

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.clock import SimulatedClock
    from ucm.clock import Clock
    from ucm.store.base import BlockGeometry, BlockKey, Buffer, KVStore

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


@pytest.mark.parametrize("clock", range(5), indirect=True, ids="order {}".format)
def test_it_never_holds_more_than_it_may(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store, open_store(config, "m", EVEN, clock=clock) as other:
        for number in range(0, 60, 4):
            one, two = KEYS[number : number + 4], KEYS[number : number + 2]
            assert save(store, one, EVEN).failed == save(other, two, EVEN).failed == {}
            assert held(config) <= CAPACITY + 8192  # the files that say what a namespace is
            clock.advance(0.01)
        left, lefts = there(store, KEYS), there(other, KEYS)
        assert 15 <= len(left) + len(lefts) <= 20
        assert KEYS[-1] in left
        assert KEYS[0] not in left
        assert fetch(store, left, EVEN) == (right(left), {})
        assert fetch(other, lefts, EVEN) == (right(lefts), {})
        stats = [one.stats()["dram"] for one in (store, other)]
        assert sum(one.evicted_blocks for one in stats) == 90 - len(left) - len(lefts)
        assert all(one.used_bytes is not None and one.used_bytes <= CAPACITY for one in stats)


def test_the_least_recently_used_goes_and_its_memory_serves_again(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(replace(config, save_threads=1), NAMESPACE, EVEN, clock=clock) as store:
        for one in KEYS[:20]:
            save(store, [one], EVEN)
            clock.advance(0.01)
        kept = there(store, KEYS[:20])
        inodes = {path.stat().st_ino for path in Path(directory_of(layout_of(config))).iterdir()}
        assert fetch(store, kept[:2], EVEN)[1] == {}
        save(store, KEYS[20:30], EVEN)
        assert {path.stat().st_ino for path in Path(directory_of(layout_of(config))).iterdir()} == inodes
        assert set(kept[:2]) <= set(there(store, kept))
        assert kept[2] not in there(store, kept)


def test_a_chain_that_is_written_slowly_is_evicted_from_its_end(config: StoreConfig, clock: SimulatedClock) -> None:
    begin_span(clock, 60.0)
    chain, others = KEYS[:12], KEYS[12:24]
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        for depth, memory in enumerate(filled(chain, EVEN)):
            store.save([replace(memory.transfer(), depth=depth)]).wait()
            clock.advance(3.0)
        assert save(store, others, EVEN).failed == {}
        left = there(store, chain)
        assert there(store, others) == others
        assert left == chain[: len(left)]
        assert 0 < len(left) < len(chain)


def test_a_wrong_clock_makes_no_segment_immortal(config: StoreConfig, clock: SimulatedClock) -> None:
    """Times that it has set are far ahead: such segments go first, and a use corrects them."""
    far = int((clock.time() + 10 * 365 * 86400) * 1e9)
    one_thread = replace(config, save_threads=1)
    with open_store(one_thread, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS[:4], EVEN)
        for path in Path(directory_of(layout_of(config))).iterdir():
            segment = Segment.open(str(path))
            segment.use(far, clock.time(), LeaseRules(1 << 62))
            segment.close()
        store.renew(in_order(KEYS[:1]))
        save(store, KEYS[4:23], EVEN)
        assert there(store, KEYS[:23]) == [KEYS[0], *KEYS[4:23]]


def test_a_reader_elsewhere_misses_what_was_evicted_and_finds_what_is_new(
    config: StoreConfig, clock: SimulatedClock
) -> None:
    with (
        open_store(config, NAMESPACE, EVEN, clock=clock) as store,
        open_store(config, NAMESPACE, EVEN, clock=clock) as reader,
    ):
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


def test_a_damaged_block_is_counted_once_and_its_slot_serves_again(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
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


def test_another_geometry_of_a_namespace_is_foreign(config: StoreConfig, clock: SimulatedClock) -> None:
    with (
        open_store(config, NAMESPACE, ODD, clock=clock) as small,
        open_store(config, NAMESPACE, EVEN, clock=clock) as store,
    ):
        save(small, KEYS[:1], ODD)
        assert isinstance(fetch(store, KEYS[:1], EVEN)[1][KEYS[0]], BlockForeignError)
        assert small.lookup(KEYS[:1]) == [False]


def test_a_block_beyond_the_capacity_is_refused(config: StoreConfig, clock: SimulatedClock) -> None:
    small = replace(config, dram_capacity_bytes=100_000)
    with open_store(small, NAMESPACE, EVEN, clock=clock) as store:
        failed = save(store, KEYS[:1], EVEN).failed
        assert isinstance(failed[KEYS[0]], StoreFullError)
        assert held(small) < 8192


def test_what_is_being_written_is_never_evicted(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    many = replace(config, save_threads=20)
    begun, goes_on = list[int](), clock.event()

    def slow(source: Sequence[Buffer | bytearray], target: Buffer) -> None:
        begun.append(len(target))
        goes_on.wait()
        gather(source, target)

    with open_store(many, NAMESPACE, EVEN, clock=clock) as store, open_store(config, "m", EVEN, clock=clock) as other:
        with monkeypatch.context() as patch:
            patch.setattr(dram, "gather", slow)
            memories = filled(KEYS[:20], EVEN)
            task = store.save([memory.transfer() for memory in memories])
            clock.run_until(lambda: len(begun) == 20)
        assert isinstance(save(other, KEYS[:1], EVEN).failed[KEYS[0]], StoreFullError)
        goes_on.set()
        assert task.wait().failed == {}
        assert fetch(store, KEYS[:20], EVEN) == (right(KEYS[:20]), {})
        assert save(other, KEYS[:1], EVEN).failed == {}


def test_private_blocks_stay(config: StoreConfig, clock: SimulatedClock) -> None:
    private = f"{PRIVATE}/{owner_name()}/0"
    with (
        open_store(config, private, EVEN, clock=clock) as mine,
        open_store(config, NAMESPACE, EVEN, clock=clock) as store,
    ):
        save(mine, KEYS[:5], EVEN)
        save(store, KEYS, EVEN)
        assert there(mine, KEYS) == KEYS[:5]
        delete_blocks(layout_of(config, private), KEYS[:2])
        assert there(mine, KEYS) == KEYS[2:5]
        assert save(mine, KEYS[5:7], EVEN).failed == {}, "their memory serves again"
        assert fetch(mine, KEYS[2:7], EVEN) == (right(KEYS[2:7]), {})


def test_a_killed_process_leaves_whole_blocks_and_no_lock(
    config: StoreConfig, memory: str, clock: SimulatedClock
) -> None:
    program = f"""
        import threading
        from tests.ucm.store.test_dram import CAPACITY, EVEN, KEYS, StoreConfig, dram, filled, open_store, save
        config = StoreConfig(pipeline="Dram", dram_directory={memory!r}, dram_capacity_bytes=CAPACITY, save_nice=0)
        store = open_store(config, "n", EVEN)
        save(store, KEYS[:5], EVEN)
        begun = threading.Semaphore(0)
        dram.gather = lambda source, target: (begun.release(), threading.Event().wait())
        store.save([memory.transfer() for memory in filled(KEYS[5:15], EVEN)])
        for _ in range(config.save_threads):
            begun.acquire()
        print("ready", flush=True)
        threading.Event().wait()
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    stale = Path(layout_of(config).temporary, f"{'0' * 16}-1-1-x")
    stale.write_bytes(b"a segment that a process of another host did not finish")
    with open_store(replace(config, stale_seconds=0.0), NAMESPACE, EVEN, clock=clock) as store:
        assert there(store, KEYS) == KEYS[:5]
        clock.advance(1)
        assert save(store, KEYS[20:], EVEN).failed == {}
        assert not stale.exists()
        assert fetch(store, there(store, KEYS), EVEN)[1] == {}
        assert KEYS[-1] in there(store, KEYS)


def test_what_is_no_segment_is_left_alone(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS[:1], EVEN)
        folder = Path(directory_of(layout_of(config)))
        (folder / "text").write_bytes(b"not a segment")
        (folder / "empty").touch()
        (folder / "link").symlink_to(next(iter(folder.iterdir())))
        (folder / "folder").mkdir()
        assert there(store, KEYS) == KEYS[:1]
        assert save(store, KEYS, EVEN).failed == {}
        assert (folder / "text").read_bytes() == b"not a segment"


def test_empty_segments_go_and_others_stay(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS[:4], EVEN)
    delete_blocks(layout_of(config), KEYS[1:4])
    remove_empty(layout_of(config))
    assert [block for segment in segments(layout_of(config)) for block, _ in segment.blocks()] == KEYS[:1]


def test_a_file_of_another_length_is_no_segment(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS[:1], EVEN)
    (path,) = Path(directory_of(layout_of(config))).iterdir()
    with path.open("ab") as file:
        file.write(b"?")
    with pytest.raises(ValueError, match="no segment"):
        Segment.open(str(path))
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        assert store.lookup(KEYS[:1]) == [False]
        assert save(store, KEYS[:1], EVEN).failed == {}


def test_a_directory_that_is_deleted_beside_a_store_is_made_again(
    config: StoreConfig, memory: str, clock: SimulatedClock
) -> None:
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS[:1], EVEN)
        shutil.rmtree(memory)
        assert store.lookup(KEYS[:1]) == [False]
        assert save(store, KEYS[:2], EVEN).failed == {}
        assert fetch(store, KEYS[:2], EVEN) == (right(KEYS[:2]), {})


def test_a_directory_that_others_put_in_its_place_is_not_used(
    config: StoreConfig, memory: str, clock: SimulatedClock
) -> None:
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS[:1], EVEN)
        shutil.rmtree(memory)
        Path(memory).mkdir()
        Path(memory).chmod(0o777)
        assert store.lookup(KEYS[:1]) == [False]
        (error,) = save(store, KEYS[:1], EVEN).failed.values()
        assert "replaced" in str(error)
        assert list(Path(memory).iterdir()) == []


def descriptors(config: StoreConfig) -> int:
    """The number of files of a tier's directory that this process has open; other tests may leave some of others."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that listed them
            found += str(descriptor.readlink()).startswith(config.dram_directory)
    return found


class Tier:
    """A tier by itself, without a store's threads."""

    def __init__(
        self,
        config: StoreConfig,
        namespace: str = NAMESPACE,
        geometry: BlockGeometry = EVEN,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self.codec = HeaderCodec(namespace, geometry)
        self.tier = DramTier(TierOptions(), TierPlace("Dram", namespace, geometry, self.codec, config, clock=clock))
        self.geometry = geometry

    def save(self, *blocks: BlockKey) -> None:
        for memory in filled(blocks, self.geometry):
            slices = memory.transfer().slices
            self.tier.put(memory.key, [self.codec.encode(memory.key, self.codec.seal(slices)), *slices], 0.0)

    def there(self, blocks: Sequence[BlockKey]) -> list[BlockKey]:
        return [block for block, found in zip(blocks, self.tier.contains(blocks, 0.0), strict=True) if found]


def test_a_process_that_keeps_the_lock_stops_no_lookup_and_no_save_for_ever(
    config: StoreConfig, memory: str, clock: SimulatedClock
) -> None:
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS[:1], EVEN)
        with Path(memory, LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            memories = filled(KEYS[1:2], EVEN)
            task = store.save([one.transfer() for one in memories])
            assert store.lookup(KEYS[:2]) == [True, False]
            began = clock.monotonic()
            assert isinstance(task.wait().failed[KEYS[1]], StoreTimeoutError)
            assert clock.monotonic() - began < 2 * config.stuck_seconds
        assert fetch(store, KEYS[:1], EVEN) == (right(KEYS[:1]), {})


def test_a_child_process_does_not_keep_the_lock(config: StoreConfig) -> None:
    one, other = Tier(config), Tier(config, "m")
    with one.tier._root_lock():
        child = os.fork()
        if not child:  # it has a copy of the locked file
            signal.pause()
            os._exit(0)
    try:
        other.save(KEYS[0])
        assert other.there(KEYS[:1]) == KEYS[:1]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_blocks_of_running_requests_are_not_evicted_for_others_of_theirs(
    config: StoreConfig, clock: SimulatedClock
) -> None:
    private = f"{PRIVATE}/{owner_name()}/0"
    with (
        open_store(config, private, EVEN, clock=clock) as mine,
        open_store(config, NAMESPACE, EVEN, clock=clock) as store,
    ):
        result = save(mine, KEYS[:40], EVEN)
        assert {type(error) for error in result.failed.values()} == {StoreFullError}
        kept = [block for block in KEYS[:40] if block not in result.failed]
        assert len(kept) >= 15
        assert fetch(mine, kept, EVEN) == (right(kept), {})
        delete_blocks(layout_of(config, private), kept[1:])
        remove_empty(layout_of(config, private))
        assert save(store, KEYS[:10], EVEN).failed == {}, "deleted blocks give their room back"
        assert there(mine, kept) == kept[:1]
        assert save(mine, kept[1:3], EVEN).failed == {}


def test_taking_segments_from_each_other_leaks_no_descriptors(config: StoreConfig) -> None:
    one, other = Tier(config), Tier(config, "m")
    for _ in range(6):
        one.save(*KEYS[:30])
        other.save(*KEYS[30:])
        delete_blocks(layout_of(config), KEYS)
        delete_blocks(layout_of(config, "m"), KEYS)
    assert 0 < descriptors(config) <= 2 * 2 * 20, "each of the two has at most 20 files open and mapped"
    one.tier.close()
    other.tier.close()
    assert descriptors(config) == 0


def test_a_slot_of_a_block_that_failed_is_used_only_under_the_lock(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(config, dram_capacity_bytes=2 * (136 << 10))
    one, other = Tier(small), Tier(small, "m")

    def fail(source: Sequence[Buffer | bytearray], target: Buffer) -> None:
        raise MemoryError(f"{len(source)} pieces, {len(target)} bytes")

    one.save(KEYS[0])
    with monkeypatch.context() as patch:
        patch.setattr(dram, "gather", fail)
        with pytest.raises(MemoryError):
            one.save(KEYS[1])
    other.save(KEYS[4])
    one.save(KEYS[3])
    assert one.there(KEYS[:5]) == [KEYS[3]]
    assert other.there(KEYS[:5]) == [KEYS[4]]
    for tier, block in ((one, KEYS[3]), (other, KEYS[4])):
        assert bytes(tier.tier.read_file(block, 0.0))[-EVEN.nbytes :] == content(block, EVEN)


def test_a_writer_looks_for_free_slots_only_after_others(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In segments of 20 blocks, of which one thread writes one after the other and another process deletes some."""
    one, listed, free = Tier(replace(config, dram_capacity_bytes=64 * CAPACITY)), list[str](), Segment.free
    one.save(KEYS[0])

    def noted(self: Segment) -> list[int]:
        listed.append(self.path)
        return free(self)

    def fail(source: Sequence[Buffer | bytearray], target: Buffer) -> None:
        raise MemoryError(f"{len(source)} pieces, {len(target)} bytes")

    monkeypatch.setattr(Segment, "free", noted)
    with monkeypatch.context() as patch:
        patch.setattr(dram, "gather", fail)
        for block in KEYS[1:10]:
            with pytest.raises(MemoryError):
                one.save(block)
    for block in KEYS[1:20]:
        one.save(block)
    assert listed == []
    assert delete_blocks(layout_of(config), KEYS[5:8]) == 3
    for block in KEYS[20:23]:
        one.save(block)
    assert len(list(Path(directory_of(layout_of(config))).iterdir())) == 1
    assert one.there(KEYS[:23]) == [*KEYS[:5], *KEYS[8:23]]


def test_a_block_for_whose_copy_there_is_no_memory_stays(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> Buffer:
        raise StoreError(f"there is no memory for {nbytes} bytes")

    one = Tier(config)
    one.save(KEYS[0])
    with monkeypatch.context() as patch:
        patch.setattr("ucm.store.memory.segment.aligned_buffer", refuse)
        with pytest.raises(StoreError, match="no memory"):
            one.tier.read_file(KEYS[0], 0.0)
    assert one.there(KEYS[:1]) == KEYS[:1]


def test_a_deleted_segment_is_readable_for_a_while(config: StoreConfig, clock: SimulatedClock) -> None:
    one, other = Tier(config, clock=clock), Tier(config, "m", ODD, clock=clock)
    one.save(*KEYS[:20])
    readers = [Segment.open(str(path)) for path in Path(directory_of(layout_of(config))).iterdir()]
    copies = {reader.path: bytes(reader.slot(0)) for reader in readers}
    other.save(*KEYS[:60])
    reader = next(one for one in readers if not Path(one.path).exists())
    copy = copies[reader.path]
    assert bytes(reader.slot(0)) == copy, "a read of given back memory would allocate it again, or end the process"
    clock.advance(dram._COPYING_SECONDS + 1)
    other.tier._give_back()
    assert not any(reader.slot(0))


def test_the_index_forgets_deleted_blocks(config: StoreConfig) -> None:
    one = Tier(config)
    for begin in range(0, 600, 5):
        blocks = [key(number) for number in range(begin, begin + 5)]
        one.save(*blocks)
        delete_blocks(layout_of(config), blocks)
    assert len(one.tier._index) <= 40


def test_a_segment_that_could_not_be_opened_is_tried_again(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Tier(config), Tier(config)
    one.save(KEYS[0])
    directory = directory_of(layout_of(config))
    changed = os.stat(directory).st_mtime_ns - 2 * dram._TICK  # noqa: PTH116 - a text
    os.utime(directory, ns=(changed, changed))  # so long ago that it is relied upon
    with monkeypatch.context() as patch:

        def refused(path: str) -> Segment:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

        patch.setattr(Segment, "open", refused)
        assert other.there(KEYS[:1]) == []
    assert other.there(KEYS[:1]) == KEYS[:1]


@pytest.mark.parametrize("geometry", [ODD, EVEN], ids=["deletes", "moves"])
def test_a_failed_eviction_keeps_no_segment_locked(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, geometry: BlockGeometry
) -> None:
    one, other = Tier(config), Tier(config, "m", geometry)
    one.save(*KEYS[:20])
    with monkeypatch.context() as patch:

        def no_remove(self: Segment) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.path)

        def no_publish(self: Segment, layout: Layout) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"{self.path} in {layout.base}")

        patch.setattr(Segment, "remove", no_remove)
        patch.setattr(Segment, "publish", no_publish)
        for _ in range(30):
            with pytest.raises(StoreUnavailableError):
                other.save(KEYS[30])
    other.save(KEYS[30])
    one.save(*KEYS[40:50])
    assert one.there(KEYS[40:50]) == KEYS[40:50]


def test_a_namespace_that_is_deleted_while_it_waits_for_the_lock_costs_others_nothing_uncounted(
    config: StoreConfig, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for, deleted = DramTier._wait_for, list[str]()

    def late(self: DramTier, descriptor: int) -> None:
        wait_for(self, descriptor)
        if not deleted:
            deleted.append(self._layout.base)
            shutil.rmtree(self._layout.base, ignore_errors=True)

    with (
        open_store(config, NAMESPACE, EVEN, clock=clock) as full,
        open_store(config, "other", EVEN, clock=clock) as other,
    ):
        held = [block for block in KEYS if not save(full, [block], EVEN).failed]
        there = full.lookup(held).count(True)
        before = other.stats()["dram"].evicted_blocks
        monkeypatch.setattr(DramTier, "_wait_for", late)
        assert save(other, KEYS[:1], EVEN).failed == {}
        assert deleted
        lost = there - full.lookup(held).count(True)
        assert other.stats()["dram"].evicted_blocks - before == lost


def test_a_segment_that_cannot_be_published_is_deleted(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Tier(config)
    before = descriptors(config)

    def refused(self: Segment, layout: Layout) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), f"{self.path} in {layout.base}")

    monkeypatch.setattr(Segment, "publish", refused)
    with pytest.raises(StoreUnavailableError):
        one.save(KEYS[0])
    assert list(Path(layout_of(config).temporary).iterdir()) == []
    assert descriptors(config) == before
