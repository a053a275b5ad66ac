"""The selection from an offloaded context, the resident blocks, and the tables that contain them."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch", reason="torch is not installed; tests/e2e/test_inside.py runs these beside it")

import numpy as np

from tests.ucm.sparse.steps import step
from ucm.errors import SparseMethodError
from ucm.sparse.blocks import SinksAndWindow
from ucm.sparse.esa.resident import ResidentLayer, reading

BLOCK = 4


def test_resident_blocks_hold_what_is_chosen_and_change_no_more_than_they_must() -> None:
    chance = random.Random(1)  # noqa: S311 - no secret
    content: dict[int, int] = {}
    layer, size = ResidentLayer(), 0
    for _ in range(300):
        size = min(12, size + chance.randrange(3))
        chosen = sorted(chance.sample(range(40), chance.randint(0, size)))
        missing = layer.missing(chosen)
        assert missing == [place for place in chosen if place not in content.values()]
        slots = layer.assign(missing, chosen, size)
        assert len(set(slots)) == len(missing)
        content.update(zip(slots, missing, strict=True))
        assert [content[slot] for slot in layer.slots(chosen)] == chosen
        assert len(set(layer.slots(chosen))) == len(chosen)
        assert max(content, default=0) < max(1, size)


def test_a_resident_block_whose_load_failed_holds_nothing() -> None:
    layer = ResidentLayer()
    assert layer.assign([5, 6, 7], [5, 6, 7], 3) == [0, 1, 2]
    layer.clear([6])
    assert layer.missing([5, 6, 7]) == [6]
    assert layer.assign([8], [5, 7, 8], 3) == [1]


def test_tokens_of_a_prompt_read_everything_and_generated_ones_beyond_the_budget_choose() -> None:
    """Rows: a prompt's last chunk, the first generated token, a preempted request's prompt, within, freed within."""
    rows = ("last", 30, 40, 70), ("first", 70, 1, 70), ("again", 0, 65, 70), ("within", 34, 1, 30), ("freed", 34, 1, 30)
    window = SinksAndWindow(3, 10, dense_prefill=True, tile=8)
    found = reading(step(*rows), window, 6, np.array([0, 0, 0, 0, 2]), BLOCK)
    assert found.tolist() == [0, window.skipped(70, 70, BLOCK), 0, 0, window.skipped(34, 30, BLOCK)]
    assert found[4] > 0
    assert reading(step(("back", 34, 3, 30)), window, 6, np.array([0]), BLOCK).tolist() == [0]
    with pytest.raises(SparseMethodError, match="several tokens of an answer"):
        reading(step(("back", 58, 3, 30)), window, 6, np.array([0]), BLOCK)
