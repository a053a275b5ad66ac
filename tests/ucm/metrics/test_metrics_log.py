"""The log line: at once after a quiet time, then once per interval, and never nothing."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.metrics.stores import Store
from ucm.integration.vllm.metrics import ConnectorCounters
from ucm.integration.vllm.metrics_log import MetricsLog
from ucm.store.base import TierStats

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucm.integration.vllm.stats_data import StatsData


class Time:
    """A clock, and what was put off."""

    def __init__(self) -> None:
        self.now = 0.0
        self.put_off: list[tuple[float, Callable[[], None]]] = []
        self.cancelled = 0

    def __call__(self) -> float:
        return self.now

    def later(self, seconds: float, call: Callable[[], None]) -> Any:
        self.put_off.append((self.now + seconds, call))
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def pass_to(self, now: float) -> None:
        self.now = now
        due = [call for when, call in self.put_off if when <= now]
        self.put_off = [(when, call) for when, call in self.put_off if when > now]
        for call in due:
            call()


@pytest.fixture
def time() -> Time:
    return Time()


def counts(**calls: Any) -> StatsData:
    counters = ConnectorCounters()
    for name, arguments in calls.items():
        getattr(counters, name)(*arguments)
    data = counters.take_data()
    assert data is not None
    return data


def test_the_first_is_said_at_once(time: Time, said: list[str]) -> None:
    MetricsLog(10, time, time.later).add(counts(looked_up=(1000, 750, 0.001)))
    assert said == ["[UCM.Connector] 1 lookup: 1 hit, 0 misses; 750 of 1000 tokens found (75.0 %)"]
    assert not time.put_off


def test_what_follows_is_said_together_at_the_end_of_the_interval(time: Time, said: list[str]) -> None:
    log = MetricsLog(10, time, time.later)
    log.add(counts(failed=("load", "corrupt")))
    time.now = 3
    log.add(counts(looked_up=(100, 0, 0.001)))
    time.now = 5
    log.add(counts(looked_up=(100, 50, 0.001), dumped=(2, 3_000_000, 0.01)))
    assert len(said) == 1
    assert len(time.put_off) == 1
    time.pass_to(10)
    found = "[UCM.Connector] 2 lookups: 1 hit, 1 miss; 50 of 200 tokens found (25.0 %)"
    assert said[1:] == [f"{found}; saved 2 blocks, 3.0 MB, 10.0 ms a transfer"]
    time.pass_to(100)
    assert len(said) == 2
    log.add(counts(failed=("dump", "full")))
    assert said[2:] == ["[UCM.Connector] failed: dump full 1"]


def test_what_concerns_nobody_is_not_said(time: Time, said: list[str]) -> None:
    log = MetricsLog(10, time, time.later)
    log.add({"ucm:tier_used_bytes": {"posix": 5}})
    log.add(counts(hashed=(3, 0.1)))
    log.close()
    assert said == []


def test_closing_says_the_rest(time: Time, said: list[str]) -> None:
    log = MetricsLog(10, time, time.later)
    for _ in range(2):
        log.add(counts(failed=("load", "missing", 3)))
    log.close()
    assert said == ["[UCM.Connector] failed: load missing 3"] * 2
    assert time.cancelled == 1
    log.close()
    assert len(said) == 2


def test_where_blocks_came_from(time: Time, said: list[str]) -> None:
    MetricsLog(10, time, time.later).add(counts(loaded=(3, 4_200_000, 0.0123, ["posix", "dram", "dram"])))
    assert said == ["[UCM.Connector] loaded 3 blocks (from dram 2, posix 1), 4.2 MB, 12.3 ms a transfer"]


def test_what_a_tier_did_not_take_is_said(time: Time, said: list[str]) -> None:
    """The other tier took it, so that nothing else tells."""
    counters, store = ConnectorCounters(), Store()
    counters.watch(store)
    counters.dumped(1, 1_000_000, 0.01)
    failures = {
        "dump.unavailable": 10,
        "dump.full": 2,
        "commit.unavailable": 1,
        "commit.incomplete": 4,
        "load.missing": 7,
    }
    store.tiers = {"dram": TierStats(failures={"promote.full": 1}), "posix": TierStats(failures=failures)}
    data = counters.take_data()
    assert data is not None
    MetricsLog(10, time, time.later).add(data)
    assert said == [
        "[UCM.Connector] saved 1 block, 1.0 MB, 10.0 ms a transfer; not on posix: 13 (full 2, unavailable 11)"
    ]


def test_lines_with_failures_are_warnings(time: Time, levels: list[int]) -> None:
    log = MetricsLog(1, time, time.later)
    not_saved: StatsData = {"ucm:tier_failures_total": {"posix.dump.unavailable": 1.0}}
    fine, failed = counts(looked_up=(100, 0, 0.001)), counts(failed=("load", "corrupt"))
    for data in (fine, failed, not_saved, fine):
        log.add(data)
        time.now += 1
    assert levels == [logging.INFO, logging.WARNING, logging.WARNING, logging.INFO]


def test_a_real_timer_says_the_rest(said: list[str]) -> None:
    log = MetricsLog(0.05)
    for _ in range(2):
        log.add(counts(failed=("load", "missing")))
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert all(timer.daemon for timer in timers)
    for timer in timers:
        timer.join()
    assert len(said) == 2
