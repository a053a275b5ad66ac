"""Rests, probes, and the log lines about failures."""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import create_autospec

import pytest

from ucm.background import call_later
from ucm.store.base import BlockMissingError, StoreUnavailableError
from ucm.store.health import Breaker, Pool
from ucm.store.tier import TierCounters

if TYPE_CHECKING:
    from tests.clock import SimulatedClock


@pytest.fixture
def resting(clock: SimulatedClock) -> Breaker:
    """A breaker whose rest is over: the next call is the probe."""
    breaker = Breaker("it", 3, 30.0, clock=clock)
    for _ in range(3):
        assert breaker.allows()
        breaker.failed(StoreUnavailableError("broken"))
    assert not breaker.allows()
    clock.advance(30)
    return breaker


@pytest.mark.parametrize("clock", range(5), indirect=True, ids="order {}".format)
@pytest.mark.parametrize("goes_well", [True, False])
def test_who_comes_during_the_probe_hears_how_it_went(resting: Breaker, goes_well: bool, clock: SimulatedClock) -> None:
    assert resting.allows()
    others = [call_later(resting.allows, "other", clock=clock) for _ in range(8)]
    clock.advance(0.9)
    assert not any(other.done() for other in others)
    if goes_well:
        resting.succeeded()
    else:
        resting.failed(StoreUnavailableError("broken"))
    clock.run_until_idle()
    assert [other.done() for other in others] == [True] * 8
    assert [other.result() for other in others] == [goes_well] * 8


def test_a_probe_that_hangs_keeps_the_others_for_a_moment(resting: Breaker, clock: SimulatedClock) -> None:
    assert resting.allows()
    began = clock.monotonic()
    assert not resting.allows()
    assert clock.monotonic() - began == 1.0
    assert not resting.allows()
    assert clock.monotonic() - began == 1.0


def test_the_reason_is_said_at_each_rest(resting: Breaker, said: list[str], clock: SimulatedClock) -> None:
    said.clear()
    for reason in ("still broken", "no permission"):
        assert resting.allows()
        resting.failed(StoreUnavailableError(reason))
        resting.failed(StoreUnavailableError("of a call that was under way"))
        clock.advance(30)
    assert said == [
        "[UCM.Store] it rests for 30 s after 4 failures in a row: still broken",
        "[UCM.Store] it rests for 30 s after 6 failures in a row: no permission",
    ]
    assert resting.allows()
    resting.succeeded()
    resting.succeeded()
    assert said[2:] == ["[UCM.Store] it works again"]


def test_another_reason_of_the_medium_is_said_as_well(said: list[str]) -> None:
    counters = TierCounters("posix")
    for reason in ("no such directory", "no permission", "no such directory", "no permission"):
        counters.failed("save", StoreUnavailableError(reason))
    for number in range(3):
        counters.failed("load", BlockMissingError(f"block {number} is not there"))
    assert [line.rpartition(": ")[2] for line in said] == ["no such directory", "no permission", "block 0 is not there"]
    assert counters.snapshot(None, None).failures == {"save.unavailable": 4, "load.missing": 3}


def test_reasons_without_end_are_not_said_without_end(said: list[str]) -> None:
    counters = TierCounters("posix")
    for number in range(100):
        counters.failed("save", StoreUnavailableError(f"reason {number}"))
    assert len(said) == 8


def test_a_thread_that_the_system_refuses_does_not_count(
    monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    pool, ran = Pool("pool", 1, clock=clock), clock.event()
    refuse = create_autospec(clock.thread)
    refuse.return_value.start.side_effect = RuntimeError("can't start new thread")
    with monkeypatch.context() as patch:
        patch.setattr(clock, "thread", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.submit([ran.set])
    pool.submit([ran.set])
    assert ran.wait(1.0)
    pool.close()
