"""The costs of building: time, memory and bytes from the package index."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.bench.figure import Figure, seconds_of
from transforms.ascend.registry import REGISTRY
from transforms.pipeline.product import UCM, compose
from transforms.pipeline.sources.cache import CACHE_VARIABLE, Cache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

ASCEND = compose(REGISTRY)
#: The parts of the cache that hold upstream files.
SOURCES = ("archives", "blobs", "releases", "sdists")
MIB = 1 << 20
#: The sampling interval of a build's memory, in seconds.
PERIOD = 0.05


def build(release: str) -> Iterator[Figure]:
    """Builds from cached sources, of each product: modules that are rewritten, and results that were kept."""
    with fresh_results() as results:
        _seconds(release)  # fetches its sources
        shutil.rmtree(results)
        yield _timed(f"build of {release}, sources cached", 10.0, release)
        _seconds("all")
        yield _timed(f"build of {release}, results kept", 3.0, release)
        with PeakMemory() as peak:
            yield _timed(f"build of all {len(UCM.reviewed())} releases, results kept", 30.0, "all")
        yield Figure("peak memory of that, all processes", peak.most / MIB, "MiB", 1024.0)
        for one in map(ASCEND.named, ASCEND.reviewed()):
            _seconds(one)
        shutil.rmtree(results)
        for one in map(ASCEND.named, ASCEND.reviewed()):
            yield _timed(f"build of {one}, sources cached", 10.0, one)
            yield _timed(f"build of {one}, results kept", 3.0, one)


@contextlib.contextmanager
def fresh_results() -> Iterator[Path]:
    """Build with the user's cached sources, but without kept results; yield the directory of the new ones."""
    root, before = Cache().root, os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory() as place:
        for name in SOURCES:
            (root / name).mkdir(parents=True, exist_ok=True)
            (Path(place) / name).symlink_to(root / name)
        os.environ[CACHE_VARIABLE] = place
        try:
            yield Path(place) / "results"
        finally:
            del os.environ[CACHE_VARIABLE]
            if before is not None:
                os.environ[CACHE_VARIABLE] = before


def _timed(name: str, goal: float, named: str) -> Figure:
    """Return the wall-clock time of a build; the detail has its processor time, and the load when it began."""
    load, before = os.getloadavg()[0], resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = _seconds(named)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Figure(name, seconds, "s", goal, {"processor_seconds": used, "load": load})


def _seconds(named: str) -> float:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as out:
        return seconds_of([sys.executable, "-m", "transforms", "build-overlay", named, "--out", out], **quiet)


def download() -> Iterator[Figure]:
    """Bytes received for one release into an empty cache: the oldest, a middle one and the newest."""
    reviewed = UCM.reviewed()
    received = {}
    for release in (reviewed[0], reviewed[len(reviewed) // 2], reviewed[-1]):
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", "tests.e2e.bench.received", release]
            answer = subprocess.check_output(command, env={**os.environ, CACHE_VARIABLE: cache}, text=True)
        received[release] = int(answer)
    yield Figure("cold download of a release", max(received.values()) / MIB, "MiB", 5.0, received)


class PeakMemory:
    """The peak memory of this process's descendants together, with shared pages counted once (Linux)."""

    def __init__(self) -> None:
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD):
            self.most = max(self.most, sum(map(_proportional_memory, _descendants(os.getpid()))))


def _descendants(pid: int) -> list[int]:
    found, ahead = [], [pid]
    while ahead:
        children = _children(ahead.pop())
        found += children
        ahead += children
    return found


def _children(pid: int) -> list[int]:
    try:
        tasks = [(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # it has ended
        return []
    return [int(child) for task in tasks for child in task]


def _proportional_memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
