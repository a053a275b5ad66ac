"""Whole answers with drafts: what counts as their time, and what steps alone promise."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.bench.drafts import Measured, by_way, promised


def step(seconds: float, making: float = 0.0, drafts: int = 0, tokens: int = 1) -> dict[str, Any]:
    return {"step": seconds, "making": making, "busy": (seconds + making) / 2, "drafts": drafts, "tokens": tokens}


def dense(seconds: float) -> Measured:
    return Measured(100, 0, 0, False, [step(seconds)] * 6)


def drafted(verify: float, making: float) -> Measured:
    """Of six tokens after the first one."""
    steps = [step(verify, making, 2, 3), step(verify, making, 2, 2), step(verify, making, 2, 1)]
    return Measured(100, 10, 2, False, steps)


def test_the_time_is_that_of_all_steps_and_of_making_drafts() -> None:
    assert dense(2.0).seconds == 2.0
    assert drafted(3.0, 1.0).seconds == pytest.approx(3 * (3.0 + 1.0) / 6)
    assert drafted(3.0, 1.0).busy == pytest.approx(drafted(3.0, 1.0).seconds / 2)


def test_answers_are_compared_turn_by_turn() -> None:
    answers = [dense(2.0), drafted(3.0, 1.0), drafted(6.0, 1.0), dense(4.0)]
    assert by_way(answers) == {"2 drafts": [(answers[0], answers[1]), (answers[3], answers[2])]}


def test_what_is_promised_is_computed_from_the_fastest_steps() -> None:
    answers = [dense(2.0), drafted(3.0, 1.0), drafted(6.0, 4.0), dense(4.0)]
    assert promised(answers, "2 drafts") == pytest.approx(2.0 * 2.0 / (3.0 + 1.0))
