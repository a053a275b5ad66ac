"""Wait for a quiet machine, and measure the load by other processes during a measurement."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The machine is quiet if it has used less than this share of one CPU for this many seconds.
SHARE, SECONDS = 0.15, 0.2
#: The maximum wait for one measurement, and for all together, in seconds.
EACH, ALL = 20.0, 3600.0
#: A measurement counts as disturbed if others used more than these CPU seconds, and this share of all CPUs.
OTHERS_SECONDS, OTHERS_SHARE = 0.03, 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


class Quiet:
    """Waits for a quiet machine.

    Args:
        seconds: The maximum wait in total.
    """

    def __init__(self, seconds: float = ALL) -> None:
        self._left = seconds

    def wait(self) -> None:
        """Return when the machine is quiet, or the time is up."""
        begin = time.monotonic()
        limit = begin + min(EACH, self._left)
        before = machine_seconds()
        while True:
            time.sleep(SECONDS)
            now = machine_seconds()
            if now - before < SHARE * SECONDS or time.monotonic() > limit:
                break
            before = now
        self._left = max(0.0, self._left - (time.monotonic() - begin - SECONDS))


class Others:
    """The CPU use of other processes on this machine since its creation.

    Args:
        groups: The process groups that do not count as others; nor does this process.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = groups
        self._begin, self._busy = time.monotonic(), self._used()

    def used(self) -> tuple[float, bool]:
        """Return the share of all CPUs that others used, 0 to 1, and whether it disturbs a measurement."""
        seconds = (time.monotonic() - self._begin) * (os.cpu_count() or 1)
        used = max(0.0, self._used() - self._busy)
        return used / seconds, used > OTHERS_SECONDS + OTHERS_SHARE * seconds

    def _used(self) -> float:
        own = os.times()
        return machine_seconds() - own.user - own.system - sum(map(group_seconds, self._groups))


def machine_seconds() -> float:
    """Return the busy seconds of all CPUs since boot."""
    user, nice, system, _idle, _wait, *rest = _numbers(Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0])
    return (user + nice + system + sum(rest[:3])) / _TICKS


def group_seconds(group: int) -> float:
    """Return the CPU seconds of a process group's running processes."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
                if int(fields[2]) == group:
                    ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS


def _numbers(line: str) -> list[int]:
    return [int(word) for word in line.split()[1:]]
