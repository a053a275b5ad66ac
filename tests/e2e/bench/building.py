"""The costs of building: time, memory and bytes from the package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.bench.figure import Figure, seconds_of
from transforms.pipeline.product import UCM
from transforms.pipeline.sources.cache import CACHE_VARIABLE, Cache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

MIB = 1 << 20
#: The sampling interval of a build's memory, in seconds.
PERIOD = 0.05


def build(release: str) -> Iterator[Figure]:
    """One release whose modules are rewritten, and one and all of them with results that were kept."""
    command = [sys.executable, "-m", "transforms", "build-overlay"]
    with tempfile.TemporaryDirectory() as out:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        seconds_of([*command, release, "--out", out], **quiet)
        shutil.rmtree(Cache().root / "results")
        anew = seconds_of([*command, release, "--out", out], **quiet)
        seconds_of([*command, "all", "--out", out], **quiet)
        one = seconds_of([*command, release, "--out", out], **quiet)
        with PeakMemory() as peak:
            every = seconds_of([*command, "all", "--out", out], **quiet)
    number = len(UCM.reviewed())
    yield Figure(f"build of {release}, sources cached", anew, "s", 10.0)
    yield Figure(f"build of {release}, results kept", one, "s", 3.0)
    yield Figure(f"build of all {number} releases, results kept", every, "s", 30.0)
    yield Figure("peak memory of that, all processes", peak.most / MIB, "MiB", 1024.0)


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
