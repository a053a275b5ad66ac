"""Sparse drafts on attention in plain torch: what steps read, which requests are drafted, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from tests.ucm.sparse.fake_view import FakeView, metadata
from tests.ucm.sparse.steps import step
from ucm.errors import ConfigError, SparseMethodError
from ucm.integration.vllm.sparse.sharing import block_hash_seed
from ucm.sparse.base import Role
from ucm.sparse.topk.drafts import CUSTOM, DRAFTER, SparseDrafts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.ucm.sparse.fake_view import Metadata
    from ucm.sparse.attention import StepBatch

BLOCKS, SIZE, HEADS, KV_HEADS, HEAD = 40, 4, 4, 2, 8
LAYER = "model.layers.1.self_attn.attn"
#: In blocks of 4: one of sinks, one recent, two to choose.
OPTIONS = {"token_budget": 16, "min_context": 0, "sink_tokens": 4, "recent_tokens": 0, "dense_layers": 1}
ROW = list(range(10, 20))


class View(FakeView):
    """Of which a batch is a part of vLLM's."""

    def batch(self, runner: Any, scheduler_output: Any, input_batch: Any) -> StepBatch:
        return super().batch(runner, scheduler_output, input_batch.step)


class Worker:
    """A worker's method, and one layer of its model.

    Args:
        device: The type of its device.
        **options: Those of the method that differ from `OPTIONS`.
    """

    def __init__(self, device: str = "cuda", **options: Any) -> None:
        about = config(device_config=SimpleNamespace(device_type=device))
        self.method = SparseDrafts(about, Role.WORKER, {**OPTIONS, "drafting": "always", **options})
        self.view = View()
        #: Whether no request samples.
        self.all_greedy = True
        self.method.attention = self.view
        self.method.worker_started()
        self._kv = torch.randn((2, BLOCKS, SIZE, KV_HEADS, HEAD), generator=torch.Generator().manual_seed(0))
        self.view.bound = self._kv
        self.method.layer_seen(LAYER)
        self.method.layers_seen()

    def step(self, batch: StepBatch, rows: Sequence[Sequence[int]], **verified: int) -> Metadata:
        """Run a step of the engine; return the metadata that its attention uses."""
        output = SimpleNamespace(scheduled_spec_decode_tokens={name: [1] * of for name, of in verified.items()})
        self.method.execute_begin(self, output, SimpleNamespace(step=batch, all_greedy=self.all_greedy))
        found = self._attend(metadata(batch, rows), int(batch.num_new_tokens.sum()))
        self.method.execute_finished(self, output, None)
        return found

    def draft(self, rows: Sequence[Sequence[int]], positions: Mapping[int, int]) -> Metadata:
        """Run a draft step for some rows of the step before, by their positions."""
        own = np.array(list(positions), np.int64)
        at = np.array(list(positions.values()), np.int64)
        batch = step(*((f"row {row}", place, 1, 1) for row, place in positions.items()))
        with self.method.drafting(own, at):
            return self._attend(metadata(batch, rows), len(own))

    def chosen(self, sampled: Sequence[Sequence[int]], *num_tokens: int, slots: int = BLOCKS * SIZE) -> dict[int, int]:
        tokens = np.array(num_tokens, np.int32)
        return self.method.drafts(sampled, tokens, np.full(len(tokens), slots, np.int64))

    def _attend(self, dense: Metadata, tokens: int) -> Metadata:
        query = torch.ones((tokens, HEADS, HEAD))
        *_, found = self.method.attention_begin(LAYER, query, query, query, self._kv, dense)
        self.method.attention_finished(LAYER, query, self._kv, found, query)
        used: Metadata = found
        return used


