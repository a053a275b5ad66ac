"""Counters are merged across ranks, sides and steps, in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from ucm.integration.vllm import metrics as names
from ucm.integration.vllm.metrics import METRICS, Kind, copied, merge, observations, summary, total

if TYPE_CHECKING:
    from ucm.integration.vllm.metrics import StatsData

KEYS = {name: [".".join(known) for known in metric.known] or ["posix"] for name, metric in METRICS.items()}


@st.composite
def some_counts(draw: st.DrawFn) -> StatsData:
    data: StatsData = {}
    for name in draw(st.lists(st.sampled_from(sorted(METRICS)), max_size=5, unique=True)):
        number: st.SearchStrategy[float | list[float]] = st.integers(0, 10**6)
        if METRICS[name].kind is Kind.HISTOGRAM:
            number = st.lists(st.integers(0, 10**6), min_size=1, max_size=4).map(list[float])
        data[name] = draw(st.dictionaries(st.sampled_from(KEYS[name]), number, min_size=1, max_size=3))
    return data


@given(st.lists(some_counts(), max_size=5))
def test_nothing_is_lost_and_nothing_made_up(parts: list[StatsData]) -> None:
    whole: StatsData = {}
    for part in parts:
        merge(whole, part)
    for name, metric in METRICS.items():
        values = [part.get(name, {}).get(key, 0) for part in parts for key in KEYS[name]]
        if metric.kind is Kind.COUNTER:
            assert total(whole, metric) == sum(v for v in values if not isinstance(v, list))
        elif metric.kind is Kind.HISTOGRAM:
            assert observations(whole, metric) == sum(len(v) for v in values if isinstance(v, list))
            assert total(whole, metric) == sum(sum(v) for v in values if isinstance(v, list))
        else:
            found = [v for v in values if not isinstance(v, list)]
            assert max(whole.get(name, {"": 0}).values(), default=0) == max(found, default=0)


@given(some_counts(), some_counts())
def test_the_order_does_not_matter(one: StatsData, other: StatsData) -> None:
    there, back = copied(one), copied(other)
    merge(there, other)
    merge(back, one)
    assert _sorted(there) == _sorted(back)


@given(some_counts(), some_counts())
def test_what_is_added_is_left_as_it_was(one: StatsData, other: StatsData) -> None:
    before = copied(other)
    into = copied(one)
    merge(into, other)
    merge(into, other)
    assert other == before


def test_a_copy_shares_nothing() -> None:
    data: StatsData = {"ucm:load_duration_seconds": {"": [1.0]}}
    other = copied(data)
    merge(other, data)
    assert data == {"ucm:load_duration_seconds": {"": [1.0]}}


def test_a_summary_names_only_what_happened() -> None:
    data: StatsData = {
        names.QUERIED_TOKENS.name: {"": 100},
        names.LOAD_BLOCKS.name: {"dram": 2, "posix": 1},
        names.LOAD_BYTES.name: {"": 2_500_000},
        names.FAILURES.name: {"load.full": 1},
    }
    assert summary(data) == {
        "UCM queried tokens": 100,
        "UCM loaded blocks": 3,
        "UCM loaded MB": 2.5,
        "UCM failed blocks": 1,
    }


def _sorted(data: StatsData) -> StatsData:
    return {
        name: {key: sorted(value) if isinstance(value, list) else value for key, value in values.items()}
        for name, values in data.items()
    }
