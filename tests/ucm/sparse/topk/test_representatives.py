"""Bounds of keys: they belong to the right blocks, exceed every product, and are read once at most."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from ucm.sparse.topk import representatives
from ucm.sparse.topk.representatives import WHOLE, KeyBounds, ranked, shares

BLOCKS, SIZE, KV_HEADS, HEAD = 9, 4, 2, 8


def keys(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn((BLOCKS, SIZE, KV_HEADS, HEAD), generator=source).to(dtype)


def bounds_of(cache: torch.Tensor, block_ids: list[int]) -> KeyBounds:
    found = KeyBounds(BLOCKS, cache[:1])
    found.update(torch.tensor(block_ids), lambda ids: cache[ids])
    return found


def products(query: torch.Tensor, cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Return the largest product of each head with a key of each block, in the layout of the bounds."""
    rows, heads, _ = query.shape
    grouped = query.double().view(rows, KV_HEADS, heads // KV_HEADS, HEAD)
    found = torch.einsum("rkgd,rbskd->krgbs", grouped, cache[block_ids].double())
    return found.amax(-1) * HEAD**-0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [2, 6])
def test_no_product_is_above_its_bound(dtype: torch.dtype, heads: int) -> None:
    cache = keys(dtype=dtype)
    query = torch.randn((3, heads, HEAD), generator=torch.Generator().manual_seed(1)).to(dtype)
    ids = torch.tensor([[4, 1, 7], [2, 2, 0], [8, 5, 3]])
    found = bounds_of(cache, list(range(BLOCKS))).scores(query, ids)
    assert found.shape == (KV_HEADS, 3, heads // KV_HEADS, 3)
    assert found.dtype == torch.float32
    rounding = 0.0 if dtype == torch.float32 else 0.15
    assert (found.double() >= products(query, cache, ids) - rounding - 1e-5).all()


def test_of_a_block_of_one_key_the_bound_is_the_product() -> None:
    cache = keys()[:, :1]
    query = torch.randn((2, 4, HEAD), generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[0, 3, 5, 8], [1, 2, 6, 7]])
    found = bounds_of(cache, list(range(BLOCKS))).scores(query, ids)
    torch.testing.assert_close(found.double(), products(query, cache, ids), rtol=1e-5, atol=1e-5)


def test_only_the_named_blocks_are_updated() -> None:
    old, new = keys(0), keys(1)
    bounds = bounds_of(old, list(range(BLOCKS)))
    bounds.update(torch.tensor([6, 2]), lambda ids: new[ids])
    mixed = old.clone()
    mixed[[6, 2]] = new[[6, 2]]
    query, ids = torch.ones((1, 2, HEAD)), torch.arange(BLOCKS)[None]
    assert torch.equal(bounds.scores(query, ids), bounds_of(mixed, list(range(BLOCKS))).scores(query, ids))


def test_it_makes_no_difference_whether_the_whole_cache_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = bounds_of(keys(), list(range(BLOCKS)))
    query = torch.randn((2, 6, HEAD), generator=torch.Generator().manual_seed(5))
    ids = torch.tensor([[7, 0, 3], [3, 8, 8]])
    found = []
    for few in (0, BLOCKS):
        monkeypatch.setattr(representatives, "FEW", few)
        found.append(bounds.scores(query, ids))
    torch.testing.assert_close(found[0], found[1])


def test_keys_are_read_a_few_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(representatives, "AT_ONCE", 3 * SIZE * KV_HEADS * HEAD)
    cache, read = keys(), []

    def read_keys(ids: torch.Tensor) -> torch.Tensor:
        read.append(ids.tolist())
        return cache[ids]

    bounds = KeyBounds(BLOCKS, cache[:1])
    ids = [5, 1, 2, 8, 0]
    bounds.update(torch.tensor(ids), read_keys)
    assert read == [[5, 1, 2], [8, 0]]
    assert torch.equal(bounds._bounds[:, ids], bounds_of(cache, ids)._bounds[:, ids])


