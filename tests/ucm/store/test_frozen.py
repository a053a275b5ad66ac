"""Media that do not answer delay only callers that need them, and those for one deadline per rest."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

from tests.ucm.store.frozen import FrozenDirectory
from ucm.store import copying, tiered
from ucm.store.base import BlockMissingError, StoreFullError, StoreTimeoutError
from ucm.store.factory import open_store
from ucm.store.format import aligned_buffer
from ucm.store.health import Pool, RefusableJob
from ucm.store.posix import files as posix_files
from ucm.store.posix import paths as posix_paths
from ucm.store.posix import space as posix_space
from ucm.store.posix.directory import Directory
from ucm.store.posix.tier import PosixTier
from ucm.store.tier import TierOptions, TierPlace, ValueTier
from ucm.testing.blocks import EVEN, content, fetch, filled, in_order, key, save

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.clock import SimulatedClock
    from ucm.clock import Event
    from ucm.store.base import BlockKey, BlockTransfer, Buffer, KVStore, Task, TaskResult
    from ucm.store.config import StoreConfig
    from ucm.store.tier import Outcome

#: Enough keys for both of two directories to have some, whatever their names.
KEYS = [key(number) for number in range(64)]
HERE = "tests.ucm.store.test_frozen"
#: The deadline of a server that does not answer, and how long a tier rests afterwards, in seconds.
TIMEOUT, REST = 0.1, 60.0


class Server:
    """The tests' control of the tier's medium."""

    values: dict[BlockKey, bytes]
    thawed: Event
    timeouts = 0
    calls = 0


SERVER = Server()


class ServerTier(ValueTier):
    """Keeps its deadlines, like a server. When thawed it answers at once, however late."""

    def __init__(self, options: TierOptions, place: TierPlace) -> None:
        super().__init__("server", place, TIMEOUT, TIMEOUT)

    def _answer(self, deadline: float) -> None:
        SERVER.calls += 1
        if not SERVER.thawed.wait(max(0.0, deadline - self.clock.monotonic())):
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

    def put(self, key: BlockKey, pieces: Sequence[Buffer | bytearray], deadline: float) -> None:
        self._answer(deadline)
        SERVER.values[key] = b"".join(pieces)

    def remove(self, key: BlockKey, deadline: float) -> None:
        del SERVER.values[key]


class FullTier(ServerTier):
    """Answers, but has no room."""

    puts = 0

    def put(self, key: BlockKey, pieces: Sequence[Buffer | bytearray], deadline: float) -> None:
        type(self).puts += 1
        raise StoreFullError(f"no room for {len(pieces)} pieces of {key.hex()} by {deadline}")


@pytest.fixture
def server(clock: SimulatedClock) -> Server:
    SERVER.values, SERVER.thawed = {}, clock.event()
    SERVER.timeouts = SERVER.calls = 0
    SERVER.thawed.set()
    return SERVER


@pytest.fixture
def both(config: StoreConfig) -> StoreConfig:
    return replace(config, pipeline=f"Posix|{HERE}:ServerTier", rest_seconds=REST)


def empty(config: StoreConfig) -> None:
    for path in Path(config.directories[0]).rglob("??/*"):
        if path.parent.name not in {"tmp", "n"}:
            path.unlink()


def eventually(clock: SimulatedClock, store: KVStore, tier: str, **values: float) -> None:
    clock.run_until(lambda: all(getattr(store.stats()[tier], name) == value for name, value in values.items()))


def test_a_full_server_rests_from_writes_and_is_read(
    config: StoreConfig, server: Server, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FullTier, "puts", 0)
    full = replace(config, pipeline=f"{HERE}:FullTier", rest_seconds=REST, save_threads=1)
    with open_store(full, "n", EVEN, clock=clock) as store:
        result = save(store, KEYS, EVEN)
        assert {error.cause for error in result.failed.values()} == {"full"}
        assert FullTier.puts == full.failures_until_rest < len(KEYS)
        server.values[KEYS[0]] = b"a block that is there"
        assert store.lookup(KEYS[:2]) == [True, False]
        assert set(save(store, KEYS[:2], EVEN).done) == set(KEYS[:1])
        clock.advance(REST)
        save(store, KEYS[1:], EVEN)
        assert FullTier.puts == full.failures_until_rest + 1, "the probe"


# Written behind.


def test_a_frozen_lower_tier_delays_no_save(both: StoreConfig, server: Server, clock: SimulatedClock) -> None:
    with open_store(both, "n", EVEN, clock=clock) as store:
        server.thawed.clear()
        began = clock.monotonic()
        saved = save(store, KEYS, EVEN)
        assert set(saved.done.values()) == {"posix"}
        assert store.lookup(KEYS) == [True] * len(KEYS)
        assert clock.monotonic() == began
        eventually(clock, store, "server", resting=1, queued_blocks=len(KEYS))
        assert not store.flush(TIMEOUT)
        assert server.timeouts == 1


def test_what_waits_is_written_after_the_rest(both: StoreConfig, server: Server, clock: SimulatedClock) -> None:
    with open_store(both, "n", EVEN, clock=clock) as store:
        server.thawed.clear()
        save(store, KEYS, EVEN)
        eventually(clock, store, "server", resting=1)
        server.thawed.set()
        assert not store.flush(TIMEOUT)
        clock.advance(REST)
        assert store.flush(REST)
        stats = store.stats()["server"]
        assert (stats.saved_blocks, stats.saved_bytes) == (len(KEYS), len(KEYS) * EVEN.nbytes)
    assert set(server.values) == set(KEYS)


def test_what_falls_behind_is_dropped_and_counted(both: StoreConfig, server: Server, clock: SimulatedClock) -> None:
    limited = replace(both, write_behind_bytes=5 * (EVEN.nbytes + 4096))
    with open_store(limited, "n", EVEN, clock=clock) as store:
        server.thawed.clear()
        assert save(store, KEYS, EVEN).failed == {}
        assert store.stats()["server"].failures["save.full"] == len(KEYS) - 5
        eventually(clock, store, "server", queued_bytes=5 * (EVEN.nbytes + 4096))


def test_closing_waits_for_no_frozen_tier_and_counts_what_is_lost(
    both: StoreConfig, server: Server, clock: SimulatedClock
) -> None:
    store = open_store(both, "n", EVEN, clock=clock)
    server.thawed.clear()
    save(store, KEYS, EVEN)
    eventually(clock, store, "server", resting=1)
    began = clock.monotonic()
    store.close()
    assert clock.monotonic() - began < copying.CLOSE_SECONDS / 10
    assert store.stats()["server"].failures["save.unavailable"] == len(KEYS)


@pytest.mark.parametrize("clock", range(5), indirect=True, ids="order {}".format)
def test_closing_waits_once_for_all_writes_that_hang(
    config: StoreConfig, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    """Each of four directories stops answering while a block is written to it."""
    roots = [tmp_path / f"low-{number}" for number in range(4)]
    for root in roots:
        root.mkdir()
    low = replace(config, pipeline="Dram|Posix", dram_directory=memory, directories=tuple(map(str, roots)))
    frozen = FrozenDirectory(monkeypatch, str(tmp_path / "low-"), clock=clock)
    frozen.thawed.set()
    hanging, together = set[str](), clock.event()
    write = Directory.write

    def hang(self: Directory, key: BlockKey, pieces: Sequence[Buffer | bytearray]) -> None:
        hanging.add(self.layout.root)
        if len(hanging) == len(roots):
            frozen.thawed.clear()
            together.set()
        together.wait()
        write(self, key, pieces)

    monkeypatch.setattr(Directory, "write", hang)
    store = open_store(low, "n", EVEN, clock=clock)
    save(store, KEYS, EVEN)
    clock.run_until(lambda: len(hanging) == len(roots))
    clock.run_until_idle()
    assert frozen.calls >= len(roots)
    began = clock.monotonic()
    store.close()
    assert clock.monotonic() - began < 2 * copying.CLOSE_SECONDS
    assert store.stats()["posix"].failures["save.unavailable"] == len(KEYS)
    frozen.thawed.set()


def test_closing_writes_what_waits(both: StoreConfig, server: Server, clock: SimulatedClock) -> None:
    with open_store(both, "n", EVEN, clock=clock) as store:
        save(store, KEYS, EVEN)
    assert set(server.values) == set(KEYS)


def test_a_block_evicted_before_its_turn_is_dropped_and_counted(
    both: StoreConfig, server: Server, clock: SimulatedClock
) -> None:
    with open_store(both, "n", EVEN, clock=clock) as store:
        server.thawed.clear()
        save(store, KEYS, EVEN)
        eventually(clock, store, "server", resting=1)
        empty(both)
        server.thawed.set()
        clock.advance(REST)
        assert store.flush(REST)
        assert store.stats()["server"].failures["save.missing"] == len(KEYS)
    assert server.values == {}


# Looked up and loaded.


def test_a_dead_tier_costs_one_deadline_per_rest(both: StoreConfig, server: Server, clock: SimulatedClock) -> None:
    with open_store(both, "n", EVEN, clock=clock) as store:
        server.thawed.clear()
        for _ in range(20):
            assert store.lookup(KEYS) == [False] * len(KEYS)
            assert store.lookup_on_prefix(KEYS) == 0
            assert set(fetch(store, KEYS, EVEN)[1]) == set(KEYS)
        assert server.timeouts == 1


def test_tiers_that_alternate_are_asked_for_growing_parts(
    both: StoreConfig, server: Server, clock: SimulatedClock
) -> None:
    with open_store(both, "n", EVEN, clock=clock) as store:
        save(store, KEYS, EVEN)
        assert store.flush(REST)
        for index, block in enumerate(KEYS):
            if index % 2:
                del server.values[block]
            else:
                next(Path(both.directories[0]).rglob(f"{block.hex()[:2]}/{block.hex()[2:]}")).unlink()
        server.calls = 0
        assert store.lookup_on_prefix(KEYS) == len(KEYS)
        assert server.calls == 3  # for 4, 16 and the last 44 of 64 blocks


def test_what_comes_from_the_lower_tier_is_kept_without_another_read(
    both: StoreConfig, server: Server, clock: SimulatedClock
) -> None:
    with open_store(both, "n", EVEN, clock=clock) as store:
        save(store, KEYS, EVEN)
        assert store.flush(REST)
        empty(both)
        server.calls = 0
        loaded, failed = fetch(store, KEYS, EVEN)
        assert (loaded, failed) == ({block: content(block, EVEN) for block in KEYS}, {})
        eventually(clock, store, "posix", saved_blocks=2 * len(KEYS))
        assert fetch(store, KEYS, EVEN)[0] == loaded
        assert server.calls == len(KEYS)


def within(clock: SimulatedClock, seconds: float, task: Task) -> TaskResult:
    """Return the result of a task that ends in so many seconds."""
    began = clock.monotonic()
    result = task.wait()
    assert clock.monotonic() - began <= seconds
    return result


def test_without_memory_for_a_copy_a_loaded_block_is_not_kept_and_nobody_waits(
    both: StoreConfig, server: Server, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    with open_store(both, "n", EVEN, clock=clock) as store:
        save(store, KEYS, EVEN)
        assert store.flush(REST)
        empty(both)
        with monkeypatch.context() as patched:
            patched.setattr(tiered, "aligned_buffer", lambda nbytes: aligned_buffer(nbytes << 40))
            task = store.load([memory.transfer() for memory in filled(KEYS, EVEN)])
            assert set(within(clock, REST, task).done) == set(KEYS)
        assert store.stats()["posix"].failures == {"promote.other": len(KEYS)}
        fetch(store, KEYS, EVEN)
        eventually(clock, store, "posix", saved_blocks=2 * len(KEYS))
        del server


def test_a_tier_that_breaks_its_contract_costs_its_blocks_and_keeps_nobody_waiting(
    both: StoreConfig, server: Server, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    def less(self: ServerTier, blocks: Sequence[BlockTransfer], deadline: float) -> list[Outcome]:
        del self, blocks, deadline
        return []

    with open_store(both, "n", EVEN, clock=clock) as store:
        save(store, KEYS, EVEN)
        assert store.flush(REST)
        empty(both)
        monkeypatch.setattr(ServerTier, "read_many", less)
        task = store.load([memory.transfer() for memory in filled(KEYS, EVEN)])
        assert {error.cause for error in within(clock, REST, task).failed.values()} == {"other"}
        del server


# Stuck in an uninterruptible system call.


class Hanging:
    """Blocks every call on a directory until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: str, clock: SimulatedClock) -> None:
        self.held, self.over = clock.event(), clock.event()
        self.calls: list[str] = []
        open_file = posix_paths.open_file

        def hang(path: str, flags: int, mode: int = 0, group: int | None = None) -> tuple[int, os.stat_result]:
            if path.startswith(root):
                self.calls.append(path)
                self.held.set()
                self.over.wait()
            return open_file(path, flags, mode, group)

        monkeypatch.setattr(posix_files, "open_file", hang)


