"""Media that do not answer delay only callers that need them, and those for one deadline per rest."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

from tests.ucm.store.frozen import FrozenDirectory
from ucm.store import copying, tiered
from ucm.store.base import BlockMissingError, StoreTimeoutError, TransferTask
from ucm.store.factory import open_store
from ucm.store.health import Pool, RefusableJob
from ucm.store.posix import files as posix_files
from ucm.store.posix import index as posix_index
from ucm.store.posix import paths as posix_paths
from ucm.store.posix import space as posix_space
from ucm.store.posix.layout import buckets
from ucm.store.posix.tier import PosixTier, _Question
from ucm.store.tier import RecentKeys, TierOptions, TierPlace, ValueTier
from ucm.testing.blocks import EVEN, content, fetch, filled, key, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.ucm.store.conftest import Clock
    from ucm.store.base import BlockKey, BlockTransfer, Buffer, KVStore
    from ucm.store.config import StoreConfig
    from ucm.store.posix.layout import Layout
    from ucm.store.tier import Outcome

#: Enough keys for both of two directories to have some, whatever their names.
KEYS = [key(number) for number in range(64)]
HERE = "tests.ucm.store.test_frozen"
#: A limit that suffices on a busy machine, the deadline of a frozen medium, and a limit never reached, in seconds.
LONG, SHORT, NEVER = 60.0, 0.1, 3600.0


class Server:
    """The tests' control of the tier's medium."""

    values: dict[BlockKey, bytes]
    thawed: threading.Event
    timeouts = 0
    calls = 0


SERVER = Server()


class ServerTier(ValueTier):
    """Keeps its deadlines, like a server. When thawed it answers at once, however late."""

    def __init__(self, options: TierOptions, place: TierPlace) -> None:
        super().__init__("server", place, SHORT, SHORT)

    def _answer(self, deadline: float) -> None:
        SERVER.calls += 1
        if not SERVER.thawed.wait(max(0.0, deadline - time.monotonic())):
            SERVER.timeouts += 1
            raise StoreTimeoutError("no answer")

    def contains(self, keys: Sequence[BlockKey], deadline: float) -> list[bool]:
        self._answer(deadline)
        return [block in SERVER.values for block in keys]

    def fetch(self, key: BlockKey, deadline: float) -> Buffer:
        self._answer(deadline)
        if key not in SERVER.values:
            raise BlockMissingError("no")
        return memoryview(SERVER.values[key])

    def put_value(self, key: BlockKey, buffers: Sequence[Buffer | bytearray], deadline: float) -> None:
        self._answer(deadline)
        SERVER.values[key] = b"".join(buffers)

    def remove(self, key: BlockKey, deadline: float) -> None:
        del SERVER.values[key]


@pytest.fixture
def server() -> Iterator[Server]:
    SERVER.values, SERVER.thawed = {}, threading.Event()
    SERVER.timeouts = SERVER.calls = 0
    SERVER.thawed.set()
    yield SERVER
    SERVER.thawed.set()


@pytest.fixture
def both(config: StoreConfig, monkeypatch: pytest.MonkeyPatch) -> StoreConfig:
    monkeypatch.setattr(tiered, "CLOSE_SECONDS", NEVER)
    return replace(config, pipeline=f"Posix|{HERE}:ServerTier", rest_seconds=NEVER, stuck_seconds=NEVER)


def empty(config: StoreConfig) -> None:
    for path in Path(config.directories[0]).rglob("??/*"):
        if path.parent.name not in {"tmp", "n"}:
            path.unlink()


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def eventually(store: KVStore, tier: str, **values: float) -> None:
    wait_until(lambda: all(getattr(store.stats()[tier], name) == value for name, value in values.items()))


# Written behind.


def test_a_frozen_lower_tier_delays_no_save(both: StoreConfig, server: Server) -> None:
    with open_store(both, "n", EVEN) as store:
        server.thawed.clear()
        saved = save(store, KEYS, EVEN)
        assert set(saved.done.values()) == {"posix"}
        assert store.lookup(KEYS) == [True] * len(KEYS)
        eventually(store, "server", resting=1, queued_blocks=len(KEYS))
        assert not store.flush(SHORT)
        assert server.timeouts == 1


def test_what_waits_is_written_after_the_rest(both: StoreConfig, server: Server, clock: Clock) -> None:
    with open_store(both, "n", EVEN) as store:
        server.thawed.clear()
        save(store, KEYS, EVEN)
        eventually(store, "server", resting=1)
        server.thawed.set()
        assert not store.flush(SHORT)
        clock.now += NEVER
        assert store.flush(LONG)
        stats = store.stats()["server"]
        assert (stats.saved_blocks, stats.saved_bytes) == (len(KEYS), len(KEYS) * EVEN.nbytes)
    assert set(server.values) == set(KEYS)


def test_what_falls_behind_is_dropped_and_counted(both: StoreConfig, server: Server) -> None:
    limited = replace(both, write_behind_bytes=5 * (EVEN.nbytes + 4096))
    with open_store(limited, "n", EVEN) as store:
        server.thawed.clear()
        assert save(store, KEYS, EVEN).failed == {}
        assert store.stats()["server"].failures["save.full"] == len(KEYS) - 5
        eventually(store, "server", queued_bytes=5 * (EVEN.nbytes + 4096))


def test_closing_waits_for_no_frozen_tier_and_counts_what_is_lost(both: StoreConfig, server: Server) -> None:
    """The frozen write would not end within this test."""
    store = open_store(both, "n", EVEN)
    server.thawed.clear()
    save(store, KEYS, EVEN)
    eventually(store, "server", resting=1)
    store.close()
    assert store.stats()["server"].failures["save.unavailable"] == len(KEYS)


def test_closing_waits_once_for_all_writes_that_hang(
    config: StoreConfig, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four directories stops answering while a block is written to it."""
    seconds, roots = 2.0, [tmp_path / f"low-{number}" for number in range(4)]
    for root in roots:
        root.mkdir()
    monkeypatch.setattr(tiered, "CLOSE_SECONDS", seconds)
    monkeypatch.setattr(posix_space, "CLOSE_SECONDS", 0.0)
    low = replace(config, pipeline="Dram|Posix", dram_directory=memory, directories=tuple(map(str, roots)))
    directory = FrozenDirectory(monkeypatch, str(tmp_path / "low-"))
    directory.thawed.set()
    hanging: set[str] = set()
    write = posix_files.BlockFileWriter.write

    def hang(
        self: posix_files.BlockFileWriter, buffers: Sequence[Buffer | bytearray], offset: int, nbytes: int
    ) -> None:
        root = self._directory.layout.root
        if root != memory:
            hanging.add(root)
            wait_until(lambda: len(hanging) == len(roots))
            directory.thawed.clear()
        write(self, buffers, offset, nbytes)

    monkeypatch.setattr(posix_files.BlockFileWriter, "write", hang)
    store = open_store(low, "n", EVEN)
    save(store, KEYS, EVEN)
    assert directory.held.wait(LONG)
    wait_until(lambda: not directory.thawed.is_set() and len(hanging) == len(roots))
    began = time.monotonic()
    assert ends(store.close)
    assert time.monotonic() - began < len(roots) * seconds
    assert store.stats()["posix"].failures["save.unavailable"] == len(KEYS)
    directory.thawed.set()


