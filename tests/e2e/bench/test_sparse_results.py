"""Ratios are taken within rounds, disturbed ones do not count, and goals stand where they are meant."""

from __future__ import annotations

import pytest

from tests.e2e.bench.sparse_model import TOKEN_BYTES, block_size
from tests.e2e.bench.sparse_results import Group, attention, predicted, step
from tests.e2e.bench.sparse_side import Sample
from tests.e2e.bench.sparse_table import MOST_ATTENTION, MOST_OVERHEAD, MOST_STEP, NO_METHOD, goals
from tests.e2e.needle.settings import DENSE


def _sample(side: str, number: int, milliseconds: tuple[float, float, float], *, disturbed: bool = False) -> Sample:
    whole, reading, method = (each / 1000 for each in milliseconds)
    return Sample(side, number, whole, reading, method, 0.0, disturbed)


def _group(length: int = 32_768, budget: float = 0.1) -> Group:
    group = Group(length, budget, bandwidth=20e9)
    for number in range(3):
        slow = 1 + number / 10
        group.samples += [
            _sample(DENSE, number, (30 * slow, 24 * slow, 0)),
            _sample("sparse", number, (10 * slow, 3 * slow, 1 * slow)),
        ]
    return group


def test_a_ratio_is_that_of_a_round() -> None:
    group = _group()
    assert group.ratios("sparse", DENSE, step) == pytest.approx([1 / 3] * 3)
    assert group.ratios("sparse", DENSE, attention) == pytest.approx([1 / 6] * 3)


def test_a_disturbed_round_counts_only_if_all_are() -> None:
    group = _group()
    group.samples.append(_sample(DENSE, 3, (300, 240, 0), disturbed=True))
    group.samples.append(_sample("sparse", 3, (10, 3, 1)))
    assert len(group.ratios("sparse", DENSE, step)) == 3
    assert group.median(DENSE, step) == pytest.approx(0.033)
    alone = Group(4_096, 0.1, samples=group.samples[-2:])
    assert alone.ratios("sparse", DENSE, step) == pytest.approx([1 / 30])


def test_what_bandwidth_promises() -> None:
    group = _group()
    whole, ratio = predicted(group, DENSE, DENSE)
    assert whole == pytest.approx(32_768 * TOKEN_BYTES / 20e9)
    assert ratio == 1
    part, ratio = predicted(group, "sparse", DENSE)
    assert part == pytest.approx(whole * (0.1 + 1 / block_size(group.length)))
    # The rest of a dense step, 6.6 ms in its median round, stays.
    assert ratio == pytest.approx((0.0066 + whole) / (0.0066 + part))


def test_goals_stand_at_the_greatest_length_and_a_tenth() -> None:
    decode = [_group(), _group(budget=0.25), _group(length=4_096)]
    full = Group(16_384, 1.0, samples=[_sample(NO_METHOD, 0, (10, 0, 0)), _sample("sparse", 0, (10.1, 0, 0))])
    found = list(goals({"decode": decode, "full": [full]}))
    assert [figure.goal for figure in found] == [MOST_ATTENTION, MOST_STEP, *[None] * 4, MOST_OVERHEAD]
    assert [figure.met for figure in found] == [True, True, *[None] * 4, True]


def test_a_side_that_failed_has_no_figure() -> None:
    group = Group(32_768, 0.1, samples=[_sample(DENSE, 0, (30, 24, 0))], failures={"sparse": "ConfigError: no"})
    assert list(goals({"decode": [group]})) == []


def test_without_dense_attention_there_is_nothing_to_compare_with() -> None:
    group = Group(32_768, 0.1, samples=[_sample("sparse", 0, (10, 3, 1))], failures={DENSE: "no answer"})
    assert list(goals({"decode": [group], "full": [group]})) == []
