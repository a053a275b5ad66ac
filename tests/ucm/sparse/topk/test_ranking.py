"""Summaries of blocks are made and scored a few at a time; shares of heads are added up, and equal ones ordered."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from ucm.sparse.topk import codes
from ucm.sparse.topk.codes import WHOLE, KeyCodes, ranked, shares_of

BLOCKS, SIZE, KV_HEADS, HEAD = 9, 4, 2, 8


def keys(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn((BLOCKS, SIZE, KV_HEADS, HEAD), generator=source).to(dtype)


def made_of(cache: torch.Tensor) -> KeyCodes:
    found = KeyCodes(BLOCKS, cache[:1])
    found.update(torch.arange(BLOCKS), lambda ids: cache[ids])
    return found


def test_only_the_named_blocks_are_updated() -> None:
    old, new = keys(0), keys(1)
    made = made_of(old)
    made.update(torch.tensor([6, 2]), lambda ids: new[ids])
    mixed = old.clone()
    mixed[[6, 2]] = new[[6, 2]]
    query, ids = torch.ones((1, 2, HEAD)), torch.arange(BLOCKS)[None]
    assert torch.equal(made.scores(query, ids), made_of(mixed).scores(query, ids))


def test_keys_are_read_a_few_blocks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "AT_ONCE", 3 * SIZE * KV_HEADS * HEAD)
    cache, read = keys(), []

    def read_keys(ids: torch.Tensor) -> torch.Tensor:
        read.append(ids.tolist())
        return cache[ids]

    made = KeyCodes(BLOCKS, cache[:1])
    ids = [5, 1, 2, 8, 0]
    made.update(torch.tensor(ids), read_keys)
    assert read == [[5, 1, 2], [8, 0]]
    assert torch.equal(made._codes[:, ids], made_of(cache)._codes[:, ids])


def test_more_keys_are_read_at_once_where_each_reading_is_a_launch() -> None:
    """A request's first 32,768 tokens with 8 heads of 128 channels: 64 readings per layer on a CPU, 4 elsewhere."""
    keys = [torch.zeros((1, 16, 8, 128), device=device) for device in ("cpu", "meta")]
    assert [-(-2048 // KeyCodes(4, of).at_once) for of in keys] == [64, 4]


def test_rows_are_scored_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a preemption each generated token is a row; what all together need would not fit into a device."""
    made = made_of(keys())
    source = torch.Generator().manual_seed(7)
    query, ids = torch.randn((5, 6, HEAD), generator=source), torch.randint(BLOCKS, (5, 3), generator=source)
    hidden = torch.zeros((5, 3), dtype=torch.bool)
    hidden[1, 2] = hidden[4, 1:] = True
    scored, scores = [], made.scores

    def counted(some: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        scored.append(len(some))
        return scores(some, blocks)

    monkeypatch.setattr(made, "scores", counted)
    monkeypatch.setattr(codes, "SCORED_AT_ONCE", 2 * (KV_HEADS * HEAD + 6) * 3)
    for of in (None, hidden):
        scored.clear()
        found = made.shares(query, ids, of)
        torch.testing.assert_close(found / WHOLE, shares_of(scores(query, ids), of) / WHOLE)
        assert scored == [2, 2, 1]


def test_shares_are_those_of_a_softmax_per_head() -> None:
    scores = torch.randn((KV_HEADS, 2, 3, 5), generator=torch.Generator().manual_seed(3))
    found = shares_of(scores, None)
    assert found.shape == (2, 5)
    assert found.dtype == torch.int64
    torch.testing.assert_close((found / WHOLE).sum(-1), torch.full((2,), 6.0))
    wanted = sum(scores[k, 1, g].exp() / scores[k, 1, g].exp().sum() for k in range(KV_HEADS) for g in range(3))
    torch.testing.assert_close(found[1] / WHOLE, wanted)


def test_what_is_chosen_does_not_depend_on_how_heads_are_spread_over_ranks() -> None:
    """Bit-identical, although sums of floating-point numbers depend on their order."""
    scores = torch.randn((8, 3, 4, 700), generator=torch.Generator().manual_seed(6))
    for ranks in (2, 4, 8):
        assert torch.equal(
            torch.stack([shares_of(of, None) for of in scores.chunk(ranks)]).sum(0), shares_of(scores, None)
        )
    assert len(set(ranked(torch.zeros(1, 700, dtype=torch.int64))[0].tolist())) == 700


def test_a_head_that_seeks_one_block_is_not_drowned_by_heads_that_seek_none() -> None:
    """Two heads have large but irrelevant differences between blocks; the third needs the last block."""
    scores = torch.zeros((1, 1, 3, 4))
    scores[0, 0, 0] = torch.tensor([40.0, 39.9, 39.8, 39.0])
    scores[0, 0, 1] = torch.tensor([39.9, 40.0, 39.8, 39.0])
    scores[0, 0, 2] = torch.tensor([0.0, 0.0, 0.0, 1.5])
    assert scores.sum((0, 2))[0].argmax() != 3
    assert shares_of(scores, None)[0].argmax() == 3


def test_what_is_hidden_has_no_share() -> None:
    scores = torch.randn((KV_HEADS, 2, 3, 5), generator=torch.Generator().manual_seed(4))
    hidden = torch.tensor([[False] * 5, [False, False, False, True, True]])
    found = shares_of(scores, hidden)
    assert found[1, 3:].tolist() == [0, 0]
    torch.testing.assert_close(found[1, :3], shares_of(scores[..., :3], None)[1], rtol=0, atol=WHOLE >> 20)
    assert torch.equal(found[0], shares_of(scores, None)[0])