def test_closing_writes_what_waits(both: StoreConfig, server: Server) -> None:
    with open_store(both, "n", EVEN) as store:
        save(store, KEYS, EVEN)
    assert set(server.values) == set(KEYS)


def test_a_block_evicted_before_its_turn_is_dropped_and_counted(
    both: StoreConfig, server: Server, clock: Clock
) -> None:
    with open_store(both, "n", EVEN) as store:
        server.thawed.clear()
        save(store, KEYS, EVEN)
        eventually(store, "server", resting=1)
        empty(both)
        server.thawed.set()
        clock.now += NEVER
        assert store.flush(LONG)
        assert store.stats()["server"].failures["save.missing"] == len(KEYS)
    assert server.values == {}


# Looked up and loaded.


def test_a_dead_tier_costs_one_deadline_per_rest(both: StoreConfig, server: Server) -> None:
    with open_store(both, "n", EVEN) as store:
        server.thawed.clear()
        for _ in range(20):
            assert store.lookup(KEYS) == [False] * len(KEYS)
            assert store.lookup_on_prefix(KEYS) == 0
            assert set(fetch(store, KEYS, EVEN)[1]) == set(KEYS)
        assert server.timeouts == 1


def test_tiers_that_alternate_are_asked_for_growing_parts(both: StoreConfig, server: Server) -> None:
    with open_store(both, "n", EVEN) as store:
        save(store, KEYS, EVEN)
        assert store.flush(LONG)
        for index, block in enumerate(KEYS):
            if index % 2:
                del server.values[block]
            else:
                next(Path(both.directories[0]).rglob(f"{block.hex()[:2]}/{block.hex()[2:]}")).unlink()
        server.calls = 0
        assert store.lookup_on_prefix(KEYS) == len(KEYS)
        assert server.calls <= 5  # for a prefix, then for 8, 16, 32 and the last 6 of 64 blocks


