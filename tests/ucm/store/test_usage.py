"""A root's usage, the election of an evictor, and writes beyond the capacity."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import create_autospec

import pytest

from tests.ucm.store.workers import evict_until_killed, fill
from ucm.clock import SYSTEM
from ucm.store.base import StoreFullError
from ucm.store.factory import open_store
from ucm.store.format import HeaderCodec
from ucm.store.posix import space as posix_space
from ucm.store.posix.scan import SAMPLE_BLOCKS, Scan, scan
from ucm.store.posix.space import UNIT, State, Usage
from ucm.store.posix.tier import PosixTier
from ucm.store.tiered import TieredStore
from ucm.testing.blocks import EVEN, key, save

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.clock import SimulatedClock
    from ucm.clock import Clock
    from ucm.store.base import KVStore
    from ucm.store.config import StoreConfig
    from ucm.store.posix.space import Evictor

NAMESPACE = "n"
FILE = HeaderCodec(NAMESPACE, EVEN).file_nbytes
KEYS = [key(number) for number in range(40)]
SPAWN = multiprocessing.get_context("spawn")


def used(store: KVStore) -> int | None:
    return store.stats()["posix"].used_bytes


def evictor_of(store: KVStore) -> Evictor:
    assert isinstance(store, TieredStore)
    tier = store._tiers[0]
    assert isinstance(tier, PosixTier)
    return tier._directories[0].evictor


def test_all_writers_count_together(tmp_path: Path) -> None:
    one, two = Usage(str(tmp_path)), Usage(str(tmp_path))
    assert one.read() is None
    assert one.add(2 * UNIT, None) == State(2 * UNIT, None, 2)
    assert two.add(1, None) == State(3 * UNIT, None, 3)
    assert two.add(1, 3 * UNIT) is None
    assert one.read() == State(3 * UNIT, 2 * UNIT, 3)  # the evictor must make room for the refused one
    assert one.add(UNIT, 4 * UNIT) == State(4 * UNIT, 2 * UNIT, 4)


def test_of_two_that_find_room_for_one_at_a_time_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, write = Usage(str(tmp_path)), Usage(str(tmp_path)), os.write
    assert one.add(2 * UNIT, 4 * UNIT)
    overtaken = list[State | None]()

    def slow(descriptor: int, data: bytes, /) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            overtaken.append(other.add(2 * UNIT, 4 * UNIT))
        return write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", slow)
        assert one.add(2 * UNIT, 4 * UNIT) is None
    assert overtaken == [State(4 * UNIT, None, 4)]
    state = one.read()
    assert state is not None
    assert (state.nbytes, state.limit) == (6 * UNIT, 2 * UNIT)


def test_the_evictor_sets_the_figure_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Usage(str(tmp_path))
    assert not usage.elect()
    before = usage.add(5 * UNIT, None)
    assert before is not None
    assert usage.elect()
    usage.add(UNIT, None)  # while it scans
    usage.ask(7)
    usage.reset(100 * UNIT, before, None)
    assert usage.read() == State(101 * UNIT, None, 6, is_scanned=True)
    usage.subtract(UNIT)
    assert usage.read() == State(100 * UNIT, None, 6, is_scanned=True)
    monkeypatch.setattr("ucm.store.posix.space._LONGEST", 5)
    usage.empty()
    assert usage.read() == State(100 * UNIT, None, 0, is_scanned=True)
    usage.close()


def test_what_is_written_while_the_tally_is_emptied_counts(
    config: StoreConfig, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, late = os.ftruncate, list[int]()

    def slow(descriptor: int, length: int) -> None:
        if length == 16 and not late:  # not a block's
            late.append(1)
            save(store, KEYS[4:5], EVEN)
        cut(descriptor, length)

    monkeypatch.setattr(posix_space, "_LONGEST", 1)
    with open_store(replace(config, posix_capacity_bytes=100 * FILE), NAMESPACE, EVEN, clock=clock) as store:
        monkeypatch.setattr(os, "ftruncate", create_autospec(cut, side_effect=slow))
        save(store, KEYS[:4], EVEN)
        clock.run_until(lambda: bool(late))
        clock.advance(5.0)
        assert used(store) == 5 * FILE


def test_one_is_elected(tmp_path: Path) -> None:
    usages = [Usage(str(tmp_path)) for _ in range(3)]
    usages[0].add(1, None)
    assert [usage.elect() for usage in usages] == [True, False, False]
    assert [usage.elect() for usage in usages] == [True, False, False]
    usages[0].close()
    assert [usage.elect() for usage in usages[1:]] == [True, False]
    # The file is deleted and created again: the new one has one evictor.
    Path(tmp_path, "USED").unlink()
    assert not usages[1].elect()
    usages[2].add(1, None)
    assert [usage.elect() for usage in usages] == [True, False, False]


def test_another_takes_over_from_a_process_that_is_killed(config: StoreConfig) -> None:
    usage = Usage(config.directories[0])
    mine, its = SPAWN.Pipe()
    process = SPAWN.Process(target=evict_until_killed, args=(config.directories[0], its))
    process.start()
    its.close()
    assert mine.recv()
    assert not usage.elect()
    process.kill()
    process.join()
    assert usage.elect()
    usage.close()


def test_a_file_system_without_locks(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, said: list[str], clock: SimulatedClock
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    limited = replace(config, posix_capacity_bytes=10 * FILE)
    with (
        open_store(limited, NAMESPACE, EVEN, clock=clock) as one,
        open_store(limited, NAMESPACE, EVEN, clock=clock) as two,
    ):
        for number in range(30):
            save((one, two)[number % 2], KEYS[number : number + 1], EVEN)
        clock.run_until(lambda: bool(one.stats()["posix"].evicted_blocks + two.stats()["posix"].evicted_blocks))
        clock.run_until(lambda: scan(config.directories[0]).nbytes <= 10 * FILE)
    assert len([line for line in said if "has no locks" in line]) == 2


def test_a_write_beyond_the_capacity_is_dropped_and_counted(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    """This holds however far the evictor lags behind."""
    monkeypatch.setattr(Usage, "elect", lambda self: False)
    with open_store(
        replace(config, posix_capacity_bytes=10 * FILE, failures_until_rest=1), NAMESPACE, EVEN, clock=clock
    ) as store:
        result = save(store, KEYS, EVEN)
        assert len(result.done) == 10
        assert {type(error) for error in result.failed.values()} == {StoreFullError}
        assert store.stats()["posix"].failures == {"save.full": 30}
        assert used(store) == 10 * FILE == scan(config.directories[0]).nbytes
        # It is not a failure of the medium: nothing rests, and existing blocks are found.
        assert store.lookup(KEYS).count(True) == 10
        shutil.rmtree(Path(config.directories[0], NAMESPACE))
        Path(config.directories[0], "USED").unlink()
        assert save(store, KEYS[:3], EVEN).failed == {}


def test_a_write_waits_for_the_evictor(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    """A burst of four times the capacity is written completely, with only a few scans to make room."""
    scans = []

    def scanning(root: str, sample_blocks: int = SAMPLE_BLOCKS, *, clock: Clock = SYSTEM) -> Scan:
        scans.append(scan(root, sample_blocks, clock=clock))
        return scans[-1]

    monkeypatch.setattr(posix_space, "scan", scanning)
    with open_store(replace(config, posix_capacity_bytes=20 * FILE), NAMESPACE, EVEN, clock=clock) as store:
        assert save(store, [key(number) for number in range(80)], EVEN).failed == {}
        assert store.stats()["posix"].evicted_blocks >= 60
        assert scan(config.directories[0]).nbytes <= 20 * FILE
    assert len(scans) <= 8


def test_an_evictor_that_does_not_come_is_waited_for_once(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    monkeypatch.setattr(Usage, "elect", lambda self: False)
    one_thread = replace(config, posix_capacity_bytes=10 * FILE, save_threads=1)
    with open_store(one_thread, NAMESPACE, EVEN, clock=clock) as store:
        began = clock.monotonic()
        assert len(save(store, KEYS, EVEN).failed) == 30
        assert posix_space._PATIENCE_SECONDS <= clock.monotonic() - began < 2 * posix_space._PATIENCE_SECONDS


def test_each_written_block_counts_once(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS, EVEN)
        save(store, [*KEYS, key(100)], EVEN)
        assert used(store) == (len(KEYS) + 1) * FILE


def test_what_was_not_written_counts_until_the_next_scan(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "made up")

    with open_store(replace(config, rest_seconds=0.0), NAMESPACE, EVEN, clock=clock) as store:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", refuse)
            assert len(save(store, KEYS[:4], EVEN).failed) == 4
        save(store, KEYS, EVEN)
        assert used(store) == (4 + len(KEYS)) * FILE
        clock.advance(posix_space._SCAN_SECONDS)
        assert used(store) == len(KEYS) * FILE


@pytest.mark.parametrize("steps", range(4))
def test_a_scan_misses_no_block_that_is_being_written(
    config: StoreConfig, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock, steps: int
) -> None:
    """Another process accounts for a block after so many steps of the evictor's: a look, a scan, a correction."""
    root, add = config.directories[0], Usage.add
    state: State | None = None

    def meanwhile(self: Usage, nbytes: int, limit: float | None) -> State | None:
        nonlocal state
        before, found = State(0, None, 0), 0.0
        for step in range(4):
            if step == steps:
                state = add(self, nbytes, limit)
            if step == 0:
                before = usage.read() or before
            elif step == 1:
                found = scan(root).nbytes
            elif step == 2:
                usage.reset(found, before, None)
        return state

    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS[:1], EVEN)
        usage = evictor_of(store)._usage
        clock.run_until(usage.elect)
        monkeypatch.setattr(Usage, "add", meanwhile)
        save(store, KEYS[1:2], EVEN)
        now = usage.read()
        assert now is not None
        assert scan(root).nbytes == 2 * FILE <= now.nbytes


