"""The selection from an offloaded context, the resident blocks, and the tables that contain them."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch", reason="torch is not installed; tests/e2e/test_inside.py runs these beside it")

import numpy as np
import torch

from tests.ucm.sparse.steps import step
from ucm.errors import SparseMethodError
from ucm.sparse.blocks import SinksAndWindow
from ucm.sparse.esa.resident import Listed, OffloadedTables, ResidentLayer, reading

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


def test_tables_name_sinks_chosen_and_latest_blocks() -> None:
    # Rows: one reads everything; one chooses two of its eight blocks; one loads all of its three released blocks.
    table = torch.arange(100, 100 + 3 * 16, dtype=torch.int32).view(3, 16)
    tables = OffloadedTables(np.array([10, 53, 30]), [Listed(1, 8, 2), Listed(2, 3, 3)], table, 1, BLOCK)
    assert tables.seq_lens.tolist() == [10, 53 - 6 * BLOCK, 30]
    assert tables.max_seq_len == 30
    made = tables.naming([2, 8, 1, 2, 3], [7, -1, 3, 2, 4])
    assert made.dtype == torch.int32
    assert made[0, :3].tolist() == [100, 101, 102]
    assert made[1, :8].tolist() == [116, 7, 124, *range(116 + 9, 116 + 14)]
    assert made[2, :8].tolist() == [132, 3, 2, 4, *range(136, 140)]
    assert table[1, 1] == 117, "the runner's own table stays as it is"