def config(**changes: Any) -> Any:
    """As much of a ``VllmConfig`` as is looked at."""
    known: dict[str, Any] = {
        "cache_config": SimpleNamespace(block_size=SIZE, enable_prefix_caching=False),
        "parallel_config": SimpleNamespace(rank=0, world_size=1, data_parallel_size=1),
        "speculative_config": SimpleNamespace(method=CUSTOM, model=DRAFTER, num_speculative_tokens=3),
        "model_config": SimpleNamespace(max_model_len=40),
        "lora_config": None,
    }
    return SimpleNamespace(**{**known, **changes})


def test_a_step_is_dense_and_a_draft_step_reads_its_budget() -> None:
    worker = Worker()
    for computed, new, verified in ((0, 30, 0), (30, 1, 0), (31, 4, 3)):
        found = worker.step(step(("a", computed, new, 30)), [ROW], a=verified)
        assert found.block_table.tolist() == [ROW]
        assert found.seq_lens.tolist() == [computed + new]
    assert not worker.method.counts["steps"]
    for place in (33, 34, 35):
        (read,) = worker.draft([ROW], {0: place}).block_table.tolist()
        assert len(read) == 4
        assert read[0] == ROW[0]
        assert read[-1] == ROW[place // SIZE]
    assert worker.method.counts["rows"] == 3


def test_drafts_read_what_the_first_one_chose_until_a_block_begins() -> None:
    worker = Worker()
    worker.step(step(("a", 28, 1, 28)), [ROW])
    (made,) = worker.method._representatives.values()
    scored = patch.object(made, "shares", wraps=made.shares).start()
    assert worker.chosen([[5]], 30) == {0: 3}
    found = [worker.draft([ROW], {0: place}) for place in (29, 30, 31)]
    assert len({str(of.block_table.tolist()) for of in found}) == 1
    assert [of.seq_lens.tolist() for of in found] == [[14], [15], [16]]
    assert scored.call_count == 1
    last = worker.draft([ROW], {0: 32})
    assert last.block_table[0, -1] == ROW[8]
    assert last.seq_lens.tolist() == [13]
    assert scored.call_count == 2
    assert worker.method.counts["rows"] == 4


def test_drafts_of_some_rows_of_a_step() -> None:
    worker = Worker()
    other = list(range(20, 30))
    worker.step(step(("a", 30, 1, 8), ("b", 3, 1, 2), ("c", 25, 1, 8)), [ROW, [30], other])
    assert worker.chosen([[5], [5], [5]], 32, 5, 27) == {0: 3, 2: 3}
    found = worker.draft([other, ROW], {2: 26, 0: 31})
    assert found.seq_lens.tolist() == [15, 16]
    assert [row[-1] for row in found.block_table.tolist()] == [other[6], ROW[7]]


def test_a_block_that_drafts_have_filled_is_summarised_again() -> None:
    """Two drafts fill block 7, a third reads it; the next step verifies one, and drafts fill it once more."""
    worker = Worker()
    worker.step(step(("a", 12, 18, 30)), [ROW])
    made = worker.view.reads[LAYER]
    before = len(made)
    for place in (30, 31, 32):
        worker.draft([ROW], {0: place})
    assert made[before:] == [*ROW[3:7], ROW[7]]
    worker.step(step(("a", 30, 4, 30)), [ROW], a=3)
    assert made[before + 5 :] == []
    worker.step(step(("a", 31, 1, 30)), [ROW])
    worker.draft([ROW], {0: 32})
    assert made[before + 5 :] == [ROW[7]]


def test_who_is_drafted() -> None:
    """Neither a prompt that is still computed, nor one that fits, nor one that asks for none."""
    worker = Worker()
    rows = [list(range(place, place + 8)) for place in range(0, 32, 8)]
    batch = step(("prompt", 0, 20, 40), ("fits", 15, 1, 8), ("no", 29, 1, 8), ("a", 29, 1, 8), no=False)
    worker.step(batch, rows)
    assert worker.chosen([[], [5], [5], [5]], 40, 16, 31, 31) == {3: 3}


def test_drafts_end_where_a_context_does() -> None:
    worker = Worker()
    worker.step(step(("a", 29, 1, 8), ("b", 36, 1, 8), ("c", 38, 1, 8)), [ROW, ROW, ROW])
    assert worker.chosen([[5], [5], [5]], 31, 38, 40) == {0: 3, 1: 2}


def test_drafts_write_no_kv_outside_of_a_request_s_blocks() -> None:
    """The last draft's is not computed; without a block for the newest token there is none."""
    worker = Worker()
    for slots, expected in ((34, {0: 3}), (33, {0: 3}), (32, {0: 2}), (31, {0: 1}), (30, {})):
        worker.step(step(("a", 30, 1, 8)), [ROW])
        assert worker.chosen([[5]], 31, slots=slots) == expected


def test_what_was_accepted_is_counted() -> None:
    worker = Worker()
    worker.step(step(("a", 29, 1, 29), ("b", 29, 1, 29), ("c", 3, 1, 2)), [ROW, ROW, ROW])
    assert worker.chosen([[4], [4], [4]], 30, 30, 4) == {0: 3, 1: 3}
    worker.step(step(("a", 29, 4, 29), ("b", 29, 4, 29), ("c", 4, 1, 2)), [ROW, ROW, ROW], a=3, b=3)
    worker.chosen([[5, 6, 7], [5], [5]], 32, 30, 5)
    assert worker.method.summary().endswith("; 2 of 6 drafts accepted")


@pytest.mark.parametrize("verified", [0, 1])
def test_drafts_that_a_grammar_does_not_allow_were_made_in_vain(verified: int) -> None:
    """vLLM verifies those before the first that its grammar forbids; such a request would be drafted for ever."""
    worker = Worker()
    worker.step(step(("a", 29, 1, 29)), [ROW])
    assert worker.chosen([[4]], 30) == {0: 3}
    worker.step(step(("a", 29, 1 + verified, 29)), [ROW], a=verified)
    worker.chosen([[5] * (1 + verified)], 31 + verified)
    assert worker.method.summary().endswith(f"; {verified} of 3 drafts accepted")


def test_by_default_drafts_wait_until_steps_were_measured() -> None:
    worker = Worker(drafting="measured")
    worker.step(step(("a", 30, 1, 8)), [ROW])
    assert worker.chosen([[5]], 32) == {}


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    worker = Worker(drafting="measured")
    payoff = worker.method._payoff
    worker.step(step(("a", 29, 1, 29)), [ROW])
    with patch.object(payoff, "choose", return_value={"a": 3}):
        assert worker.chosen([[4]], 30)
    worker.step(step(("a", 29, 4, 29)), [ROW], a=3)
    worker.chosen([[5, 6]], 32)
    assert payoff._chances.keys() == {"a"}
    worker.method.requests_finished(worker, ["a"])
    assert not payoff._chances


def test_blocks_are_those_of_dense_engines() -> None:
    named = {"SparseDrafts": OPTIONS}
    assert block_hash_seed(config(additional_config={"ucm_sparse_config": named})) == b""
    assert SparseDrafts.lasting_tokens(OPTIONS, 30) > 10**9
    request = SimpleNamespace(num_prompt_tokens=30)
    made = SparseDrafts(config(), Role.SCHEDULER, OPTIONS)
    assert made.before_allocation(request)
    assert made.limit_new_tokens(request, 30, 5) == 5
    assert vars(request) == {"num_prompt_tokens": 30}


def test_an_operator_is_told_how_to_start_vllm() -> None:
    (line,) = SparseDrafts.advice(OPTIONS)
    assert f'--speculative-config \'{{"method": "{CUSTOM}", "model": "{DRAFTER}",' in line


def test_slots_are_reserved_for_drafts_and_no_step_is_padded_with_none() -> None:
    scheduler = SimpleNamespace(num_lookahead_tokens=0, requests={}, dynamic_sd_lookup=None, max_num_running_reqs=2)
    SparseDrafts(config(), Role.SCHEDULER, OPTIONS).scheduler_started(scheduler)
    assert scheduler.num_lookahead_tokens == 3
    assert scheduler.dynamic_sd_lookup == [3, 3, 3]
    scheduler.dynamic_sd_lookup = [2, 2, 1]  # the operator's
    SparseDrafts(config(), Role.SCHEDULER, OPTIONS).scheduler_started(scheduler)
    assert scheduler.dynamic_sd_lookup == [2, 2, 1]


@pytest.mark.parametrize(("device", "limited"), [("cpu", 1), ("cuda", 4)])
def test_on_a_cpu_no_step_verifies_drafts_beside_a_request_that_samples(device: str, limited: int) -> None:
    made = SparseDrafts(config(device_config=SimpleNamespace(device_type=device)), Role.SCHEDULER, OPTIONS)
    scheduler = SimpleNamespace(num_lookahead_tokens=0, requests={})
    made.scheduler_started(scheduler)
    drafted = SimpleNamespace(num_tokens=31, sampling_params=SimpleNamespace(temperature=0.0))
    prompt = SimpleNamespace(num_tokens=20, sampling_params=SimpleNamespace(temperature=0.7))
    scheduler.requests["drafted"] = drafted
    assert made.limit_new_tokens(drafted, 30, 4) == 4
    made.build_metadata(None)
    scheduler.requests["prompt"] = prompt  # it joins the step in which they would be verified
    assert made.limit_new_tokens(drafted, 30, 4) == limited
    assert made.limit_new_tokens(prompt, 0, 16) == 16
    made.build_metadata(None)
    del scheduler.requests["prompt"]
    assert made.limit_new_tokens(drafted, 31, 4) == 4


def test_on_a_cpu_nothing_is_drafted_beside_a_request_that_samples() -> None:
    worker = Worker("cpu")
    for worker.all_greedy, expected in ((True, {0: 3}), (False, {}), (True, {0: 3})):
        worker.step(step(("a", 29, 1, 8)), [ROW])
        assert worker.chosen([[5]], 31) == expected


def test_a_connector_that_may_save_drafts_is_refused() -> None:
    scheduler = SimpleNamespace(num_lookahead_tokens=0, connector=SimpleNamespace())
    with pytest.raises(SparseMethodError, match="may save the KV of drafts"):
        SparseDrafts(config(), Role.SCHEDULER, OPTIONS).scheduler_started(scheduler)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"speculative_config": None}, "drafts of its own proposer only"),
        ({"speculative_config": SimpleNamespace(method="ngram", model="ngram")}, "drafts of its own proposer only"),
        ({"speculative_config": SimpleNamespace(method=CUSTOM, model="my.Own")}, "drafts of its own proposer only"),
        ({"parallel_config": SimpleNamespace(rank=0, world_size=2)}, "several ranks"),
        ({"parallel_config": SimpleNamespace(rank=0, data_parallel_size=2)}, "data parallelism"),
        ({"parallel_config": SimpleNamespace(rank=0, enable_eplb=True)}, "rebalancing of experts"),
        ({"lora_config": SimpleNamespace()}, "LoRA"),
        ({"model_config": SimpleNamespace(is_multimodal_model=True)}, "other inputs than text"),
        ({"model_config": SimpleNamespace(uses_mrope=True)}, "positions of several dimensions"),
        ({"model_config": SimpleNamespace(enable_prompt_embeds=True)}, "prompts of embeddings"),
    ],
)
def test_an_engine_that_is_not_served_is_refused(changes: dict[str, Any], what: str) -> None:
    made = SparseDrafts(config(**changes), Role.WORKER, OPTIONS)
    made.attention = FakeView()
    with pytest.raises(SparseMethodError, match=what):
        made.worker_started()


def test_an_unknown_way_to_draft_is_refused() -> None:
    with pytest.raises(ConfigError, match="`measured` or `always`"):
        SparseDrafts(config(), Role.WORKER, {**OPTIONS, "drafting": "sometimes"})
