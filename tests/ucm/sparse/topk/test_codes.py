"""Codes of keys: their estimates are close, even if keys have much in common."""

from __future__ import annotations

import ctypes
import multiprocessing
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from ucm.logger import get_logger
from ucm.sparse import compiled
from ucm.sparse.topk import codes
from ucm.sparse.topk.codes import KeyCodes, packed, turn

BLOCKS, SIZE, KV_HEADS = 24, 16, 2


def keys(head: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn((BLOCKS, SIZE, KV_HEADS, head), generator=torch.Generator().manual_seed(seed))


def codes_of(cache: torch.Tensor) -> KeyCodes:
    found = KeyCodes(len(cache), cache[:1])
    found.update(torch.arange(len(cache)), lambda ids: cache[ids])
    return found


def test_blocks_that_are_appended_are_scored_as_if_they_had_been_there() -> None:
    """In portions, so that room is made several times."""
    cache = keys()
    found, begin = KeyCodes(1, cache[:1]), 0
    for count in (1, 3, 1, 12, 7):
        found.append(cache[begin : begin + count])
        begin += count
        query = torch.randn((1, 6, 64), generator=torch.Generator().manual_seed(begin))
        ids = torch.arange(begin)[None]
        assert found.size == begin <= found.num_blocks
        assert torch.equal(found.shares(query, ids, None), codes_of(cache[:begin]).shares(query, ids, None))
    assert found.size == BLOCKS


def true_scores(query: torch.Tensor, cache: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    grouped = query.unflatten(1, (KV_HEADS, -1)).double()
    products = torch.einsum("rkgd,rbskd->krgbs", grouped, cache[ids].double()) * query.shape[-1] ** -0.5
    return products.logsumexp(-1)


@pytest.mark.parametrize("head", [8, 64, 80, 128])
def test_a_turn_keeps_products_and_spreads_each_channel(head: int) -> None:
    found = turn(head)
    assert found.shape[1] % 64 == 0
    torch.testing.assert_close(found @ found.T, torch.eye(head))
    assert found.abs().max() <= 0.75
    assert torch.equal(found, turn(head))


def estimates(query: torch.Tensor, cache: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Compute the same without rounding queries, independently."""
    signed = turn(query.shape[-1]).double()
    means = cache.double().mean(1, keepdim=True)
    beyond = cache.double() - means
    turned = beyond @ signed
    signs = turned.sign() * turned.abs().mean(-1, keepdim=True)
    grouped = query.double().unflatten(1, (KV_HEADS, -1))
    found = torch.einsum("rkgd,rbskd->krgbs", grouped @ signed, signs[ids])
    found = found + torch.einsum("rkgd,rbskd->krgbs", grouped, means[ids])
    return (found * query.shape[-1] ** -0.5).logsumexp(-1)


@pytest.mark.parametrize(("head", "dtype"), [(64, torch.float32), (80, torch.float32), (128, torch.bfloat16)])
def test_estimates_of_the_logarithm_of_each_blocks_mass(head: int, dtype: torch.dtype) -> None:
    cache = keys(head).to(dtype)
    query = torch.randn((5, 6, head), generator=torch.Generator().manual_seed(1)).to(dtype)
    ids = torch.arange(BLOCKS).repeat(5, 1)
    found = codes_of(cache).scores(query, ids)
    assert found.shape == (KV_HEADS, 5, 3, BLOCKS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), estimates(query, cache, ids), atol=0.15, rtol=0.05)
    both = torch.stack((found.double().flatten(), true_scores(query, cache, ids).flatten()))
    # The accuracy of one bit per channel for independent keys.
    assert torch.corrcoef(both)[0, 1] > 0.7


def test_what_all_keys_have_in_common_does_not_matter() -> None:
    """The signs of such keys are all equal, so estimates from them would be useless."""
    cache = keys()
    query = torch.randn((3, 4, 64), generator=torch.Generator().manual_seed(2))
    shift = 50 * torch.randn(64, generator=torch.Generator().manual_seed(3))
    ids = torch.arange(BLOCKS).repeat(3, 1)
    true = true_scores(query, cache, ids)
    for of in (cache, cache + shift):
        found = codes_of(of).scores(query, ids)
        apart = (found - found.mean(-1, keepdim=True)) - (true - true.mean(-1, keepdim=True))
        assert apart.std() < 0.25 * true.std(-1).mean() + 0.2


@pytest.mark.parametrize("spread", [0.5, 1.0, 1.5])
def test_the_estimated_mass_of_a_choice_is_its_true_mass(spread: float) -> None:
    """On average over 20 sets of keys: an overconfident estimate claims more than it holds."""
    source, claimed, held = torch.Generator().manual_seed(10), 0.0, 0.0
    for _ in range(20):
        cache = torch.randn((64, SIZE, KV_HEADS, 64), generator=source) * spread
        query = 2 * torch.randn((1, 8, 64), generator=source)
        ids = torch.arange(64)[None]
        scores = codes_of(cache).scores(query, ids), true_scores(query, cache, ids)
        estimated, true = (of.softmax(-1).mean((0, 2))[0] for of in scores)
        best = estimated.topk(20).indices
        claimed, held = claimed + float(estimated[best].sum()) / 20, held + float(true[best].sum()) / 20
    assert abs(claimed - held) < 0.1
    assert held > 20 / 64


def test_a_key_that_the_query_seeks_is_found_in_a_block_of_many() -> None:
    cache = keys(seed=4)
    query = cache[13, 5].repeat_interleave(2, 0)[None] * 4
    found = codes_of(cache).shares(query, torch.arange(BLOCKS)[None], None)
    assert int(found[0].argmax()) == 13


def test_blocks_are_scored_where_they_lie() -> None:
    cache = keys(seed=5)
    query = torch.randn((2, 4, 64), generator=torch.Generator().manual_seed(6))
    all_of = codes_of(cache).scores(query, torch.arange(BLOCKS).repeat(2, 1))
    ids = torch.tensor([[7, 0, 3], [3, 8, 8]])
    torch.testing.assert_close(
        codes_of(cache).scores(query, ids), all_of.gather(-1, ids[None, :, None].expand(2, 2, 2, 3))
    )


def test_only_the_named_blocks_are_made() -> None:
    old, new = keys(seed=7), keys(seed=8)
    found = codes_of(old)
    found.update(torch.tensor([6, 2]), lambda ids: new[ids])
    mixed = old.clone()
    mixed[[6, 2]] = new[[6, 2]]
    query, ids = torch.ones((1, 2, 64)), torch.arange(BLOCKS)[None]
    assert torch.equal(found.scores(query, ids), codes_of(mixed).scores(query, ids))


def test_keys_that_are_all_the_same_are_no_numbers_that_are_none() -> None:
    cache = torch.ones((BLOCKS, SIZE, KV_HEADS, 64))
    found = codes_of(cache).scores(torch.zeros((1, 2, 64)), torch.arange(BLOCKS)[None])
    assert torch.isfinite(found).all()


def test_bits_are_packed_in_order() -> None:
    signs = torch.rand((3, 128), generator=torch.Generator().manual_seed(9)) > 0.5
    words = packed(signs)
    assert words.shape == (3, 2)
    places = torch.arange(64)
    assert torch.equal((words[..., None] >> places) % 2 > 0, signs.unflatten(-1, (2, 64)))


def test_a_head_has_the_same_codes_and_scores_whatever_other_heads_there_are() -> None:
    """Bit-identical, so that all tensor-parallel sizes choose the same blocks."""
    cache, query = keys(seed=11), torch.randn((2, 6, 64), generator=torch.Generator().manual_seed(12))
    ids = torch.arange(BLOCKS).repeat(2, 1)
    both = codes_of(cache)
    for head in range(KV_HEADS):
        alone = codes_of(cache[:, :, head : head + 1])
        assert torch.equal(alone._codes[0], both._codes[head])
        assert torch.equal(alone._scales[0], both._scales[head])
        assert torch.equal(alone._means[0], both._means[head])
        own = query[:, 3 * head : 3 * head + 3]
        torch.testing.assert_close(alone.scores(own, ids)[0], both.scores(query, ids)[head], atol=1e-5, rtol=0)


@pytest.mark.parametrize("block_ids", [[[3, 1]], [[0, 9, 5], [5, 5, 23]]])
@pytest.mark.parametrize("heads", [2, 8])
@pytest.mark.parametrize(("head", "size"), [(64, 16), (128, 32), (80, 48), (256, 16)])
def test_the_compiled_kernel_finds_what_torch_finds(
    head: int, size: int, heads: int, block_ids: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba", reason="numba comes with vLLM for the CPU")
    source = torch.Generator().manual_seed(13)
    cache = torch.randn((BLOCKS, size, KV_HEADS, head), generator=source)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    made, ids = codes_of(cache), torch.tensor(block_ids)
    query = 5 * torch.randn((len(ids), heads, head), generator=source)
    assert made._kernel is not None
    found = made.scores(query, ids)
    monkeypatch.setattr(made, "_kernel", None)
    torch.testing.assert_close(found, made.scores(query, ids), atol=2e-3, rtol=1e-4)
    monkeypatch.setattr(codes, "UNPACKED_AT_ONCE", 1)
    torch.testing.assert_close(found, made.scores(query, ids), atol=2e-3, rtol=1e-4)


def test_blocks_of_other_sizes_are_scored_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    assert codes_of(keys()[:, :5])._kernel is None
    assert codes_of(keys(head=72))._kernel is None


def test_the_kernel_finds_the_same_in_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="numba comes with vLLM for the CPU")
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    made, ids = codes_of(keys(seed=14)), torch.arange(BLOCKS)[None]
    query = torch.randn((1, 4, 64), generator=torch.Generator().manual_seed(15))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(made.scores(query, ids))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(of, found[0]) for of in found)


def test_without_torchs_threads_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())  # no OpenMP
    assert codes.cpu_kernel.__wrapped__(1) is None


def test_without_numba_torch_does_it_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(get_logger(), "propagate", True)
    assert codes.cpu_kernel.__wrapped__(1) is None
    assert "scored slowly, without numba" in caplog.text


def test_numba_is_not_loaded_where_engines_share_a_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine's process has a parent that started it; this one has none. All layers together log this once."""
    monkeypatch.setattr(get_logger(), "propagate", True)
    caplog.set_level("INFO")
    compiled._say_why_slow.cache_clear()
    assert [codes_of(keys(seed=16))._kernel for _ in range(3)] == [None] * 3
    assert len({id(record) for record in caplog.records if "scored slowly, without numba" in record.getMessage()}) == 1


def test_memory_is_what_the_documents_say() -> None:
    """For keys and values of two bytes: a bit per channel, a scale per token, a mean per block."""
    made = codes_of(keys(128).bfloat16())
    kept = sum(of.numel() * of.element_size() for of in (made._codes, made._scales, made._means))
    assert kept / (2 * keys(128).numel() * 2) == pytest.approx(0.03516 + 1 / (2 * SIZE), abs=1e-4)
