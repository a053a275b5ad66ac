"""How much attention choices keep, measured in a method's steps and compared with attention computed here."""

from __future__ import annotations

from itertools import accumulate
from unittest.mock import Mock

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from tests.ucm.sparse.fake_view import metadata
from tests.ucm.sparse.steps import step
from tests.ucm.sparse.topk.test_block_topk import HEAD, HEADS, KV_HEADS, LAYERS, LONG, SIZE, cache, method, run
from ucm.sparse.topk import samples


@pytest.fixture(autouse=True)
def _few_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "AT_ONCE", 3 * SIZE * KV_HEADS * HEAD)


def by_block(query: torch.Tensor, keys: torch.Tensor, blocks: list[int], tokens: int) -> list[float]:
    """The share of the attention to each block, the mean over heads, in 64 bits."""
    flat = keys[blocks].flatten(0, 1)[:tokens].double()  # [tokens, num_kv_heads, head_size]
    of_heads = flat.repeat_interleave(HEADS // KV_HEADS, 1)
    weights = (torch.einsum("hd,thd->ht", query.double(), of_heads) * HEAD**-0.5).softmax(-1)
    return [float(weights[:, place : place + SIZE].sum(-1).mean()) for place in range(0, tokens, SIZE)]


def test_the_share_is_that_of_what_is_read() -> None:
    """Rows take turns; the last block is incomplete, and one row reads fewer blocks than its table has."""
    made, kv, kept, needed = method(sample_every=1), cache(1), dict.fromkeys(LAYERS[1:], 0.0), 0.0
    tables = [LONG, list(range(20, 28))]
    for computed in (29, 30):
        batch = step(("a", computed, 1, 8), ("b", computed - 1, 1, 8), a={"token_budget": 24})
        query = torch.randn((2, HEADS, HEAD), generator=torch.Generator().manual_seed(computed)) * 2
        for number, used in enumerate(run(made, batch, metadata(batch, tables), kv, query)[1:]):
            count = -(-int(used.seq_lens[number]) // SIZE)
            read = used.block_table[number, :count].tolist()
            masses = by_block(query[number], kv[0], tables[number], computed - number)
            kept[LAYERS[1 + number]] += sum(of for place, of in enumerate(masses) if tables[number][place] in read)
            largest = list(accumulate(sorted(masses, reverse=True)))
            needed += (1 + sum(held < 0.95 for held in largest)) / 8
    found, wanted = made.figures(), sum(kept.values())
    assert found["attention_samples"] == 4
    assert found["attention_kept"] == pytest.approx(wanted, abs=1e-5)
    assert 0 < wanted < 4
    assert 0 < needed < 4
    layer, worst = min(kept.items(), key=lambda pair: pair[1])
    assert made.summary().endswith(
        f"{wanted / 4:.1%} of the attention kept in 4 samples, {worst / 2:.1%} in {layer}; "
        f"95% of it is in {needed / 4:.1%} of the context"
    )


def test_keys_of_the_step_itself_are_left_out() -> None:
    """After a preemption a step computes several tokens; in place of their keys the cache has another request's."""
    made, kv, batch = method(sample_every=1), cache(1), step(("a", 28, 3, 8))
    kv[0][LONG[28 // SIZE], 28 % SIZE :] = float("nan")
    query = torch.randn((3, HEADS, HEAD), generator=torch.Generator().manual_seed(3))
    run(made, batch, metadata(batch, [LONG]), kv, query)
    found = made.figures()
    assert found["attention_samples"] == 2
    assert 0 < found["attention_kept"] <= 2


def test_few_choices_are_measured_and_all_layers_get_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "FIRST", 3)
    made, kv, measured = method(sample_every=7), cache(), []
    batch, query = step(("a", 29, 1, 8)), torch.ones((1, HEADS, HEAD))
    for _ in range(14):
        made.execute_begin(None, None, batch)
        for name in LAYERS:
            before = made.figures()["attention_samples"]
            made.attention_begin(name, query, query, query, kv, metadata(batch, [LONG]))
            measured += [name] * int(made.figures()["attention_samples"] - before)
        made.execute_finished(None, None, None)
    assert measured == [LAYERS[1], LAYERS[2], LAYERS[1], LAYERS[2]]  # the choices 3, 10, 17 and 24 of two layers


def test_a_failure_to_measure_makes_the_requests_of_its_step_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    made, kv, batch = method(sample_every=1), cache(), step(("a", 29, 1, 8))
    query, dense = torch.ones((1, HEADS, HEAD)), metadata(batch, [LONG])
    made.execute_begin(None, None, batch)
    monkeypatch.setattr(samples, "kept_and_needed", Mock(side_effect=RuntimeError("no memory")))
    for name in LAYERS:
        assert made.attention_begin(name, query, query, query, kv, dense)[3] is dense
    assert made.counts["requests_failed"] == 1
