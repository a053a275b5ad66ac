"""Waiting for a quiet machine, and how much of it others used while something was measured."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The machine is quiet when it used less than this share of one processor for this many seconds.
SHARE, SECONDS = 0.15, 0.2
#: Seconds after which a measurement goes on without quiet, and how many of these there are in all.
EACH, ALL = 20.0, 3600.0
#: A measurement is disturbed when others used more than these seconds of a processor, and this share of all of them.
OTHERS_SECONDS, OTHERS_SHARE = 0.03, 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


class Quiet:
    """Waits as long as it may; on a machine that is never quiet, `ALL` seconds and no more."""

    def __init__(self) -> None:
        self._left = ALL

    def wait(self) -> None:
        """Return when the machine is quiet, or there is no more waiting."""
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
    """What others do on this machine, from here to `share`.

    Args:
        groups: The process groups that are not others; this process is none either.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = groups
        self._begin, self._busy = time.monotonic(), self._used()

    def used(self) -> tuple[float, bool]:
        """The share of all processors that others used, 0 to 1, and whether that is enough to disturb."""
        seconds = (time.monotonic() - self._begin) * (os.cpu_count() or 1)
        used = max(0.0, self._used() - self._busy)
        return used / seconds, used > OTHERS_SECONDS + OTHERS_SHARE * seconds

    def _used(self) -> float:
        own = os.times()
        return machine_seconds() - own.user - own.system - sum(map(group_seconds, self._groups))


def machine_seconds() -> float:
    """What the processors have done since they started, all together."""
    user, nice, system, _idle, _wait, *rest = _numbers(Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0])
    return (user + nice + system + sum(rest[:3])) / _TICKS


def group_seconds(group: int) -> float:
    """What the living processes of a process group have used."""
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