def test_what_comes_from_the_lower_tier_is_kept_without_another_read(both: StoreConfig, server: Server) -> None:
    with open_store(both, "n", EVEN) as store:
        save(store, KEYS, EVEN)
        assert store.flush(LONG)
        empty(both)
        server.calls = 0
        loaded, failed = fetch(store, KEYS, EVEN)
        assert (loaded, failed) == ({block: content(block, EVEN) for block in KEYS}, {})
        eventually(store, "posix", saved_blocks=2 * len(KEYS))
        assert fetch(store, KEYS, EVEN)[0] == loaded
        assert server.calls == len(KEYS)


def test_without_memory_for_a_copy_a_loaded_block_is_not_kept_and_nobody_waits(
    both: StoreConfig, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(nbytes: int) -> memoryview:
        raise MemoryError(nbytes)

    with open_store(both, "n", EVEN) as store:
        save(store, KEYS, EVEN)
        assert store.flush(LONG)
        empty(both)
        with monkeypatch.context() as patched:
            patched.setattr(copying, "aligned_buffer", full)
            task = store.load([memory.transfer() for memory in filled(KEYS, EVEN)])
            assert isinstance(task, TransferTask)
            assert task.finished_within(LONG)
        assert set(store.wait(task).done) == set(KEYS)
        assert store.stats()["posix"].failures == {"promote.other": len(KEYS)}
        fetch(store, KEYS, EVEN)
        eventually(store, "posix", saved_blocks=2 * len(KEYS))
        del server


def test_a_tier_that_breaks_its_contract_costs_its_blocks_and_keeps_nobody_waiting(
    both: StoreConfig, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def less(self: ServerTier, blocks: Sequence[BlockTransfer], deadline: float) -> list[Outcome]:
        del self, blocks, deadline
        return []

    with open_store(both, "n", EVEN) as store:
        save(store, KEYS, EVEN)
        assert store.flush(LONG)
        empty(both)
        monkeypatch.setattr(ServerTier, "read_many", less)
        task = store.load([memory.transfer() for memory in filled(KEYS, EVEN)])
        assert isinstance(task, TransferTask)
        assert task.finished_within(LONG)
        assert {error.cause for error in store.wait(task).failed.values()} == {"other"}
        del server


# Stuck in an uninterruptible system call.


class Hanging:
    """Blocks every call on a directory until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: str) -> None:
        self.held, self.over = threading.Event(), threading.Event()
        self.calls: list[str] = []
        open_file = posix_paths.open_file

        def hang(path: str, flags: int, mode: int = 0, group: int | None = None) -> tuple[int, os.stat_result]:
            if path.startswith(root):
                self.calls.append(path)
                self.held.set()
                self.over.wait()
            return open_file(path, flags, mode, group)

        monkeypatch.setattr(posix_files, "open_file", hang)


def test_a_stuck_directory_does_not_starve_another(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    roots = [str(tmp_path / name) for name in ("a", "b")]
    for root in roots:
        Path(root).mkdir()
    two = replace(config, directories=tuple(roots), load_threads=2)
    with open_store(two, "n", EVEN) as store:
        save(store, KEYS, EVEN)
        there = {block for block in KEYS if list(Path(roots[0]).rglob(block.hex()[2:]))}
        assert 2 < len(there) < len(KEYS), "more than there are threads"
        hanging = Hanging(monkeypatch, roots[0])
        memories = filled(KEYS, EVEN)
        stuck = store.load([memory.transfer() for memory in memories if memory.key in there])
        well = store.load([memory.transfer() for memory in memories if memory.key not in there])
        assert set(store.wait(well).done) == set(KEYS) - there
        assert not store.check(stuck), "the memory that a stuck thread may yet write to is not given back"
        wait_until(lambda: len(hanging.calls) == two.load_threads)  # a call that begins later is not stuck as long
        clock.now += two.stuck_seconds
        again = store.wait(store.load([memory.transfer() for memory in filled(there, EVEN)]))
        assert {error.cause for error in again.failed.values()} == {"timeout"}
        hanging.over.set()
        assert set(store.wait(stuck).done) | set(store.wait(stuck).failed) == there
        wait_until(lambda: not fetch(store, KEYS, EVEN)[1])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_store_is_closed_beside_a_stuck_thread(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: Clock, threads: int
) -> None:
    store = open_store(replace(config, load_threads=threads), "n", EVEN)
    save(store, KEYS, EVEN)
    hanging = Hanging(monkeypatch, config.directories[0])
    store.load([memory.transfer() for memory in filled(KEYS[:1], EVEN)])
    assert hanging.held.wait(LONG)
    clock.now += config.stuck_seconds
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(LONG)
    ended = not closing.is_alive()
    hanging.over.set()
    closing.join()
    assert ended, "the threads that have nothing to do end, and the stuck one is left to itself"


def test_stuck_threads_are_replaced_once_per_rest_and_not_without_end(clock: Clock) -> None:
    over = threading.Event()
    refused: list[int] = []
    done: list[int] = []
    pool = Pool("test", 1, patience=10.0, rest=30.0)

    def submit(job: int) -> None:
        def run() -> None:
            over.wait()
            done.append(job)

        pool.submit([RefusableJob(run, lambda: refused.append(job))])

    for job in range(100):
        submit(job)
        wait_until(lambda: len(pool._began) == len(pool._threads))
        clock.now += pool._patience
        pool.relieve()
        assert len(pool._threads) == 1 + min(job, 8)
        clock.now += pool._rest
    assert refused == list(range(9, 100))
    over.set()
    wait_until(lambda: len(pool._threads) == 1 and not pool._began)  # the last thread has woken up, too
    submit(100)
    pool.close()
    assert sorted(done) == [*range(9), 100]


# Looked up in a directory that does not answer.


class TwoRoots:
    """A store in two directories, one of which freezes."""

    def __init__(self, config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        roots = [str(tmp_path / name) for name in ("a", "b")]
        for root in roots:
            Path(root).mkdir()
        self.config = replace(config, directories=tuple(roots))
        self.store = open_store(self.config, "n", EVEN)
        save(self.store, KEYS, EVEN)
        assert isinstance(self.store, tiered.TieredStore)
        [tier] = self.store._tiers
        assert isinstance(tier, PosixTier)
        self.tier = tier
        self.lost = [block for block in KEYS if list(Path(roots[0]).rglob(block.hex()[2:]))]
        assert 0 < len(self.lost) < len(KEYS)
        self.left = [block not in self.lost for block in KEYS]
        self.directory = FrozenDirectory(monkeypatch, roots[0])

    def give_up(self) -> None:
        """Look up only keys in the frozen directory, so that the other directory's speed does not matter."""
        self.tier.timeout = SHORT
        assert self.store.lookup(self.lost) == [False] * len(self.lost)
        assert self.directory.held.wait(LONG)  # the thread may begin only after its caller has given up
        self.tier.timeout = NEVER


@pytest.fixture
def two(config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[TwoRoots]:
    del clock  # the fixture stops the clock, so no rest ends
    found = TwoRoots(config, tmp_path, monkeypatch)
    yield found
    found.directory.thawed.set()
    found.store.close()


def test_a_frozen_directory_costs_one_deadline_per_rest_and_the_other_is_found(two: TwoRoots, clock: Clock) -> None:
    two.give_up()
    calls = two.directory.calls
    for _ in range(3):
        assert two.store.lookup(KEYS) == two.left
        assert two.store.lookup_on_prefix(KEYS) == two.left.index(False)
    assert two.directory.calls == calls
    stats = two.store.stats()["posix"]
    assert (stats.failures, stats.resting) == ({"lookup.timeout": 1}, 0.5)
    two.directory.thawed.set()
    clock.now += two.config.rest_seconds
    assert two.store.lookup(KEYS) == [True] * len(KEYS)
    assert two.store.lookup_on_prefix(KEYS) == len(KEYS)


def test_a_directory_that_stays_frozen_keeps_a_few_threads_and_no_more(two: TwoRoots, clock: Clock) -> None:
    for _ in range(20):
        two.give_up()
        clock.now += max(two.config.rest_seconds, two.config.stuck_seconds)
    assert len(two.tier._directories[0].lookups._threads) <= 10
    assert two.store.lookup([block for block in KEYS if block not in two.lost]) == [True] * two.left.count(True)


def test_an_index_that_cannot_be_read_keeps_no_other_directory_waiting(
    two: TwoRoots, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.directory.thawed.set()
    monkeypatch.setattr(posix_index, "WORTH", 1)
    two.tier.timeout = NEVER
    assert two.store.lookup(KEYS) == [True] * len(KEYS)
    wait_until(lambda: not any(thread.name == posix_index.INDEX_THREAD for thread in threading.enumerate()))
    two.directory.thawed.clear()
    two.give_up()
    assert two.store.lookup(KEYS) == two.left


def test_a_store_is_closed_beside_lookups_that_hang(
    two: TwoRoots, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix_index, "CLOSE_SECONDS", SHORT)
    monkeypatch.setattr(posix_space, "CLOSE_SECONDS", SHORT)
    two.give_up()
    clock.now += two.config.stuck_seconds
    closing = threading.Thread(target=two.store.close, daemon=True)
    closing.start()
    closing.join(LONG)
    ended = not closing.is_alive()
    two.directory.thawed.set()
    closing.join()
    assert ended


def test_closing_waits_once_for_all_listings_that_hang(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of four directories stops answering while its names are listed."""
    seconds, roots = 2.0, [tmp_path / f"root-{number}" for number in range(4)]
    for root in roots:
        root.mkdir()
    monkeypatch.setattr(posix_index, "CLOSE_SECONDS", seconds)
    monkeypatch.setattr(posix_index, "WORTH", 1)
    store = open_store(replace(config, directories=tuple(map(str, roots))), "n", EVEN)
    keys = [key(number) for number in range(64)]
    save(store, keys, EVEN)
    thawed, listing = threading.Event(), set()

    def hang(layout: Layout) -> list[str]:
        listing.add(layout.root)
        thawed.wait()
        return buckets(layout)

    monkeypatch.setattr(posix_index, "buckets", hang)
    assert store.lookup(keys) == [True] * len(keys)
    wait_until(lambda: len(listing) == len(roots))
    began = time.monotonic()
    ended = ends(store.close)
    took = time.monotonic() - began
    thawed.set()
    assert ended
    assert took < len(roots) * seconds


def test_what_a_slow_directory_has_told_by_the_deadline_is_believed(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow directory is not put to rest for that."""
    with open_store(config, "n", EVEN) as store:
        save(store, KEYS, EVEN)
        assert isinstance(store, tiered.TieredStore)
        [tier] = store._tiers
        assert isinstance(tier, PosixTier)
        [directory] = tier._directories
        goes_on, access = threading.Event(), os.access
        tests: list[str] = []

        def some(path: str, mode: int, **options: Any) -> bool:
            tests.append(path)
            if len(tests) == 5:
                goes_on.wait()
            return access(path, mode, **options)

        with monkeypatch.context() as patched:
            patched.setattr(os, "access", create_autospec(os.access, side_effect=some))
            question = _Question(directory, RecentKeys(0, 0.0), KEYS, gaps=True)
            wait_until(lambda: len(tests) == 5)
            assert question.answers(0.0) == [True] * 4
            assert question.error is None
            goes_on.set()
            assert question._ended.wait(LONG)
        assert len(tests) == 5, "nobody waits for the rest"
        assert store.lookup(KEYS) == [True] * len(KEYS)


# Eviction next to a directory that does not answer.


def here_and_there(two: TwoRoots, count: int) -> tuple[list[BlockKey], list[BlockKey]]:
    """Return keys that belong to the directory that freezes, and as many that belong to the other."""
    lanes: tuple[list[BlockKey], list[BlockKey]] = [], []
    number = len(KEYS)
    while min(map(len, lanes)) < count:
        block = key(number)
        lanes[two.tier.lane(block)].append(block)
        number += 1
    return lanes[0][:count], lanes[1][:count]


@pytest.fixture
def small(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TwoRoots, FrozenDirectory]]:
    """A store whose two directories together hold twice the saved blocks."""
    limited = replace(config, posix_capacity_bytes=2 * len(KEYS) * (EVEN.nbytes + 4096))
    found = TwoRoots(limited, tmp_path, monkeypatch)
    yield found, found.directory
    found.directory.thawed.set()
    found.store.close()


def test_a_frozen_directory_stops_eviction_in_no_other(small: tuple[TwoRoots, FrozenDirectory]) -> None:
    two, directory = small
    assert directory.held.wait(LONG), "its evictor has come across it"
    _, well = here_and_there(two, 4 * len(KEYS))
    deadline = time.monotonic() + LONG
    while well and time.monotonic() < deadline:  # saves are dropped while the evictor lags behind
        failed = save(two.store, well[:16], EVEN).failed
        well = [*failed, *well[16:]]
    assert not well, "the other directory is full, and nobody makes room"
    assert two.store.stats()["posix"].evicted_blocks


def test_an_evictor_that_a_directory_keeps_is_not_waited_for(
    small: tuple[TwoRoots, FrozenDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    two, directory = small
    assert directory.held.wait(LONG)
    monkeypatch.setattr(posix_space, "CLOSE_SECONDS", NEVER)
    evictors = [one.evictor for one in two.tier._directories]
    assert evictors[0]._busy_since is not None
    evictors[0]._busy_since -= NEVER
    assert ends(two.tier.close)
    assert evictors[1]._thread is not None
    assert not evictors[1]._thread.is_alive(), "the other one is"


def test_times_of_use_are_not_renewed_by_whoever_closes(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory may have stopped answering since the evictor's last check."""
    two = TwoRoots(config, tmp_path, monkeypatch)
    assert two.directory.held.wait(LONG)
    two.directory.thawed.set()
    evictor = two.tier._directories[0].evictor
    wait_until(lambda: evictor._busy_since is None)
    two.directory.thawed.clear()
    two.tier.touch(two.lost[0])
    monkeypatch.setattr(posix_space, "CLOSE_SECONDS", SHORT)
    ended = ends(two.tier.close)
    two.directory.thawed.set()
    assert ended


def ends(call: Callable[[], None]) -> bool:
    """Return whether a call returns in time."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LONG)
    return not thread.is_alive()
