"""Waiting for a quiet machine, and how much of it others used while something was measured."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

#: The machine is quiet when it used less than this share of one processor for this many seconds.
SHARE, SECONDS = 0.15, 0.2
#: Seconds after which a measurement goes on without quiet, and how many of these there are in all.
EACH, ALL = 20.0, 1200.0
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
