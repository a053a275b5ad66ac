"""The counters of a connector's side, their collection, and the cost of an empty step."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

from tests.ucm.metrics.stores import Store
from ucm.integration.vllm.metrics import TIER_SECONDS, ConnectorCounters, MetricsLog
from ucm.store.base import TierStats

if TYPE_CHECKING:
    from tests.clock import SimulatedClock
    from ucm.integration.vllm.metrics import StatsData


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


def test_saves_and_failures() -> None:
    counters = ConnectorCounters()
    counters.saved(4, 400, 0.25)
    counters.failed("save", "full", 2)
    counters.failed("load", "corrupt")
    assert counters.take_data() == {
        "ucm:save_blocks_total": {"": 4},
        "ucm:save_bytes_total": {"": 400},
        "ucm:save_duration_seconds": {"": [0.25]},
        "ucm:failures_total": {"save.full": 2, "load.corrupt": 1},
    }


def test_a_transfer_of_nothing_took_no_time() -> None:
    counters = ConnectorCounters()
    counters.loaded(0, 0, 0.5, [])
    counters.saved(3, 0, 0.5)  # the store had them
    assert counters.take_data() is None


def test_layers_are_bytes_before_they_are_blocks() -> None:
    counters = ConnectorCounters()
    counters.loaded(0, 100, 0.5, ["posix"], tokens_per_block=16)
    counters.loaded(1, 100, 0.25, ["posix"], tokens_per_block=16)
    counters.saved(0, 50, 0.5)
    counters.saved(1, 50, 0.5)
    assert counters.take_data() == {
        "ucm:load_bytes_total": {"": 200},
        "ucm:load_duration_seconds": {"": [0.5, 0.25]},
        "ucm:load_blocks_total": {"posix": 1},
        "ucm:hit_tokens_total": {"posix": 16},
        "ucm:save_bytes_total": {"": 100},
        "ucm:save_duration_seconds": {"": [0.5, 0.5]},
        "ucm:save_blocks_total": {"": 1},
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


def test_closing_says_what_was_not_yet_said(clock: SimulatedClock, said: list[str]) -> None:
    counters = ConnectorCounters(log=MetricsLog(10, clock=clock), clock=clock)
    for _ in range(2):
        counters.failed("save", "full")
        counters.take_data()
    counters.failed("load", "missing")
    counters.close()
    assert [line.partition("failed: ")[2] for line in said] == ["save full 1", "load missing 1, save full 1"]


def test_closing_says_what_tiers_counted_since_they_were_looked_at(clock: SimulatedClock, said: list[str]) -> None:
    store = Store()
    counters = ConnectorCounters(log=MetricsLog(10, clock=clock), clock=clock)
    counters.watch(store.stats)
    counters.take_data()
    store.tiers = {"posix": TierStats(failures={"save.full": 3})}
    counters.take_data()
    assert said == []
    counters.close()
    assert said == ["[UCM.Connector] not on posix: 3 (full 3)"]


def idle(*tiers: str) -> dict[str, dict[str, float]]:
    """Return the gauges of tiers that work and have no backlog."""
    return {name: dict.fromkeys(tiers, 0) for name in ("ucm:tier_resting_ratio", "ucm:tier_queued_bytes")}


def test_tiers_are_looked_at_every_few_seconds(clock: SimulatedClock) -> None:
    store = Store()
    counters = ConnectorCounters(clock=clock)
    counters.watch(store.stats)
    store.tiers = {"dram": TierStats(lookups=5, hits=3, used_bytes=7, capacity_bytes=9), "posix": TierStats()}
    assert counters.take_data() == {
        "ucm:tier_lookup_blocks_total": {"dram": 5},
        "ucm:tier_hit_blocks_total": {"dram": 3},
        "ucm:tier_used_bytes": {"dram": 7},
        "ucm:tier_capacity_bytes": {"dram": 9},
        **idle("dram", "posix"),
    }
    looks = store.looks
    clock.advance(TIER_SECONDS / 2)
    assert counters.take_data() is None
    assert store.looks == looks
    clock.advance(TIER_SECONDS)
    store.tiers = {"dram": TierStats(lookups=6, hits=3, evicted_blocks=2, failures={"lookup.unavailable": 1})}
    assert counters.take_data() == {
        "ucm:tier_lookup_blocks_total": {"dram": 1},
        "ucm:tier_evicted_blocks_total": {"dram": 2},
        "ucm:tier_failures_total": {"dram.lookup.unavailable": 1},
        **idle("dram"),
    }


def test_several_stores_share_tiers() -> None:
    """Two KV-cache groups have two stores on the same tier: their counters add up, its size does not."""
    counters = ConnectorCounters()
    for lookups in (3, 4):
        store = Store()
        store.tiers = {"posix": TierStats(lookups=lookups, used_bytes=50)}
        counters.watch(store.stats)
    assert counters.take_data() == {
        "ucm:tier_lookup_blocks_total": {"posix": 7},
        "ucm:tier_used_bytes": {"posix": 50},
        **idle("posix"),
    }


def test_every_counter_of_a_tier_is_exported() -> None:
    names = [field.name for field in dataclasses.fields(TierStats)]
    beside = {"loaded_blocks", "saved_blocks", "failures", "queued_blocks"}  # by bytes, or tested above
    beside |= {"hits_of", "evicted_of", "bytes_of"}  # tested below
    values: dict[str, Any] = {name: number for number, name in enumerate(names, 1) if name not in beside}
    store = Store()
    store.tiers = {"posix": TierStats(**values)}
    counters = ConnectorCounters()
    counters.watch(store.stats)
    data = counters.take_data()
    assert data is not None
    assert sorted(one["posix"] for one in data.values()) == sorted(values.values())


def test_salts_with_weights_are_counted(clock: SimulatedClock) -> None:
    store = Store()
    salt, both = "salt-1a2b3c4d", {"salt-1a2b3c4d": 5, "others": 2}
    store.tiers = {"posix": TierStats(hits_of=both, evicted_of={"others": 1}, bytes_of={**both, salt: 0})}
    counters = ConnectorCounters(clock=clock)
    counters.watch(store.stats)
    assert counters.take_data() == {
        "ucm:salt_hit_blocks_total": {f"posix.{salt}": 5, "posix.others": 2},
        "ucm:salt_evicted_blocks_total": {"posix.others": 1},
        "ucm:salt_used_bytes": {f"posix.{salt}": 0, "posix.others": 2},
        **idle("posix"),
    }
    clock.advance(TIER_SECONDS)
    store.tiers = {"posix": TierStats(hits_of={salt: 6, "others": 2}, evicted_of={"others": 1})}
    assert counters.take_data() == {"ucm:salt_hit_blocks_total": {f"posix.{salt}": 1}, **idle("posix")}


def counts(**calls: Any) -> StatsData:
    counters = ConnectorCounters()
    for name, arguments in calls.items():
        getattr(counters, name)(*arguments)
    data = counters.take_data()
    assert data is not None
    return data


def test_the_first_is_said_at_once(clock: SimulatedClock, said: list[str]) -> None:
    MetricsLog(10, clock=clock).add(counts(looked_up=(1000, 750, 0.001)))
    assert said == ["[UCM.Connector] 1 lookup: 1 hit, 0 misses; 750 of 1000 tokens found (75.0 %)"]
    assert clock.alive == []


def test_what_follows_is_said_together_at_the_end_of_the_interval(clock: SimulatedClock, said: list[str]) -> None:
    log = MetricsLog(10, clock=clock)
    log.add(counts(failed=("load", "corrupt")))
    clock.advance(3)
    log.add(counts(looked_up=(100, 0, 0.001)))
    clock.advance(2)
    log.add(counts(looked_up=(100, 50, 0.001), saved=(2, 3_000_000, 0.01)))
    clock.advance(4.9)
    assert len(said) == 1
    assert clock.alive == ["ucm-log"]
    clock.advance(0.1)
    found = "[UCM.Connector] 2 lookups: 1 hit, 1 miss; 50 of 200 tokens found (25.0 %)"
    assert said[1:] == [f"{found}; saved 2 blocks, 3.0 MB, 10.0 ms a transfer"]
    assert clock.alive == []
    clock.advance(90)
    assert len(said) == 2
    log.add(counts(failed=("save", "full")))
    assert said[2:] == ["[UCM.Connector] failed: save full 1"]


def test_what_concerns_nobody_is_not_said(clock: SimulatedClock, said: list[str]) -> None:
    log = MetricsLog(10, clock=clock)
    log.add({"ucm:tier_used_bytes": {"posix": 5}})
    log.add(counts(hashed=(3, 0.1)))
    log.close()
    assert said == []


def test_closing_says_the_rest(clock: SimulatedClock, said: list[str]) -> None:
    log = MetricsLog(10, clock=clock)
    for _ in range(2):
        log.add(counts(failed=("load", "missing", 3)))
    log.close()
    assert said == ["[UCM.Connector] failed: load missing 3"] * 2
    clock.run_until_idle()
    assert clock.alive == []
    log.close()
    assert len(said) == 2


def test_where_blocks_came_from(clock: SimulatedClock, said: list[str]) -> None:
    MetricsLog(10, clock=clock).add(counts(loaded=(3, 4_200_000, 0.0123, ["posix", "dram", "dram"])))
    assert said == ["[UCM.Connector] loaded 3 blocks (from dram 2, posix 1), 4.2 MB, 12.3 ms a transfer"]


def test_what_a_tier_did_not_take_is_said(clock: SimulatedClock, said: list[str]) -> None:
    """The other tier stored it, so nothing else reports it."""
    counters, store = ConnectorCounters(), Store()
    counters.watch(store.stats)
    counters.saved(1, 1_000_000, 0.01)
    failures = {
        "save.unavailable": 10,
        "save.full": 2,
        "load.missing": 7,
    }
    store.tiers = {"dram": TierStats(failures={"promote.full": 1}), "posix": TierStats(failures=failures)}
    data = counters.take_data()
    assert data is not None
    MetricsLog(10, clock=clock).add(data)
    assert said == [
        "[UCM.Connector] saved 1 block, 1.0 MB, 10.0 ms a transfer; not on posix: 12 (full 2, unavailable 10)"
    ]


def test_lines_with_failures_are_warnings(clock: SimulatedClock, levels: list[int]) -> None:
    log = MetricsLog(1, clock=clock)
    not_saved: StatsData = {"ucm:tier_failures_total": {"posix.save.unavailable": 1.0}}
    fine, failed = counts(looked_up=(100, 0, 0.001)), counts(failed=("load", "corrupt"))
    for data in (fine, failed, not_saved, fine):
        log.add(data)
        clock.advance(1)
    assert levels == [logging.INFO, logging.WARNING, logging.WARNING, logging.INFO]


def test_where_the_system_allows_no_more_threads_a_later_step_says_the_rest(
    clock: SimulatedClock, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = create_autospec(clock.thread, side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(clock, "thread", refuse)
    log = MetricsLog(10, clock=clock)
    for _ in range(3):
        log.add(counts(failed=("load", "missing")))
    assert refuse.call_count == 2, "each step tries again"
    clock.advance(10)
    assert len(said) == 1
    log.add(counts(failed=("load", "missing")))
    assert said[1:] == ["[UCM.Connector] failed: load missing 3"]


def test_a_sparse_method_s_figures_are_counted_as_they_rise(clock: SimulatedClock) -> None:
    figures = {"rows": 3.0, "requests.failed": 0.0, "select_seconds": 0.25, "not.a.series": 9.0}
    counters = ConnectorCounters(clock=clock)
    counters.watch_method(lambda: figures)
    assert counters.take_data() == {
        "ucm:sparse_rows_total": {"": 3},
        "ucm:sparse_select_seconds_total": {"": 0.25},
    }
    figures["rows"], figures["requests.failed"] = 5.0, 1.0
    assert counters.take_data() is None, "a look every few seconds"
    clock.advance(TIER_SECONDS)
    assert counters.take_data() == {"ucm:sparse_rows_total": {"": 2}, "ucm:sparse_requests_total": {"failed": 1}}
