"""The probe on attention in plain torch, compared with full attention."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from tests.ucm.sparse.fake_view import FakeView, metadata
from tests.ucm.sparse.steps import step
from ucm.errors import ConfigError
from ucm.sparse.base import Role
from ucm.sparse.topk.attention_share import COMPARED, TARGETS, MassProbe

if TYPE_CHECKING:
    from ucm.sparse.attention import StepBatch

BLOCKS, SIZE, HEADS, KV_HEADS, HEAD = 40, 4, 4, 2, 8
LAYER = "model.layers.0.self_attn.attn"
#: In blocks of 4 tokens: one of sinks, and two recent ones.
OPTIONS = {"budgets": [0.5], "every": 1, "sink_tokens": 4, "recent_tokens": 4}


def probe(**options: Any) -> MassProbe:
    made = MassProbe(SimpleNamespace(), Role.WORKER, {**OPTIONS, **options})
    made.attention = FakeView()
    made.worker_started()
    return made


class TwoRanks(FakeView):
    """A view with a second rank, whose heads attend like this rank's heads or to the opposite end.

    Args:
        others: ``alike`` or ``elsewhere``.
    """

    def __init__(self, others: str) -> None:
        super().__init__()
        self._others = others

    @property
    def ranks(self) -> int:
        return 2

    def sum_over_ranks(self, counts: torch.Tensor) -> torch.Tensor:
        assert counts.dtype == torch.int64
        return counts + (counts if self._others == "alike" else counts.flip(-1))


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(made: MassProbe, batch: StepBatch, rows: list[list[int]], kv: torch.Tensor, query: torch.Tensor) -> None:
    dense = metadata(batch, rows)
    made.execute_begin(None, None, batch)
    assert made.attention_begin(LAYER, query, query, query, kv, dense)[3] is dense
    made.attention_finished(LAYER, query, kv, dense, query)


def true_masses(query: torch.Tensor, keys: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the share of attention of each block, head by head."""
    blocks = -(-tokens // SIZE)
    found = torch.zeros(blocks)
    flat = keys.flatten(0, 1)[:tokens]
    for head in range(HEADS):
        weights = (flat[:, head // (HEADS // KV_HEADS)] @ query[head] * HEAD**-0.5).softmax(0)
        for token, weight in enumerate(weights):
            found[token // SIZE] += weight / HEADS
    return found


def test_what_is_kept_is_the_true_share_of_the_attention() -> None:
    tokens, row = 62, list(range(5, 21))
    made, kv = probe(), drawn(0, 2, BLOCKS, SIZE, KV_HEADS, HEAD)
    query = drawn(1, 3, HEADS, HEAD) * 2
    # A prefill of two tokens precedes the decode, and is not measured.
    run(made, step(("a", 4, 2, 40), ("b", tokens - 1, 1, 9)), [[30, 31], row], kv, query)
    masses = true_masses(query[2], kv[0][row], tokens)
    layer = made.report()["layers"][LAYER]
    assert (layer["samples"], layer["counted"], made.report()["lengths"]) == (1, {"0.5": 1}, [tokens, tokens])
    # Of 16 blocks 8 are read: one of sinks, two recent ones, and five of the 13 between them.
    always, between = masses[0] + masses[14:].sum(), masses[1:14]
    kept = layer["kept"]["0.5"]
    assert tuple(kept) == COMPARED
    assert kept["oracle"] == pytest.approx(float(always + between.topk(5).values.sum()), abs=1e-6)
    assert kept["random"] == pytest.approx(float(always + between.sum() * 5 / 13), abs=1e-6)
    possible = {round(float(always + between[list(some)].sum()), 5) for some in combinations(range(13), 5)}
    for name in set(COMPARED) - {"random"}:
        assert round(kept[name], 5) in possible
        assert kept[name] <= kept["oracle"] + 1e-6
    for target in TARGETS:
        largest = masses.sort(descending=True).values.cumsum(0)
        needed = next(count for count in range(1, 17) if largest[count - 1] >= target) / 16
        assert layer["needed"][str(target)] == layer["worst"][str(target)] == pytest.approx(needed)


def test_a_block_with_the_wanted_key_is_found_by_codes() -> None:
    row = list(range(16))
    made, kv, query = probe(), drawn(0, 2, BLOCKS, SIZE, KV_HEADS, HEAD) * 0.1, torch.ones(1, HEADS, HEAD)
    kv[0, 6, 2] = 8.0
    run(made, step(("b", 60, 1, 9)), [row], kv, query)
    kept = made.report()["layers"][LAYER]["kept"]["0.5"]
    assert min(kept["codes"], kept["oracle"]) > 0.99
    assert kept["random"] < 0.5


def test_a_choice_is_that_of_the_heads_of_all_ranks() -> None:
    """Another rank with the same heads changes nothing; with other heads it changes the choice."""
    tokens, row = 62, list(range(5, 21))
    kv, query = drawn(0, 2, BLOCKS, SIZE, KV_HEADS, HEAD), drawn(1, 1, HEADS, HEAD) * 2
    batch, found = step(("b", tokens - 1, 1, 9)), []
    for others in (None, "alike", "elsewhere"):
        made = probe()
        made.attention = FakeView() if others is None else TwoRanks(others)
        run(made, batch, [row], kv, query)
        found.append(made.report()["layers"][LAYER])
    alone, alike, elsewhere = found
    for name in COMPARED:
        assert alike["kept"]["0.5"][name] == pytest.approx(alone["kept"]["0.5"][name], abs=1e-6)
    assert elsewhere["kept"]["0.5"]["oracle"] < alone["kept"]["0.5"]["oracle"] - 0.01
    assert elsewhere["needed"]["0.9"] > alone["needed"]["0.9"]


def test_a_context_within_the_budget_says_only_what_it_needs() -> None:
    made, kv = probe(), drawn(0, 2, BLOCKS, SIZE, KV_HEADS, HEAD)
    run(made, step(("b", 15, 1, 9)), [[1, 2, 3, 4]], kv, drawn(1, 1, HEADS, HEAD))
    layer = made.report()["layers"][LAYER]
    assert (layer["samples"], layer["kept"], layer["counted"]) == (1, {}, {})
    assert 0 < layer["needed"]["0.9"] <= layer["needed"]["0.99"] <= 1


def test_prompts_are_not_measured_and_of_decodes_every_second() -> None:
    made, kv = probe(every=2), drawn(0, 2, BLOCKS, SIZE, KV_HEADS, HEAD)
    row = list(range(16))
    run(made, step(("b", 0, 40, 40)), [row], kv, drawn(1, 40, HEADS, HEAD))
    assert made.report() == {"layers": {}, "lengths": None}
    for tokens in range(40, 45):
        run(made, step(("b", tokens, 1, 40)), [row], kv, drawn(tokens, 1, HEADS, HEAD))
    assert made.report()["layers"][LAYER]["samples"] == 2
    assert made.report()["lengths"] == [42, 44]


@pytest.mark.parametrize("budgets", [[], [0.0], [1.5], [0.1, -1.0]])
def test_budgets_are_shares(budgets: list[float]) -> None:
    with pytest.raises(ConfigError, match="shares above 0 and at most 1"):
        probe(budgets=budgets)