def test_more_keys_are_read_at_once_where_each_reading_is_a_launch() -> None:
    """A request's first 32,768 tokens with 8 heads of 128 channels: 64 readings per layer on a CPU, 4 elsewhere."""
    keys = [torch.zeros((1, 16, 8, 128), device=device) for device in ("cpu", "meta")]
    assert [-(-2048 // KeyBounds(4, of)._at_once) for of in keys] == [64, 4]


def test_rows_are_scored_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a preemption each generated token is a row; the bounds of all together would not fit into a device."""
    bounds = bounds_of(keys(), list(range(BLOCKS)))
    source = torch.Generator().manual_seed(7)
    query, ids = torch.randn((5, 6, HEAD), generator=source), torch.randint(BLOCKS, (5, 3), generator=source)
    hidden = torch.zeros((5, 3), dtype=torch.bool)
    hidden[1, 2] = hidden[4, 1:] = True
    scored, scores = [], bounds.scores

    def counted(some: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        scored.append(len(some))
        return scores(some, blocks)

    monkeypatch.setattr(bounds, "scores", counted)
    for few, of in ((0, None), (0, hidden), (BLOCKS, hidden)):
        monkeypatch.setattr(representatives, "FEW", few)
        monkeypatch.setattr(representatives, "SCORED_AT_ONCE", 2 * max(KV_HEADS * 2 * HEAD, 6 * few) * 3)
        scored.clear()
        found = bounds.shares(query, ids, of)
        torch.testing.assert_close(found / WHOLE, shares(scores(query, ids), of) / WHOLE)
        assert scored == [2, 2, 1]


def test_a_product_too_great_for_half_precision_is_the_greatest() -> None:
    cache = keys().half()
    cache[3], cache[5] = 400.0, 1.0
    query = torch.full((1, 4, HEAD), 2000.0, dtype=torch.float16)
    found = bounds_of(cache, list(range(BLOCKS))).shares(query, torch.arange(BLOCKS)[None], None)
    assert int(found[0, 3]) == found.sum() == 4 * WHOLE


def test_shares_are_those_of_a_softmax_per_head() -> None:
    scores = torch.randn((KV_HEADS, 2, 3, 5), generator=torch.Generator().manual_seed(3))
    found = shares(scores, None)
    assert found.shape == (2, 5)
    assert found.dtype == torch.int64
    torch.testing.assert_close((found / WHOLE).sum(-1), torch.full((2,), 6.0))
    wanted = sum(scores[k, 1, g].exp() / scores[k, 1, g].exp().sum() for k in range(KV_HEADS) for g in range(3))
    torch.testing.assert_close(found[1] / WHOLE, wanted)


def test_what_is_chosen_does_not_depend_on_how_heads_are_spread_over_ranks() -> None:
    """Bit-identical, although sums of floating-point numbers depend on their order."""
    scores = torch.randn((8, 3, 4, 700), generator=torch.Generator().manual_seed(6))
    for ranks in (2, 4, 8):
        assert torch.equal(torch.stack([shares(of, None) for of in scores.chunk(ranks)]).sum(0), shares(scores, None))
    assert len(set(ranked(torch.zeros(1, 700, dtype=torch.int64))[0].tolist())) == 700


def test_a_head_that_seeks_one_block_is_not_drowned_by_heads_that_seek_none() -> None:
    """Two heads have large but irrelevant differences between blocks; the third needs the last block."""
    scores = torch.zeros((1, 1, 3, 4))
    scores[0, 0, 0] = torch.tensor([40.0, 39.9, 39.8, 39.0])
    scores[0, 0, 1] = torch.tensor([39.9, 40.0, 39.8, 39.0])
    scores[0, 0, 2] = torch.tensor([0.0, 0.0, 0.0, 1.5])
    assert scores.sum((0, 2))[0].argmax() != 3
    assert shares(scores, None)[0].argmax() == 3


def test_what_is_hidden_has_no_share() -> None:
    scores = torch.randn((KV_HEADS, 2, 3, 5), generator=torch.Generator().manual_seed(4))
    hidden = torch.tensor([[False] * 5, [False, False, False, True, True]])
    found = shares(scores, hidden)
    assert found[1, 3:].tolist() == [0, 0]
    torch.testing.assert_close(found[1, :3], shares(scores[..., :3], None)[1], rtol=0, atol=WHOLE >> 20)
    assert torch.equal(found[0], shares(scores, None)[0])