def test_what_is_used_is_known_without_a_capacity(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, EVEN, clock=clock) as one, open_store(config, "other", EVEN, clock=clock) as two:
        save(one, KEYS[:10], EVEN)
        save(two, KEYS[:5], EVEN)
        assert used(two) == 15 * FILE
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS[:11], EVEN)
        assert used(store) == 16 * FILE


def test_what_people_delete_is_noticed(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS, EVEN)
        for path in list(Path(config.directories[0]).rglob("??/*"))[:10]:
            path.unlink()
        assert used(store) == 40 * FILE
        clock.advance(posix_space._SCAN_SECONDS)
        assert used(store) == 30 * FILE


def test_a_store_of_before_is_counted(config: StoreConfig, clock: SimulatedClock) -> None:
    """If there is no usage file yet, an evictor starts with a scan."""
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        save(store, KEYS, EVEN)
    Path(config.directories[0], "USED").unlink()
    with open_store(replace(config, posix_capacity_bytes=20 * FILE), NAMESPACE, EVEN, clock=clock) as store:
        save(store, [key(100)], EVEN)
        clock.run_until(lambda: scan(config.directories[0]).nbytes <= 20 * FILE)


def test_the_smallest_capacity_wins_whoever_evicts(config: StoreConfig, clock: SimulatedClock) -> None:
    with open_store(config, NAMESPACE, EVEN, clock=clock) as one:
        save(one, KEYS, EVEN)
        clock.run_until(lambda: evictor_of(one)._elected)
        with open_store(replace(config, posix_capacity_bytes=20 * FILE), NAMESPACE, EVEN, clock=clock) as two:
            clock.run_until(lambda: not save(two, [key(100)], EVEN).failed)
            clock.run_until(lambda: one.stats()["posix"].evicted_blocks >= 20)


