"""Counters as series: labels, initial series, and values unknown to this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ucm.metrics.client import CLASSES, Metric
from ucm.integration.vllm import metrics
from ucm.integration.vllm.metrics import METRICS, Kind, SeriesSet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.integration.vllm.metrics import StatsData

LABELS = ["model_name", "engine"]


@pytest.fixture(autouse=True)
def _new_process() -> Iterator[None]:
    """Nothing is registered yet."""
    metrics._metrics.cache_clear()
    Metric.taken.clear()
    yield
    metrics._metrics.cache_clear()


def series() -> SeriesSet:
    return SeriesSet(CLASSES, LABELS, {0: ["llama", "0"], 1: ["llama", "1"]})


def test_every_metric_is_registered_with_vllms_labels_first() -> None:
    series()
    assert {name: metric.labelnames for name, metric in Metric.taken.items()} == {
        name: [*LABELS, *metric.labels] for name, metric in METRICS.items()
    }


def test_what_is_known_is_there_from_the_start() -> None:
    series()
    assert set(Metric.taken["ucm:queried_tokens_total"].children) == {("llama", "0"), ("llama", "1")}
    assert ("llama", "1", "load", "corrupt") in Metric.taken["ucm:failures_total"].children
    assert ("llama", "0", "posix", "save", "unavailable") in Metric.taken["ucm:tier_failures_total"].children
    assert ("llama", "0", "posix") in Metric.taken["ucm:hit_tokens_total"].children
    assert not Metric.taken["ucm:tier_used_bytes"].children


def test_values_go_where_their_labels_say() -> None:
    made = series()
    data: StatsData = {
        "ucm:queried_tokens_total": {"": 5},
        "ucm:failures_total": {"save.full": 2},
        "ucm:tier_failures_total": {"my.tier.load.corrupt": 3},
        "ucm:tier_used_bytes": {"my.tier": 7},
        "ucm:load_duration_seconds": {"": [0.1, 0.2]},
    }
    made.observe(data, 1)
    made.observe(data, 1)
    children = {name: Metric.taken[name].children for name in data}
    assert children["ucm:queried_tokens_total"]["llama", "1"].value == 10
    assert children["ucm:queried_tokens_total"]["llama", "0"].value == 0
    assert children["ucm:failures_total"]["llama", "1", "save", "full"].value == 4
    assert children["ucm:tier_failures_total"]["llama", "1", "my.tier", "load", "corrupt"].value == 6
    assert children["ucm:tier_used_bytes"]["llama", "1", "my.tier"].value == 7
    assert children["ucm:load_duration_seconds"]["llama", "1"].observed == [0.1, 0.2] * 2


def test_a_second_set_in_a_process_uses_the_same_names() -> None:
    first, second = series(), series()
    first.observe({"ucm:queried_tokens_total": {"": 5}}, 0)
    second.observe({"ucm:queried_tokens_total": {"": 5}}, 0)
    assert Metric.taken["ucm:queried_tokens_total"].children["llama", "0"].value == 10


def test_what_this_process_does_not_know_is_said_once(said: list[str]) -> None:
    made = series()
    for _ in range(2):
        made.observe({"ucm:of_another_version": {"": 1}, "ucm:queried_tokens_total": {"": 1}}, 0)
        made.observe({"ucm:queried_tokens_total": {"": 1}}, 7)
    assert [line.partition("counts of ")[2].partition(" are")[0] for line in said] == [
        "ucm:of_another_version",
        "engine 7",
    ]
    assert Metric.taken["ucm:queried_tokens_total"].children["llama", "0"].value == 2


def test_a_failure_without_a_cause_still_counts() -> None:
    series().observe({"ucm:failures_total": {"load": 1}}, 0)
    assert Metric.taken["ucm:failures_total"].children["llama", "0", "load", ""].value == 1


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: object) -> None:
    found = METRICS[metric.name]  # type: ignore[attr-defined]
    assert found.name.startswith("ucm:")
    assert found.name.endswith("_total") == (found.kind is Kind.COUNTER)
    assert found.kind is Kind.COUNTER or not found.unit
    assert bool(found.buckets) == (found.kind is Kind.HISTOGRAM)
    assert found.documentation.endswith(".")
    assert all(len(known) == len(found.labels) for known in found.known)
