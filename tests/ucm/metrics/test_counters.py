"""The counters of a connector's side: what is called, what is taken, and what an empty step costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.metrics.stores import Store
from ucm.integration.vllm.metrics import TIER_SECONDS, ConnectorCounters
from ucm.integration.vllm.metrics_log import MetricsLog
from ucm.store.base import TierStats

if TYPE_CHECKING:
    from ucm.integration.vllm.stats_data import StatsData


class Clock:
    """Seconds that pass when they are told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lookup() -> None:
    counters = ConnectorCounters()
    counters.looked_up(100, 64, 0.002)
    counters.looked_up(50, 0, 0.001)
    assert counters.take_data() == {
        "ucm:lookups_total": {"hit": 1, "miss": 1},
        "ucm:queried_tokens_total": {"": 150},
        "ucm:matched_tokens_total": {"": 64},
        "ucm:lookup_duration_seconds": {"": [0.002, 0.001]},
    }


def test_keys() -> None:
    counters = ConnectorCounters()
    counters.hashed(8, 0.001)
    counters.hashed(2, 0.002)
    assert counters.take_data() == {"ucm:hashed_blocks_total": {"": 10}, "ucm:hash_seconds_total": {"": 0.003}}


def test_loads_by_tier() -> None:
    counters = ConnectorCounters()
    counters.loaded(3, 300, 0.5, ["dram", "posix", "dram"], tokens_per_block=16)
    counters.loaded(1, 100, 0.1, ["posix"])
    assert counters.take_data() == {
        "ucm:load_blocks_total": {"dram": 2, "posix": 2},
        "ucm:hit_tokens_total": {"dram": 32, "posix": 16},
        "ucm:load_bytes_total": {"": 400},
        "ucm:load_duration_seconds": {"": [0.5, 0.1]},
    }


def test_a_load_of_which_the_tier_is_not_said() -> None:
    counters = ConnectorCounters()
    counters.loaded(3, 300, 0.5)
    data = counters.take_data()
    assert data is not None
    assert data["ucm:load_blocks_total"] == {"unknown": 3}


def test_dumps_and_failures() -> None:
    counters = ConnectorCounters()
    counters.dumped(4, 400, 0.25)
    counters.failed("dump", "full", 2)
    counters.failed("load", "corrupt")
    assert counters.take_data() == {
        "ucm:dump_blocks_total": {"": 4},
        "ucm:dump_bytes_total": {"": 400},
        "ucm:dump_duration_seconds": {"": [0.25]},
        "ucm:failures_total": {"dump.full": 2, "load.corrupt": 1},
    }


def test_a_transfer_of_nothing_took_no_time() -> None:
    counters = ConnectorCounters()
    counters.loaded(0, 0, 0.5)
    counters.dumped(3, 0, 0.5)  # the store had them
    assert counters.take_data() is None


def test_layers_are_bytes_before_they_are_blocks() -> None:
    counters = ConnectorCounters()
    counters.loaded(0, 100, 0.5, ["posix"], tokens_per_block=16)
    counters.loaded(1, 100, 0.25, ["posix"], tokens_per_block=16)
    counters.dumped(0, 50, 0.5)
    counters.dumped(1, 50, 0.5)
    assert counters.take_data() == {
        "ucm:load_bytes_total": {"": 200},
        "ucm:load_duration_seconds": {"": [0.5, 0.25]},
        "ucm:load_blocks_total": {"posix": 1},
        "ucm:hit_tokens_total": {"posix": 16},
        "ucm:dump_bytes_total": {"": 100},
        "ucm:dump_duration_seconds": {"": [0.5, 0.5]},
        "ucm:dump_blocks_total": {"": 1},
    }


def test_what_was_taken_is_gone() -> None:
    counters = ConnectorCounters()
    counters.hashed(1, 0.5)
    taken = counters.take_data()
    assert counters.take_data() is None
    counters.hashed(2, 0.5)
    assert counters.take_data() != taken


@pytest.mark.parametrize("export", [True, False])
def test_who_gets_the_counts(export: bool) -> None:
    published: list[StatsData] = []
    counters = ConnectorCounters(export=export, publish=published.append)
    counters.hashed(1, 0.5)
    taken = counters.take_data()
    assert (taken is not None) == export
    assert published == [{"ucm:hashed_blocks_total": {"": 1}, "ucm:hash_seconds_total": {"": 0.5}}]


def test_closing_says_what_was_not_yet_said(said: list[str]) -> None:
    clock = Clock()
    counters = ConnectorCounters(log=MetricsLog(10, clock, lambda *_: None), clock=clock)  # type: ignore[arg-type]
    for _ in range(2):
        counters.failed("dump", "full")
        counters.take_data()
    counters.failed("load", "missing")
    counters.close()
    assert [line.partition("failed: ")[2] for line in said] == ["dump full 1", "dump full 1, load missing 1"]


def test_closing_says_what_tiers_counted_since_they_were_looked_at(said: list[str]) -> None:
    clock, store = Clock(), Store()
    counters = ConnectorCounters(log=MetricsLog(10, clock, lambda *_: None), clock=clock)  # type: ignore[arg-type]
    counters.watch(store)
    counters.take_data()
    store.tiers = {"posix": TierStats(failures={"dump.full": 3})}
    counters.take_data()
    assert said == []
    counters.close()
    assert said == ["[UCM.Connector] not on posix: 3 (full 3)"]


def test_tiers_are_looked_at_every_few_seconds() -> None:
    clock, store = Clock(), Store()
    counters = ConnectorCounters(clock=clock)
    counters.watch(store)
    store.tiers = {"dram": TierStats(lookups=5, hits=3, used_bytes=7, capacity_bytes=9), "posix": TierStats()}
    assert counters.take_data() == {
        "ucm:tier_lookup_blocks_total": {"dram": 5},
        "ucm:tier_hit_blocks_total": {"dram": 3},
        "ucm:tier_used_bytes": {"dram": 7},
        "ucm:tier_capacity_bytes": {"dram": 9},
    }
    looks = store.looks
    clock.now += TIER_SECONDS / 2
    assert counters.take_data() is None
    assert store.looks == looks
    clock.now += TIER_SECONDS
    store.tiers = {"dram": TierStats(lookups=6, hits=3, evicted_blocks=2, failures={"lookup.unavailable": 1})}
    assert counters.take_data() == {
        "ucm:tier_lookup_blocks_total": {"dram": 1},
        "ucm:tier_evicted_blocks_total": {"dram": 2},
        "ucm:tier_failures_total": {"dram.lookup.unavailable": 1},
    }


def test_several_stores_share_tiers() -> None:
    """Two KV-cache groups are two stores on the same tier: their counts add up, its size does not."""
    counters = ConnectorCounters()
    for lookups in (3, 4):
        store = Store()
        store.tiers = {"posix": TierStats(lookups=lookups, used_bytes=50)}
        counters.watch(store)
    assert counters.take_data() == {
        "ucm:tier_lookup_blocks_total": {"posix": 7},
        "ucm:tier_used_bytes": {"posix": 50},
    }


def test_every_counter_of_a_tier_is_exported() -> None:
    names = ("lookups", "hits", "loaded_bytes", "dumped_bytes", "evicted_blocks", "set_aside_blocks")
    values: dict[str, Any] = {name: number for number, name in enumerate(names, 1)}
    store = Store()
    store.tiers = {"posix": TierStats(**values)}
    counters = ConnectorCounters()
    counters.watch(store)
    data = counters.take_data()
    assert data is not None
    assert sorted(value for one in data.values() for value in one.values() if isinstance(value, int)) == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