@contextmanager
def stopped(processes: list[SpawnProcess]) -> Iterator[None]:
    """Stop the processes meanwhile: otherwise deletions during a scan are mixed with new writes."""
    living = [process.pid for process in processes if process.pid and not has_ended(process.pid)]
    for pid in living:
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    yield
    for pid in living:
        os.kill(pid, signal.SIGCONT)


def has_ended(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # and its end has been noticed
        return True


def test_many_writers_keep_to_the_capacity(config: StoreConfig) -> None:
    """Four engines of two ranks each keep to it, however busy the machine is."""
    capacity = 200 * FILE
    limited = replace(config, posix_capacity_bytes=capacity)
    writers, pipes = list[SpawnProcess](), list[Connection]()
    for number in range(8):
        mine, its = SPAWN.Pipe(duplex=False)
        writers.append(SPAWN.Process(target=fill, args=(limited, f"rank{number % 2}", EVEN, number, its)))
        writers[-1].start()
        its.close()
        pipes.append(mine)
    most = 0.0
    while pipes:
        for pipe in wait(pipes):
            assert isinstance(pipe, Connection)
            try:
                pipe.recv()
            except EOFError:
                pipes.remove(pipe)
        with stopped(writers):
            most = max(most, scan(config.directories[0]).nbytes)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 8
    assert 0.9 * capacity < most <= 1.05 * capacity


def test_an_evictor_that_is_stopped_as_it_wakes_does_not_sleep_again(
    config: StoreConfig, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:
        evictor = evictor_of(store)

        wake = evictor._wake
        clear = wake.clear

        def stop_and_clear() -> None:
            evictor.stop()
            clear()

        monkeypatch.setattr(wake, "clear", stop_and_clear)
        save(store, KEYS[:1], EVEN)
        clock.run_until_idle()
        clock.advance(posix_space._LOOK_SECONDS[0])
        assert "ucm-evictor" not in clock.alive
