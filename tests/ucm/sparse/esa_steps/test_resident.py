"""What is chosen of a middle, where it comes to lie, and the tables that name it."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; tests/e2e/test_sparse_esa.py runs these beside it")

import torch

from ucm.sparse import resident
from ucm.sparse.attention import StepBatch
from ucm.sparse.esa_tables import MiddleRow, MiddleTables
from ucm.sparse.resident import MiddleBounds, ResidentLayer

BLOCKS, BLOCK, KV_HEADS, HEADS, SIZE = 200, 4, 2, 4, 8


def bounds_of(keys: torch.Tensor, pieces: tuple[int, ...]) -> MiddleBounds:
    """Bounds of ``[blocks, BLOCK, KV_HEADS, SIZE]``, added in pieces, from blocks in another order."""
    found, done = MiddleBounds(), 0
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(1))
    cache = torch.empty_like(keys)
    cache[order] = keys
    for piece in pieces:
        found.append(order[done : done + piece].tolist(), lambda ids: cache[ids], "cpu")
        done += piece
    return found


def test_a_block_is_wanted_as_its_bound_says() -> None:
    keys = torch.randn(BLOCKS, BLOCK, KV_HEADS, SIZE, generator=torch.Generator().manual_seed(2))
    query = torch.randn(6, HEADS, SIZE, generator=torch.Generator().manual_seed(3))
    own = torch.randn(6, KV_HEADS, SIZE, generator=torch.Generator().manual_seed(4))
    expected = torch.zeros(BLOCKS)
    for place, token in enumerate(query):
        whole = torch.zeros(BLOCKS)
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            groups = [*keys[:, :, kv_head], own[:BLOCK, kv_head], *([own[BLOCK:, kv_head]] if place >= BLOCK else [])]
            bound = torch.stack(
                [torch.maximum(token[head] * of.amax(0), token[head] * of.amin(0)).sum(-1) for of in groups]
            )
            assert all(bool((bound[at] >= of @ token[head] - 1e-5).all()) for at, of in enumerate(groups))
            whole += (bound * SIZE**-0.5).softmax(0)[:BLOCKS]
        expected = torch.maximum(expected, whole)
    for pieces in ((BLOCKS,), (1, 63, 1, 100, 35)):
        torch.testing.assert_close(bounds_of(keys, pieces).wanted(query, own, []), expected)


def test_a_long_chunk_is_looked_at_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.randn(BLOCKS, BLOCK, KV_HEADS, SIZE, generator=torch.Generator().manual_seed(2))
    query = torch.randn(50, HEADS, SIZE, generator=torch.Generator().manual_seed(3))
    own = torch.randn(50, KV_HEADS, SIZE, generator=torch.Generator().manual_seed(4))
    found = bounds_of(keys, (BLOCKS,))
    at_once = found.wanted(query, own, [])
    monkeypatch.setattr(resident, "AT_ONCE", 7 * HEADS * BLOCKS)
    torch.testing.assert_close(found.wanted(query, own, []), at_once)


def test_a_token_that_means_one_block_outweighs_many_that_mean_none() -> None:
    keys = torch.full((BLOCKS, BLOCK, KV_HEADS, SIZE), 4.0)  # great products with whatever is positive
    keys[77] = torch.tensor([-1.0] * (SIZE - 1) + [8.0])
    vague = torch.full((500, HEADS, SIZE), 3.0)
    sharp = torch.zeros(1, HEADS, SIZE)
    sharp[..., -1] = 9.0
    wanted = bounds_of(keys, (BLOCKS,)).wanted(torch.cat((vague, sharp)), torch.zeros(501, KV_HEADS, SIZE), [])
    assert int(wanted.argmax()) == 77
    assert wanted[77] > 10 * wanted.sort().values[-2]


def test_a_token_that_means_its_own_chunk_hardly_counts() -> None:
    keys = torch.zeros(BLOCKS, BLOCK, KV_HEADS, SIZE)
    keys[5, ..., 0], keys[9, ..., 1] = 6.0, 5.0
    query = torch.zeros(40, HEADS, SIZE)
    query[20, :, 0] = query[30, :, 1] = 4.0
    own = torch.zeros(40, KV_HEADS, SIZE)
    assert bounds_of(keys, (BLOCKS,)).wanted(query, own, []).argmax() == 5
    own[15, :, 0] = 20.0  # what the token at 20 looks for stands right before it, and not after the other
    assert bounds_of(keys, (BLOCKS,)).wanted(query, own, []).argmax() == 9


def test_a_chunk_s_last_tokens_have_blocks_of_their_own() -> None:
    """Every token looks for a block of its own; the last one, for many."""
    keys = torch.zeros(BLOCKS, BLOCK, KV_HEADS, 128)
    places = torch.arange(120)
    keys[places, ..., places] = 5.0
    query = torch.zeros(100, HEADS, 128)
    query[places[:100], :, places[:100]] = 20.0
    query[-1] = 0.0
    query[-1, :, 108:120] = 20.0
    own = torch.zeros(100, KV_HEADS, 128)
    chosen = bounds_of(keys, (BLOCKS,)).choose(query, own, [], 16)
    assert chosen == sorted(set(chosen))
    assert set(range(108, 120)) <= set(chosen), "three quarters of them for the last token"
    assert len([place for place in chosen if 68 <= place < 99]) >= 2, "an eighth for the last few"
    assert len(chosen) == 16
    alone = bounds_of(keys, (BLOCKS,)).choose(query[-1:], own[-1:], [], 12)
    assert alone == list(range(108, 120))


def test_a_lost_block_is_never_wanted() -> None:
    keys = torch.randn(20, BLOCK, KV_HEADS, SIZE, generator=torch.Generator().manual_seed(4))
    found, own = bounds_of(keys, (20,)), torch.zeros(1, KV_HEADS, SIZE)
    query = torch.randn(1, HEADS, SIZE, generator=torch.Generator().manual_seed(5))
    best = int(found.wanted(query, own, []).argmax())
    without = found.wanted(query, own, [best])
    assert without[best] == 0
    assert bool((without >= found.wanted(query, own, []))[[at for at in range(20) if at != best]].all())


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


def test_tables_name_sinks_resident_and_latest_blocks() -> None:
    # Rows: without a middle; with one of which part is read; with one that is read whole.
    new, computed = np.array([1, 3, 1]), np.array([9, 50, 29])
    batch = StepBatch(["a", "b", "c"], new, computed, computed, np.zeros(3, np.bool_))
    table = torch.arange(100, 100 + 3 * 16, dtype=torch.int32).view(3, 16)
    tables = MiddleTables(batch, [MiddleRow(1, 8, 2), MiddleRow(2, 3, 3)], table, 1, BLOCK)
    assert tables.seq_lens.tolist() == [10, 53 - 6 * BLOCK, 30]
    assert tables.max_seq_len == 30
    found = tables.with_resident([[7, 5], [3, 2, 4]])
    assert found.dtype == torch.int32
    assert found[0, :3].tolist() == [100, 101, 102]
    assert found[1, :8].tolist() == [116, 7, 5, *range(116 + 9, 116 + 14)]
    assert found[2, :8].tolist() == [132, 3, 2, 4, *range(136, 140)]
    assert table[1, 1] == 117, "the runner's own table stays as it is"