@pytest.mark.parametrize("clock", range(5), indirect=True, ids="order {}".format)
def test_a_stuck_directory_does_not_starve_another(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    roots = [str(tmp_path / name) for name in ("a", "b")]
    for root in roots:
        Path(root).mkdir()
    two = replace(config, directories=tuple(roots), load_threads=2)
    with open_store(two, "n", EVEN, clock=clock) as store:
        save(store, KEYS, EVEN)
        there = {block for block in KEYS if list(Path(roots[0]).rglob(block.hex()[2:]))}
        assert 2 < len(there) < len(KEYS), "more than there are threads"
        hanging = Hanging(monkeypatch, roots[0], clock)
        memories = filled(KEYS, EVEN)
        stuck = store.load([memory.transfer() for memory in memories if memory.key in there])
        well = store.load([memory.transfer() for memory in memories if memory.key not in there])
        assert set(well.wait().done) == set(KEYS) - there
        assert not stuck.check(), "the memory that a stuck thread may yet write to is not given back"
        clock.run_until(lambda: len(hanging.calls) == two.load_threads)
        clock.advance(two.stuck_seconds)
        again = store.load([memory.transfer() for memory in filled(there, EVEN)]).wait()
        assert {error.cause for error in again.failed.values()} == {"timeout"}
        hanging.over.set()
        assert set(stuck.wait().done) | set(stuck.wait().failed) == there
        assert fetch(store, KEYS, EVEN)[1] == {}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_store_is_closed_beside_a_stuck_thread(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock, threads: int
) -> None:
    store = open_store(replace(config, load_threads=threads), "n", EVEN, clock=clock)
    save(store, KEYS, EVEN)
    hanging = Hanging(monkeypatch, config.directories[0], clock)
    store.load([memory.transfer() for memory in filled(KEYS[:1], EVEN)])
    clock.run_until(hanging.held.is_set)
    clock.advance(config.stuck_seconds)
    store.close()
    assert len(clock.alive) == 1, "the threads that have nothing to do end, and the stuck one is left to itself"


def test_stuck_threads_are_replaced_once_per_rest_and_not_without_end(clock: SimulatedClock) -> None:
    over = clock.event()
    refused: list[int] = []
    done: list[int] = []
    pool = Pool("test", 1, patience=10.0, rest=30.0, clock=clock)

    def submit(job: int) -> None:
        def run() -> None:
            over.wait()
            done.append(job)

        pool.submit([RefusableJob(run, lambda: refused.append(job))])

    for job in range(100):
        submit(job)
        clock.run_until_idle()
        clock.advance(pool._patience)
        pool.relieve()
        assert len(pool._threads) == 1 + min(job, 8)
        clock.advance(pool._rest)
    assert refused == list(range(9, 100))
    over.set()
    clock.run_until_idle()
    assert len(pool._threads) == 1
    submit(100)
    pool.close()
    assert sorted(done) == [*range(9), 100]


# Looked up in a directory that does not answer.


class TwoRoots:
    """A store in two directories, one of which freezes."""

    def __init__(
        self, config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
    ) -> None:
        roots = [str(tmp_path / name) for name in ("a", "b")]
        for root in roots:
            Path(root).mkdir()
        self.config = replace(config, directories=tuple(roots))
        self.store = open_store(self.config, "n", EVEN, clock=clock)
        save(self.store, KEYS, EVEN)
        assert isinstance(self.store, tiered.TieredStore)
        [tier] = self.store._tiers
        assert isinstance(tier, PosixTier)
        self.tier = tier
        self.lost = [block for block in KEYS if list(Path(roots[0]).rglob(block.hex()[2:]))]
        assert 0 < len(self.lost) < len(KEYS)
        self.left = [block not in self.lost for block in KEYS]
        self.directory = FrozenDirectory(monkeypatch, roots[0], clock=clock)

    def give_up(self) -> None:
        assert self.store.lookup(self.lost) == [False] * len(self.lost)
        assert self.directory.held.is_set()


@pytest.fixture
def two(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> Iterator[TwoRoots]:
    found = TwoRoots(config, tmp_path, monkeypatch, clock)
    yield found
    found.directory.thawed.set()
    found.store.close()


@pytest.mark.parametrize("clock", range(5), indirect=True, ids="order {}".format)
def test_a_frozen_directory_costs_one_deadline_per_rest_and_the_other_is_found(
    two: TwoRoots, clock: SimulatedClock
) -> None:
    two.give_up()
    calls = two.directory.calls
    for _ in range(3):
        assert two.store.lookup(KEYS) == two.left
        assert two.store.lookup_on_prefix(KEYS) == two.left.index(False)
    assert two.directory.calls == calls
    stats = two.store.stats()["posix"]
    assert (stats.failures, stats.resting) == ({"lookup.timeout": 1}, 0.5)
    two.directory.thawed.set()
    clock.advance(two.config.rest_seconds)
    assert two.store.lookup(KEYS) == [True] * len(KEYS)
    assert two.store.lookup_on_prefix(KEYS) == len(KEYS)


def test_a_directory_that_stays_frozen_keeps_a_few_threads_and_no_more(two: TwoRoots, clock: SimulatedClock) -> None:
    for _ in range(20):
        two.give_up()
        clock.advance(max(two.config.rest_seconds, two.config.stuck_seconds))
    assert len(two.tier._directories[0].lookups._threads) <= 10
    assert two.store.lookup([block for block in KEYS if block not in two.lost]) == [True] * two.left.count(True)


def test_a_store_is_closed_beside_lookups_that_hang(
    two: TwoRoots, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.give_up()
    clock.advance(two.config.stuck_seconds)
    two.store.close()
    assert not two.directory.thawed.is_set()


def test_what_a_slow_directory_has_told_by_the_deadline_is_believed(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    """A slow directory is not put to rest for that."""
    with open_store(config, "n", EVEN, clock=clock) as store:
        save(store, KEYS, EVEN)
        assert isinstance(store, tiered.TieredStore)
        [tier] = store._tiers
        assert isinstance(tier, PosixTier)
        goes_on, access = clock.event(), os.access
        tests: list[str] = []

        def some(path: str, mode: int, **options: Any) -> bool:
            tests.append(path)
            if len(tests) == 5:
                goes_on.wait()
            return access(path, mode, **options)

        with monkeypatch.context() as patched:
            patched.setattr(os, "access", create_autospec(os.access, side_effect=some))
            assert tier.contains(KEYS, clock.monotonic() + 1.0) == [True] * 4 + [False] * (len(KEYS) - 4)
            assert tier.stats().failures == {}
            goes_on.set()
            clock.run_until_idle()
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
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> Iterator[tuple[TwoRoots, FrozenDirectory]]:
    """A store whose two directories together hold twice the saved blocks."""
    limited = replace(config, posix_capacity_bytes=2 * len(KEYS) * (EVEN.nbytes + 4096))
    found = TwoRoots(limited, tmp_path, monkeypatch, clock)
    yield found, found.directory
    found.directory.thawed.set()
    found.store.close()


def test_a_frozen_directory_stops_eviction_in_no_other(
    small: tuple[TwoRoots, FrozenDirectory], clock: SimulatedClock
) -> None:
    two, directory = small
    clock.run_until(directory.held.is_set)  # its evictor has come across it
    _, well = here_and_there(two, 4 * len(KEYS))
    for at in range(0, len(well), 16):
        assert save(two.store, well[at : at + 16], EVEN).failed == {}, "the directory is full, and nobody makes room"
    assert two.store.stats()["posix"].evicted_blocks


def test_an_evictor_that_a_directory_keeps_is_not_waited_for(
    small: tuple[TwoRoots, FrozenDirectory], monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    two, directory = small
    clock.run_until(directory.held.is_set)
    clock.advance(posix_space.CLOSE_SECONDS)
    began = clock.monotonic()
    two.tier.close()
    assert clock.monotonic() - began < posix_space.CLOSE_SECONDS / 10
    assert clock.alive.count("ucm-evictor") == 1, "the other one is"


def test_times_of_use_are_not_renewed_by_whoever_closes(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    """The directory may have stopped answering since the evictor's last check."""
    two = TwoRoots(config, tmp_path, monkeypatch, clock)
    clock.run_until_idle()
    assert not two.directory.held.is_set(), "its evictor waits for the next check"
    two.tier.renew(in_order(two.lost[:1]), is_new=True)
    two.tier.close()
    assert two.directory.held.is_set()
