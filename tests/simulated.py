"""The fixture of the simulated clock, as a plug-in: the tests that run beside vLLM have no conftest.py."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from tests.clock import SimulatedClock

if TYPE_CHECKING:
    from collections.abc import Iterator


def repeatable(seed: int | None) -> SimulatedClock:
    """Return a clock with which a simulation is the same in every run.

    Uses of blocks count once per minute, so it begins with a minute: the next one, and files are older.
    """
    return SimulatedClock(seed, (time.time() // 60 + 1) * 60)


def begin_span(clock: SimulatedClock, seconds: float) -> None:
    """Let time pass until a span of so many seconds has just begun, in which uses of a block count once."""
    clock.advance(seconds - clock.time() % seconds + 0.001)


@pytest.fixture
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedClock]:
    """Time and threads that the test drives; what still waits at its end is ended.

    ``@pytest.mark.parametrize("clock", range(8), indirect=True)`` runs a test with threads in eight other orders.
    """
    # Threads that take turns slow down nobody; with a low priority they would wait for a busy machine's other programs.
    monkeypatch.setattr(os, "setpriority", lambda which, who, priority: None)
    found = SimulatedClock(getattr(request, "param", None))
    yield found
    found.close()
