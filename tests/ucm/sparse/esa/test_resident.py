"""The selection from an offloaded context, the resident blocks, and the tables that contain them."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch", reason="torch is not installed; tests/e2e/test_inside.py runs these beside it")

import torch

from tests.ucm.sparse.steps import step
from ucm.errors import SparseMethodError
from ucm.sparse.blocks import SinksAndWindow
from ucm.sparse.esa.resident import Listed, OffloadedBounds, OffloadedTables, ResidentLayer, reading
from ucm.sparse.topk.representatives import WHOLE

BLOCKS, BLOCK, KV_HEADS, HEADS, SIZE = 200, 4, 2, 4, 8


def bounds_of(keys: torch.Tensor, pieces: tuple[int, ...]) -> OffloadedBounds:
    """Return the bounds of ``[blocks, BLOCK, KV_HEADS, SIZE]``, added in pieces, from blocks in another order."""
    found, done = OffloadedBounds(), 0
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(1))
    cache = torch.empty_like(keys)
    cache[order] = keys
    for piece in pieces:
        found.append(order[done : done + piece], lambda ids: cache[ids])
        done += piece
    return found


def test_a_block_is_wanted_as_its_bound_says() -> None:
    keys = torch.randn(BLOCKS, BLOCK, KV_HEADS, SIZE, generator=torch.Generator().manual_seed(2))
    token = torch.randn(HEADS, SIZE, generator=torch.Generator().manual_seed(3))
    own = torch.randn(KV_HEADS, SIZE, generator=torch.Generator().manual_seed(4))
    for blocks in (BLOCKS, 150):
        expected = torch.zeros(blocks)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            groups = [*keys[:blocks, :, kv_head], own[None, kv_head]]
            bound = torch.stack(
                [torch.maximum(token[head] * of.amax(0), token[head] * of.amin(0)).sum(-1) for of in groups]
            )
            assert all(bool((bound[at] >= of @ token[head] - 1e-5).all()) for at, of in enumerate(groups))
            expected += (bound * SIZE**-0.5).softmax(0)[:blocks]
        for pieces in ((BLOCKS,), (1, 63, 1, 100, 35)):
            found = bounds_of(keys, pieces).wanted(token, own, blocks)
            assert found.dtype == torch.int64
            torch.testing.assert_close(found / WHOLE, expected)


def test_what_has_no_bounds_cannot_be_chosen() -> None:
    found = bounds_of(torch.zeros(4, BLOCK, KV_HEADS, SIZE), (4,))
    with pytest.raises(RuntimeError, match="nothing to choose from"):
        found.wanted(torch.zeros(HEADS, SIZE), torch.zeros(KV_HEADS, SIZE), 5)


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


WINDOW = SinksAndWindow(3, 10, tile=8)


def test_a_resident_block_whose_load_failed_holds_nothing() -> None:
    layer = ResidentLayer()
    assert layer.assign([5, 6, 7], [5, 6, 7], 3) == [0, 1, 2]
    layer.clear([6])
    assert layer.missing([5, 6, 7]) == [6]
    assert layer.assign([8], [5, 7, 8], 3) == [1]


def test_what_a_token_reads_is_a_matter_of_its_position_and_of_the_prompt() -> None:
    """Rows: a decode within the budget, one beyond it, a prompt's last chunk, one before, a preempted request's."""
    batch = step(("fits", 40, 1, 9), ("a", 60, 1, 30), ("last", 30, 40, 70), ("chunk", 50, 9, 90), ("back", 58, 2, 60))
    found = reading(batch, WINDOW, 6, BLOCK)
    by_piece = zip(found.pieces.rows, found.pieces.begins, found.pieces.ends, found.skipped, strict=True)
    rows: list[list[tuple[int, ...]]] = [[], [], [], [], []]
    for row, *of_piece in by_piece:
        rows[row].append(tuple(of_piece))
    assert rows[0] == [(40, 41, 0)]
    assert rows[1] == [(60, 61, 0)]
    assert [skipped for *_, skipped in rows[2]] == [0, 0, 0, 8, 10, 12, 0]
    assert rows[2][-1] == (69, 70, 0)
    assert rows[3] == [(50, 56, 8), (56, 59, 10)]
    assert [(begin, end) for begin, end, _ in rows[4]] == [(58, 59), (59, 60)]
    lasts = found.pieces.lasts
    assert found.choosing == {int(lasts[row]): WINDOW.skipped_by(p, 0, BLOCK) for row, p in ((1, 60), (2, 69), (4, 59))}
    with pytest.raises(SparseMethodError, match="several tokens of an answer"):
        reading(step(("back", 58, 3, 60)), WINDOW, 6, BLOCK)


def test_tables_name_sinks_chosen_and_latest_blocks() -> None:
    # Rows: one reads everything; one chooses two of its eight blocks; one loads all of its three released blocks.
    batch = step(("a", 9, 1, 9), ("b", 52, 1, 40), ("c", 29, 1, 20))
    found = reading(batch, SinksAndWindow(4, 16, tile=1), 2, BLOCK)
    assert found.choosing == {1: 8}
    table = torch.arange(100, 100 + 3 * 16, dtype=torch.int32).view(3, 16)
    tables = OffloadedTables(found, [Listed(1, 8, 2), Listed(2, 3, 3)], table, 1, BLOCK)
    assert tables.seq_lens.tolist() == [10, 53 - 6 * BLOCK, 30]
    assert tables.max_seq_len == 30
    assert tables.split is None
    made = tables.naming([2, 8, 1, 2, 3], [7, -1, 3, 2, 4])
    assert made.dtype == torch.int32
    assert made[0, :3].tolist() == [100, 101, 102]
    assert made[1, :8].tolist() == [116, 7, 124, *range(116 + 9, 116 + 14)]
    assert made[2, :8].tolist() == [132, 3, 2, 4, *range(136, 140)]
    assert table[1, 1] == 117, "the runner's own table stays as it is"
