"""Two hosts that share a store on one file system: two mounts, the other host a process of its own.

By default a CephFS, whose programs are a download of 56 MB. So only ``nox -s shared`` runs these tests, and there they
do not skip. `GIVEN` names two mounts of another file system instead, and `SERVER` the process that serves it, which a
test stops for a while.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import pytest

from tests.e2e.bench.lookups import BLOCKS as BLOCKS_OF_A_REQUEST
from tests.e2e.bench.lookups import GEOMETRY, Scheduler, keys_of
from tests.ucm.store.ceph import Ceph, lacking
from tests.ucm.store.conftest import SHARED_MEMORY
from tests.ucm.store.workers import become_another_host, owner_name_of_this_process, save_there, store_command
from ucm import cli
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.format import HeaderCodec
from ucm.store.posix.layout import Layout, owner_name
from ucm.testing import StoreConformance
from ucm.testing.blocks import EVEN, content, fetch, key
from ucm.testing.conformance import save_and_fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

NAMESPACE = "model/rank-0"
KEYS = [key(number) for number in range(40)]
ALL = {block: content(block, EVEN) for block in KEYS}
FILE = HeaderCodec(NAMESPACE, EVEN).file_nbytes
#: The variables of another file system: the directories of its two mounts with a colon between; its server's id.
GIVEN, SERVER = "UCM_SHARED_MOUNTS", "UCM_SHARED_SERVER"
#: Seconds after which a host has seen what another one has deleted; NFS's cache of attributes may keep it for a minute.
SEEN = 90.0
#: Seconds for which the server lets a host wait for a file that another one has just renamed.
TICK = 5.0
#: The scheduler's thread may be without a processor for so long on a busy machine, in seconds.
NOT_WAITING = 1.0

if os.environ.get("UCM_SHARED") != "1":
    pytest.skip("two hosts on one CephFS: only `nox -s shared` runs these tests", allow_module_level=True)


@pytest.fixture(scope="module")
def ceph() -> Iterator[Ceph]:
    reason = lacking()
    assert not reason, reason
    directory = Path(mkdtemp(dir=SHARED_MEMORY, prefix="ucm-ceph-"))
    try:
        with Ceph(directory) as running:
            yield running
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def mounts(request: pytest.FixtureRequest) -> list[Path]:
    if given := os.environ.get(GIVEN):
        return [Path(place) for place in given.split(":")]
    ceph = request.getfixturevalue("ceph")
    return [ceph.mount("one"), ceph.mount("two")]


@pytest.fixture
def frozen(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager[None]]:
    """Return what stops the server of files' names."""

    @contextmanager
    def ceph() -> Iterator[None]:
        running = request.getfixturevalue("ceph")
        running.freeze("mds")
        try:
            yield
        finally:
            running.thaw("mds")

    @contextmanager
    def given() -> Iterator[None]:
        os.kill(int(os.environ[SERVER]), signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(int(os.environ[SERVER]), signal.SIGCONT)

    if GIVEN in os.environ and SERVER not in os.environ:
        pytest.skip(f"{SERVER} does not say which process serves {GIVEN}")
    return given if GIVEN in os.environ else ceph


@pytest.fixture
def shared(mounts: list[Path]) -> list[StoreConfig]:
    """The same new directory as each of the hosts sees it."""
    name = f"kv-{time.time_ns()}"
    (mounts[0] / name).mkdir(mode=0o700)
    return [StoreConfig(directories=(str(mount / name),), save_nice=0) for mount in mounts]


@pytest.fixture(scope="module")
def other() -> Iterator[ProcessPoolExecutor]:
    """The other host."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=become_another_host) as host:
        assert host.submit(owner_name_of_this_process).result()[:16] != owner_name()[:16]
        yield host


def until(condition: Callable[[], bool]) -> None:
    """Wait until a host sees what another one has done."""
    deadline = time.monotonic() + SEEN
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class TestOneHost(StoreConformance):
    @pytest.fixture
    def config(self, shared: list[StoreConfig]) -> StoreConfig:
        return shared[0]


def test_what_one_host_saved_the_other_finds(shared: list[StoreConfig], other: ProcessPoolExecutor) -> None:
    here, there = shared
    with open_store(here, NAMESPACE, EVEN) as store:
        assert store.lookup(KEYS) == [False] * len(KEYS)
        assert other.submit(save_there, there, NAMESPACE, EVEN, KEYS).result() == len(KEYS)
        began = time.monotonic()
        assert store.lookup_on_prefix(KEYS) == len(KEYS), "that there was none is not remembered"
        assert time.monotonic() - began < TICK, "the server let it wait"
        assert fetch(store, KEYS, EVEN) == (ALL, {})


def test_rivals(shared: list[StoreConfig], other: ProcessPoolExecutor) -> None:
    here, there = shared
    rival = other.submit(save_and_fetch, there, NAMESPACE, EVEN, KEYS, 1)
    assert save_and_fetch(here, NAMESPACE, EVEN, KEYS, 2) == rival.result() == len(KEYS)


def test_damage_by_the_other_host(shared: list[StoreConfig], other: ProcessPoolExecutor) -> None:
    here, there = shared
    with open_store(here, NAMESPACE, EVEN) as store:
        other.submit(save_there, there, NAMESPACE, EVEN, KEYS).result()
        block = Path(Layout(there.directories[0], NAMESPACE).block(KEYS[3]))
        data = bytearray(block.read_bytes())
        data[-5] ^= 1
        block.write_bytes(data)
        loaded, failed = fetch(store, KEYS, EVEN)
        assert {found: error.cause for found, error in failed.items()} == {KEYS[3]: "corrupt"}
        assert loaded == {found: data for found, data in ALL.items() if found != KEYS[3]}
        theirs = Layout(there.directories[0], NAMESPACE).block(KEYS[3])
        until(lambda: not other.submit(os.access, theirs, os.F_OK).result())  # as the store asks
        assert other.submit(save_there, there, NAMESPACE, EVEN, KEYS).result() == len(KEYS)
        until(lambda: fetch(store, KEYS, EVEN) == (ALL, {}))  # it was in quarantine, and the other host saved it again


def test_deleting(shared: list[StoreConfig], other: ProcessPoolExecutor) -> None:
    here, there = shared
    with open_store(here, NAMESPACE, EVEN) as store:
        other.submit(save_there, there, NAMESPACE, EVEN, KEYS).result()
        assert store.lookup(KEYS) == [True] * len(KEYS)
        for age, left in ((0, True), (2 * here.stale_seconds, False)):
            unfinished = Path(Layout(here.directories[0], NAMESPACE).temporary, owner_name())
            unfinished.write_bytes(b"half a block")
            os.utime(unfinished, (time.time() - age,) * 2)
            assert other.submit(store_command, "gc", "--yes", "--directory", there.directories[0]).result() == 0
            if left:
                assert unfinished.exists(), "another host cannot see whether its writer lives"
            else:
                until(partial(lambda path: not path.exists(), unfinished))
        most = ("--to", f"{10 * FILE}B")
        assert other.submit(store_command, "gc", "--yes", "--directory", there.directories[0], *most).result() == 0
        assert store.lookup(KEYS).count(True) == 10
        assert cli.main(["store", "verify", "--directory", here.directories[0]]) == 0


def test_one_capacity_for_both(shared: list[StoreConfig], other: ProcessPoolExecutor) -> None:
    capacity = 100 * FILE
    here, there = (replace(one, posix_capacity_bytes=capacity) for one in shared)
    mine, theirs = ([key(1000 * host + number) for number in range(150)] for host in (1, 2))
    saving = other.submit(save_there, there, NAMESPACE, EVEN, theirs)
    assert save_there(here, NAMESPACE, EVEN, mine) + saving.result() > 100
    left = sum(1 for _ in Path(Layout(here.directories[0], NAMESPACE).base).glob("??/*"))
    assert 50 < left <= 105


def test_the_scheduler_does_not_wait(
    shared: list[StoreConfig], other: ProcessPoolExecutor, frozen: Callable[[], AbstractContextManager[None]]
) -> None:
    here, there = shared
    for number in range(3):
        other.submit(save_there, there, NAMESPACE, GEOMETRY, keys_of(number)).result()
    with open_store(here, NAMESPACE, GEOMETRY) as store:
        with Scheduler(store) as scheduler:
            assert scheduler.ask(0) < NOT_WAITING
        assert store.stats()["posix"].hits >= BLOCKS_OF_A_REQUEST
        with Scheduler(store) as scheduler, frozen():
            assert max(scheduler.ask(number) for number in (1, 2)) < NOT_WAITING
        until(lambda: store.lookup_on_prefix(keys_of(1)) == BLOCKS_OF_A_REQUEST)  # as soon as the server works
