"""Real process deaths, full disks and missing permissions."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.system import NotJudgedError, require_root
from tests.ucm.store.workers import live_with_limits, live_without_privileges, save_for_ever
from ucm.store.base import StoreFullError
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.format import HeaderCodec
from ucm.store.posix.layout import Layout
from ucm.store.posix.scan import clean_up
from ucm.testing.blocks import EVEN, content, fetch, key, save
from ucm.testing.conformance import PROCESSES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.clock import SimulatedClock

NAMESPACE = "n"
KEYS = [key(number) for number in range(200)]
NOBODY = 65534


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that holds 20 blocks."""
    require_root("only root can mount a small tmpfs")
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={20 * HeaderCodec('n', EVEN).file_nbytes},mode=700", "ucm-test", path],  # noqa: S607
        capture_output=True,
        check=False,
        text=True,
    )
    if mounted.returncode:
        raise NotJudgedError("full disks", f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)  # noqa: S607 - as mount


def test_a_writer_killed_at_any_moment_leaves_whole_blocks(config: StoreConfig) -> None:
    chance = np.random.default_rng(11)
    for attempt in range(8):
        mine, its = PROCESSES.Pipe(duplex=False)
        writers = [
            PROCESSES.Process(target=save_for_ever, args=(config, NAMESPACE, EVEN, 2 * attempt + i, its))
            for i in (0, 1)
        ]
        for writer in writers:
            writer.start()
        its.close()
        root = Path(config.directories[0], NAMESPACE)
        for _ in range(int(chance.integers(50, 150))):
            mine.recv()
        for writer in writers:
            writer.kill()
        for writer in writers:
            writer.join()
        with open_store(config, NAMESPACE, EVEN) as store:
            there = [block for block, found in zip(KEYS, store.lookup(KEYS), strict=True) if found]
            loaded, failed = fetch(store, there, EVEN)
            assert there
            assert failed == {}
            assert loaded == {block: content(block, EVEN) for block in there}
        for bucket in root.glob("??"):
            shutil.rmtree(bucket)
        clean_up(config.directories[0], 3600)
        assert list((root / "tmp").iterdir()) == []


def test_a_full_disk(small_disk: Path, said: list[str]) -> None:
    config = StoreConfig(directories=(str(small_disk),), rest_seconds=0.0)
    keys = KEYS[:40]
    with open_store(config, NAMESPACE, EVEN) as store:
        outcome = save(store, keys, EVEN)
        assert outcome.done
        assert {type(error) for error in outcome.failed.values()} == {StoreFullError}
        assert len([line for line in said if "save.full" in line]) == 1
        loaded, _ = fetch(store, keys, EVEN)
        assert loaded == {block: content(block, EVEN) for block in outcome.done}
        assert list(Path(Layout(str(small_disk), NAMESPACE).temporary).iterdir()) == []
        # Saving resumes once there is room again.
        for block in list(outcome.done)[:5]:
            Path(Layout(str(small_disk), NAMESPACE).block(block)).unlink()
        assert save(store, list(outcome.failed)[:3], EVEN).failed == {}


def test_a_full_disk_below_the_capacity_makes_room(small_disk: Path, clock: SimulatedClock) -> None:
    config = StoreConfig(directories=(str(small_disk),), rest_seconds=0.0, posix_capacity_bytes=1 << 30)
    with open_store(config, NAMESPACE, EVEN, clock=clock) as store:

        def makes_room() -> bool:
            save(store, KEYS[:25], EVEN)
            return bool(store.stats()["posix"].evicted_blocks and save(store, KEYS[199:], EVEN).done)

        clock.run_until(makes_room)
        assert fetch(store, KEYS[199:], EVEN)[0] == {KEYS[199]: content(KEYS[199], EVEN)}


def test_a_file_that_may_not_grow(config: StoreConfig) -> None:
    with PROCESSES.Pool(1) as pool:
        causes, loaded = pool.apply(live_with_limits, (config, NAMESPACE, 100_000))
    assert causes == ["full", "full"]
    assert loaded == [key(1).hex()]


def test_permissions_that_are_missing() -> None:
    require_root("only root can become the other user that this test needs")
    parent = Path(tempfile.mkdtemp())
    root = str(parent / "root")
    try:
        parent.chmod(0o711)  # allows others to traverse it but not to list it
        Path(root).mkdir(mode=0o700)
        os.chown(root, NOBODY, NOBODY)
        with PROCESSES.Pool(1) as pool:
            seen = pool.apply(live_without_privileges, (root, NOBODY))
    finally:
        shutil.rmtree(parent)
    assert seen == {
        "read only: save": ["unavailable"],
        "read only: load": 1,
        "locked: lookup": [False, False],
        "locked: load": ["unavailable"],
        "open again: save": 1,
        "open again: load": 2,
        "at opening": f"store: directories: {root}",
    }
