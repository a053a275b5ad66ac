"""The method on attention in plain torch: what it reads, what it leaves alone, what it refuses, and how it fails."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from tests.ucm.sparse.fake_view import FakeView, Metadata, metadata
from tests.ucm.sparse.steps import step
from tests.ucm.sparse.told import told_meanwhile, warnings
from ucm.errors import ConfigError, SparseMethodError
from ucm.integration.vllm.metrics import METRICS
from ucm.sparse.base import Role
from ucm.sparse.topk.method import BlockTopK, GSAOnDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.sparse.attention import StepBatch

BLOCKS, SIZE, HEADS, KV_HEADS, HEAD = 40, 4, 4, 2, 8
LAYERS = [f"model.layers.{n}.self_attn.attn" for n in range(3)]
#: In blocks of 4: one of sinks, two recent, two to choose.
OPTIONS = {"token_budget": 20, "min_context": 0, "sink_tokens": 4, "recent_tokens": 4, "dense_layers": 1}


def method(**options: Any) -> BlockTopK:
    return seen(unseen(**options))


#: What vLLM says of a layer's KV cache.
SPEC = {"block_size": SIZE, "num_kv_heads": KV_HEADS, "head_size": HEAD, "dtype": torch.float32}


def unseen(**options: Any) -> BlockTopK:
    """Return the method before the model has layers."""
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=SIZE), parallel_config=SimpleNamespace(rank=0))
    made = BlockTopK(config, Role.WORKER, {**OPTIONS, **options})
    made.attention = FakeView()
    made.worker_started()
    return made


def seen(made: BlockTopK) -> BlockTopK:
    """Let the method see all layers with their caches, as before an engine's first request."""
    view = view_of(made)
    view.bound = cache()
    for layer in LAYERS:
        made.layer_seen(layer)
    made.layers_seen()
    view.reads.clear()
    return made


def view_of(made: BlockTopK) -> FakeView:
    assert isinstance(made.attention, FakeView)
    return made.attention


def cache(seed: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn((2, BLOCKS, SIZE, KV_HEADS, HEAD), generator=source)


def run(
    made: BlockTopK, batch: StepBatch, dense: Metadata, kv: torch.Tensor, query: torch.Tensor | None = None
) -> list[Metadata]:
    """Run a step through all layers; return their metadata."""
    if query is None:
        query = torch.ones((int(batch.num_new_tokens.sum()), HEADS, HEAD))
    made.execute_begin(None, None, batch)
    found = []
    for name in LAYERS:
        found.append(made.attention_begin(name, query, query, query, kv, dense))
        made.attention_finished(name, query, kv, found[-1][3], query)
    made.execute_finished(None, None, None)
    assert all(q is k is v is query for q, k, v, _ in found)
    return [after for _, _, _, after in found]


LONG = list(range(10, 18))


def test_a_long_decode_reads_its_budget_and_first_layers_everything() -> None:
    made, batch = method(), step(("a", 30, 1, 8))
    dense = metadata(batch, [LONG])
    first, second, third = run(made, batch, dense, cache())
    assert first is dense
    for found in (second, third):
        (read,) = found.block_table.tolist()
        assert len(read) == 5
        assert read[0] == 10
        assert read[-2:] == [16, 17]
        assert set(read) < set(LONG)
        assert (found.seq_lens.tolist(), found.max_seq_len) == ([19], 19)
    assert made.counts == {
        "steps": 1,
        "rows": 1,
        "requests_restricted": 1,
        "blocks_read": 10,
        "blocks_held": 16,
        "representatives": 12,
    }


def test_the_blocks_with_the_keys_that_the_query_seeks_are_read() -> None:
    """Two blocks between sinks and recent blocks have keys in the query's direction."""
    made, batch, kv = method(), step(("a", 30, 1, 8)), cache() * 0.01
    kv[0, 12, 3] = 1.0
    kv[0, 15, 0] = 1.0
    kv[0, 17] = 1.0  # recent, read anyhow
    found = run(made, batch, metadata(batch, [LONG]), kv)[-1]
    assert found.block_table.tolist() == [[10, 12, 15, 16, 17]]


def test_a_query_against_the_keys_looks_for_their_least_values() -> None:
    made, batch, kv = method(), step(("a", 30, 1, 8)), cache() * 0.01
    kv[0, 12, 1] = 1.0
    kv[0, 13, 1] = -1.0
    kv[0, 14, 2] = -1.0
    found = run(made, batch, metadata(batch, [LONG]), kv, -torch.ones((1, HEADS, HEAD)))[-1]
    assert found.block_table.tolist() == [[10, 13, 14, 16, 17]]


def test_what_fits_and_what_is_no_decode_is_left_alone() -> None:
    made = method()
    batch = step(("fits", 19, 1, 8), ("prompt", 16, 4, 20))
    dense = metadata(batch, [LONG, LONG], width=12)
    assert all(found is dense for found in run(made, batch, dense, cache()))
    assert not view_of(made).reads
    assert not made.counts
    batch = step(("fits", 19, 1, 8), ("chunk", 24, 6, 60), ("last", 31, 1, 32))
    dense = metadata(batch, [list(range(20, 28)), list(range(30, 38)), LONG])
    assert all(found is dense for found in run(made, batch, dense, cache()))
    for blocks in view_of(made).reads.values():
        assert sorted(set(blocks)) == [*LONG[1:-1], *range(31, 36)]


def test_what_is_kept_of_a_block_is_made_when_it_is_complete_and_not_when_it_is_first_wanted() -> None:
    """In the next step: a prompt in chunks, the first of which finds two blocks in a cache; then its decodes."""
    made, kv = method(), cache()
    row = list(range(10, 20))
    for computed, new in ((8, 6), (14, 10), (24, 6), (30, 1), (31, 1)):
        batch = step(("a", computed, new, 30), admitted=["a"] if computed == 8 else [])
        found = run(made, batch, metadata(batch, [row]), kv)[-1]
        for blocks in view_of(made).reads.values():
            assert sorted(set(blocks)) == [*row[1 : computed // SIZE]]
            assert len(blocks) == len(set(blocks))
    assert found.block_table.shape == (1, 5)


def test_what_cannot_be_made_in_a_prompt_makes_its_request_dense() -> None:
    made, kv = method(), cache()
    batch = step(("a", 12, 12, 30), ("b", 0, 3, 3))
    failing(made, LAYERS[1])
    run(made, batch, metadata(batch, [LONG, [30]]), kv)
    failing(made)
    both = step(("a", 30, 1, 30), ("b", 30, 1, 3))
    after = run(made, both, metadata(both, [LONG, list(range(20, 28))]), kv)[-1]
    assert after.seq_lens.tolist() == [31, 19]
    assert (made.counts["failures"], made.counts["requests_failed"]) == (1, 1)


def test_rows_of_a_mixed_step() -> None:
    made = method()
    batch = step(("chunk", 24, 6, 60), ("a", 30, 1, 8), ("short", 3, 1, 2))
    dense = metadata(batch, [list(range(20, 28)), LONG, [30]])
    found = run(made, batch, dense, cache())[-1]
    assert found.block_table[0].tolist() == list(range(20, 28))
    assert found.block_table[2, 0] == 30
    assert found.seq_lens.tolist() == [30, 19, 4]
    assert found.max_seq_len == 30
    assert dense.seq_lens.tolist() == [30, 31, 4]


def test_keys_of_a_block_are_read_once_per_layer() -> None:
    made, kv = method(), cache()
    row = list(range(10, 20))
    for computed in range(30, 38):
        batch = step(("a", computed, 1, 8))
        run(made, batch, metadata(batch, [row]), kv)
    reads = view_of(made).reads
    assert reads.keys() == set(LAYERS[1:])
    for blocks in reads.values():
        assert [blocks.count(block) for block in row] == [0, 1, 1, 1, 1, 1, 1, 1, 1, 0]


def test_a_block_with_new_content_gets_a_new_representative() -> None:
    """One request ends and another gets its blocks; one is preempted and resumes with other content."""
    made, old, new = method(), cache() * 0.01, cache() * 0.01
    old[0, 12] = old[0, 13] = 1.0
    new[0, 14] = new[0, 15] = 1.0
    batch = step(("a", 30, 1, 8))
    assert run(made, batch, metadata(batch, [LONG]), old)[-1].block_table.tolist() == [[10, 12, 13, 16, 17]]
    made.requests_finished(None, ["a"])
    other = step(("b", 30, 1, 8))
    assert run(made, other, metadata(other, [LONG]), new)[-1].block_table.tolist() == [[10, 14, 15, 16, 17]]
    back = step(("b", 0, 30, 30), admitted=["b"])
    run(made, back, metadata(back, [LONG]), old)
    assert run(made, other, metadata(other, [LONG]), old)[-1].block_table.tolist() == [[10, 12, 13, 16, 17]]


def test_generated_tokens_that_are_computed_again_choose_as_they_did() -> None:
    """After a preemption, some in a step."""
    made, kv = method(), cache()
    row, first, last = list(range(10, 22)), 22, 44
    query = torch.randn((last, HEADS, HEAD), generator=torch.Generator().manual_seed(7))
    chosen = {}
    for computed in range(first, last):
        batch = step(("a", computed, 1, first))
        dense = metadata(batch, [row])
        found = run(made, batch, dense, kv, query[computed : computed + 1])
        chosen[computed] = [of.block_table[0, :5].tolist() for of in found[1:]]
    assert len({str(of) for of in chosen.values()}) > 5
    for computed in (20, 25, 30, 39):
        again, written, new = method(), kv.clone(), min(5, last - computed)
        written[0].flatten(0, 1)[10 * SIZE + computed :] = torch.nan  # not written yet
        batch = step(("other", 6, 1, 2), ("a", computed, new, first), admitted=["a"])
        wanted = torch.cat((query[:1], query[computed : computed + new]))
        found = run(again, batch, metadata(batch, [[30, 31], row]), written, wanted)
        assert [of.split is not None for of in found] == [False, True, True]
        own = range(max(first, computed), computed + new)
        for place, position in enumerate(own):
            assert [of.block_table[place - len(own)].tolist()[:5] for of in found[1:]] == chosen[position]


def test_drafts_choose_as_if_they_were_alone_and_leave_nothing_behind() -> None:
    """Steps with up to four drafts, of which any number is rejected, choose like steps with one token each.

    A rejected draft has other keys, which fill blocks that later tokens fill anew.
    """
    row, first, last = list(range(10, 34)), 22, 88
    source = torch.Generator().manual_seed(3)
    query = torch.randn((last, HEADS, HEAD), generator=source)
    right = cache(40)

    def chosen(drafts: random.Random | None) -> dict[int, list[list[int]]]:
        made, kv, found, computed = method(), cache(40), {}, first
        rows, wanted = kv[0].flatten(0, 1), right[0].flatten(0, 1)
        while computed < last:
            new = 1 if drafts is None else min(last - computed, drafts.randint(1, 5))
            accepted = new if drafts is None else drafts.randint(1, new)
            place, wrong = 10 * SIZE + computed, new - accepted
            rows[place : place + accepted] = wanted[place : place + accepted]
            rows[place + accepted : place + new] = torch.randn((wrong, *rows.shape[1:]), generator=source) * 9
            batch = step(("a", computed, new, first))
            dense = metadata(batch, [row])
            made.execute_begin(None, None, batch)
            keys = rows[place : place + new].clone()
            for name in LAYERS:
                of = made.attention_begin(name, query[computed : computed + new], keys, keys, kv, dense)[3]
                if name == LAYERS[-1]:
                    for token in range(accepted):
                        found[computed + token] = of.block_table[token, :5].tolist()
                made.attention_finished(name, query, kv, dense, query)
            made.execute_finished(None, None, None)
            computed += accepted
        return found

    alone = chosen(None)
    assert len({str(of) for of in alone.values()}) > 20
    for seed in range(3):
        assert chosen(random.Random(seed)) == alone  # noqa: S311 - no secret


def failing(made: BlockTopK, *layers: str) -> None:
    view_of(made).unreadable = layers


@pytest.fixture
def told() -> Iterator[list[logging.LogRecord]]:
    with told_meanwhile() as records:
        yield records


def test_rows_of_a_failed_step_are_dense_from_then_on_and_others_are_not(told: list[logging.LogRecord]) -> None:
    made, kv = method(), cache()
    failing(made, LAYERS[2])
    batch = step(("a", 30, 1, 8), ("short", 3, 1, 2))
    dense = metadata(batch, [LONG, [30]])
    first, second, third = run(made, batch, dense, kv)
    assert (first, third) == (dense, dense)
    assert second is not dense
    failing(made)
    both = step(("a", 31, 1, 8), ("b", 30, 1, 8))
    after = run(made, both, metadata(both, [LONG, list(range(20, 28))]), kv)[-1]
    assert after.seq_lens.tolist() == [32, 19]
    assert after.block_table[0].tolist() == LONG
    assert (made.counts["failures"], made.counts["requests_failed"]) == (1, 1)
    (error,) = [record for record in told if record.levelno == logging.ERROR]
    assert error.getMessage() == (
        f"[UCM.Sparse] BlockTopK failed in {LAYERS[2]}; 1 requests are dense from here on: RuntimeError: no such keys"
    )
    assert error.exc_info
    assert "1 requests dense after 1 failures" in made.summary()


def test_what_a_failure_keeps_from_being_made_for_others_is_made_later() -> None:
    """A prompt's blocks are completed in the step in which another request fails in the last layer."""
    made, kv = method(), cache()
    both = step(("a", 30, 1, 8), ("b", 0, 28, 30), admitted=["b"])
    table = [LONG, list(range(20, 28))]
    failing(made, LAYERS[2])
    run(made, both, metadata(both, table), kv)
    failing(made)
    batch = step(("b", 30, 1, 30))
    run(made, batch, metadata(batch, table[1:]), kv)
    for name in LAYERS[1:]:
        assert set(range(21, 26)) <= set(view_of(made).reads[name])


def test_the_same_cause_is_told_once_and_an_ended_requests_name_is_free_again(told: list[logging.LogRecord]) -> None:
    made, kv, batch = method(), cache(), step(("a", 30, 1, 8))
    for _ in range(3):
        failing(made, LAYERS[1])
        run(made, batch, metadata(batch, [LONG]), kv)
        made.requests_finished(None, ["a"])
    assert made.counts["failures"] == 3
    assert len([record for record in told if record.levelno == logging.ERROR]) == 1
    failing(made)
    assert run(made, batch, metadata(batch, [LONG]), kv)[-1].seq_lens.tolist() == [19]


def test_a_request_without_another_outcome_is_short() -> None:
    """Of those that were seen in a step; one that was never scheduled is none."""
    made, kv = method(), cache()
    batch = step(("long", 30, 1, 8), ("short", 3, 1, 2), ("dense", 30, 1, 8), dense=False)
    run(made, batch, metadata(batch, [LONG, [30], list(range(20, 28))]), kv)
    made.requests_finished(None, ["long", "short", "dense", "never scheduled"])
    found = {name: value for name, value in made.figures().items() if name.startswith("requests.") and value}
    assert found == {"requests.restricted": 1, "requests.short": 1, "requests.opted_out": 1}


def test_a_device_without_memory_is_a_cause_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made, kv, batch = method(), cache(), step(("a", 30, 1, 8))

    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(made.attention, "read_keys", full)
    run(made, batch, metadata(batch, [LONG]), kv)
    found = made.figures()
    assert (found["requests.out_of_memory"], found["requests.failed"]) == (1, 0)


def test_messages_bear_the_name_that_the_operator_wrote() -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=SIZE))
    with pytest.raises(ConfigError, match="GSAOnDevice has no option 'budget'"):
        GSAOnDevice(config, Role.WORKER, {"budget": 1})
    with pytest.raises(ConfigError, match="greater than or equal to 1") as caught:
        GSAOnDevice(config, Role.WORKER, {"sample_every": 0})
    assert (caught.value.where, caught.value.fix) == (
        "ucm_sparse_config.GSAOnDevice.sample_every: 0",
        "sample_every: a number of choices, 1 or more",
    )
    assert GSAOnDevice(config, Role.WORKER, OPTIONS).summary().startswith("GSAOnDevice restricted 0 decodes")


def test_gsa_on_device_is_block_top_k() -> None:
    assert GSAOnDevice.identity({}) == BlockTopK.identity({"dense_layers": 2})
    assert GSAOnDevice.identity({}) != GSAOnDevice.identity({"token_budget": 64})


def test_what_cannot_be_served_is_no_failure_but_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made, batch = method(), step(("a", 30, 1, 8))

    def refused(_: Metadata) -> torch.Tensor:
        raise SparseMethodError("not a block table")

    monkeypatch.setattr(made.attention, "block_table", refused)
    with pytest.raises(SparseMethodError, match="not a block table"):
        run(made, batch, metadata(batch, [LONG]), cache())


def test_a_step_that_no_layer_asked_about_is_an_error() -> None:
    made, batch = method(), step(("a", 30, 1, 8))
    run(made, batch, metadata(batch, [LONG]), cache())
    made.execute_begin(None, None, batch)
    with pytest.raises(SparseMethodError, match="was not asked by any layer") as caught:
        made.execute_finished(None, None, None)
    assert "UCM_DISABLE_ATTENTION_PATCH" in caught.value.fix


def test_a_method_that_was_never_asked_is_an_error() -> None:
    """As on a platform whose layers bypass the hooks; even before anything is left out."""
    made = method()
    made.execute_begin(None, None, step(("a", 0, 8, 8)))
    with pytest.raises(SparseMethodError, match="was not asked by any layer"):
        made.execute_finished(None, None, None)


def test_a_failure_on_one_of_several_ranks_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks would wait for its scores."""
    made, batch = method(), step(("a", 30, 1, 8))
    failing(made, LAYERS[2])
    monkeypatch.setattr(FakeView, "ranks", 2)
    with pytest.raises(RuntimeError, match="no such keys"):
        run(made, batch, metadata(batch, [LONG]), cache())


def test_a_worker_may_have_dense_layers_alone() -> None:
    """The first stage of a pipeline."""
    made, batch = unseen(dense_layers=len(LAYERS)), step(("a", 30, 1, 8))
    made.vllm_config.parallel_config.pipeline_parallel_size = 2
    seen(made)
    dense = metadata(batch, [LONG])
    assert all(found is dense for found in run(made, batch, dense, cache()))
    assert not made.counts


def test_a_model_may_not() -> None:
    model = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=2))
    config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(block_size=SIZE))
    made = BlockTopK(config, Role.WORKER, {**OPTIONS, "dense_layers": 2})
    made.attention = FakeView()
    with pytest.raises(ConfigError, match="2 dense layers leave none of the model's 2 to restrict") as caught:
        made.worker_started()
    assert caught.value.where == "ucm_sparse_config.BlockTopK.dense_layers"
    assert "1 or fewer" in caught.value.fix


def only_the_middle_layer_is_restricted(made: BlockTopK) -> None:
    batch = step(("a", 30, 1, 8))
    dense = metadata(batch, [LONG])
    first, second, third = run(made, batch, dense, cache())
    assert first is dense
    assert third is dense
    assert second.seq_lens.tolist() == [19]
    assert set(view_of(made).reads) == {LAYERS[1]}


def test_representatives_are_allocated_before_the_first_step() -> None:
    """As many bytes as were taken from the KV cache for them; no step allocates further ones."""
    made = method()
    spec, windowed = SimpleNamespace(**SPEC), SimpleNamespace(**SPEC, sliding_window=64)
    recurrent = SimpleNamespace(block_size=SIZE, shapes=((3, 4), (5, 6)))
    others = {"model.layers.7.self_attn.attn": windowed, "model.layers.8.mixer": recurrent}
    asked, nothing = method().bytes_beside_block([{**dict.fromkeys(LAYERS, spec), **others}, others])
    assert nothing == 0, "of a pipeline's stage without restricted layers"
    held = dict(made._representatives)
    assert list(held) == LAYERS[1:]
    assert sum(of.nbytes for of in held.values()) == asked * BLOCKS > 0
    batch = step(("a", 30, 1, 8))
    run(made, batch, metadata(batch, [LONG]), cache())
    assert made._representatives == held


def test_representatives_that_do_not_fit_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of so many blocks that torch itself refuses the memory for their summaries."""
    made = unseen()
    view_of(made).bound = cache()
    monkeypatch.setattr(FakeView, "num_blocks", lambda *_: 1 << 45)
    made.layer_seen(LAYERS[1])
    with pytest.raises(
        SparseMethodError, match=r"do not fit beside the KV cache: after 0 B of them, .*alloc"
    ) as caught:
        made.layers_seen()
    assert LAYERS[1] in caught.value.where
    assert "--gpu-memory-utilization" in caught.value.fix


def test_layers_with_a_window_of_their_own_stay_as_they_are() -> None:
    """The first and the last one; the layer between them is restricted, and sets the size of blocks."""
    made = unseen(dense_layers=0)
    view_of(made).windowed = (LAYERS[0], LAYERS[2])
    seen(made)
    assert view_of(made).required == {(LAYERS[1], True)}
    only_the_middle_layer_is_restricted(made)


def test_a_model_of_which_nothing_would_be_restricted_is_refused() -> None:
    """Its layers have windows or states of their own, or are dense by the options, in all stages of a pipeline."""
    plain, windowed, recurrent = SimpleNamespace(**SPEC), SimpleNamespace(**SPEC, sliding_window=64), SimpleNamespace()
    stages = [{LAYERS[0]: plain, LAYERS[1]: windowed}, {LAYERS[2]: recurrent}]
    with pytest.raises(SparseMethodError, match="nothing would be restricted") as caught:
        unseen(dense_layers=1).bytes_beside_block(stages)
    assert "dense_layers" in caught.value.where
    assert min(unseen(dense_layers=0).bytes_beside_block(stages)) == 0, "one stage may have none"
    external = unseen(dense_layers=1)
    external.vllm_config.parallel_config.world_size = 2  # one of two tensor-parallel workers has all layers
    with pytest.raises(SparseMethodError, match="nothing would be restricted"):
        external.bytes_beside_block(stages[:1])
    external.vllm_config.parallel_config.pipeline_parallel_size = 2
    assert external.bytes_beside_block(stages[:1]) == [0], "the other stage is another engine's"


def test_engine_and_layers_are_required() -> None:
    made = unseen()
    assert view_of(made).engine_required
    made.layer_seen(LAYERS[0])
    made.layer_seen(LAYERS[1])
    assert view_of(made).required == {(LAYERS[0], False), (LAYERS[1], True)}


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        ({"token_budget": 15}, "leaves no block of 4 to choose", "set it to 16 or more"),
        ({"token_budget": "20"}, "valid integer", "1 to 2147483647"),
        (
            {"budget": 20},
            "has no option 'budget'",
            "token_budget, budget_share, min_context, sink_tokens, recent_tokens, dense_layers, sample_every",
        ),
        ({"dense_layers": -1}, "greater than or equal to 0", "0 or more"),
    ],
)
def test_wrong_options(options: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        method(**options)
    assert caught.value.where.startswith("ucm_sparse_config.BlockTopK.")
    assert fix in caught.value.fix


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("group", ["ATTENTION", "SCHEDULER", "WORKER", "MODEL_RUNNER", "MODEL_RUNNER_V2"])
def test_switched_off_hooks_are_no_silent_dense_run(monkeypatch: pytest.MonkeyPatch, group: str, role: Role) -> None:
    monkeypatch.setenv(f"UCM_DISABLE_{group}_PATCH", "1")
    with pytest.raises(SparseMethodError, match="BlockTopK needs hooks that are switched off") as caught:
        BlockTopK(None, role, OPTIONS)
    assert f"UCM_DISABLE_{group}_PATCH" in caught.value.where


def test_hooks_that_are_switched_on_by_name_are_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCM_DISABLE_ATTENTION_PATCH", "0")
    assert method().counts == {}


def test_blocks_of_the_metadata_may_be_smaller_than_the_managers() -> None:
    """vLLM may split its blocks for the kernels; the budget counts the metadata's blocks."""
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=2 * SIZE))
    made = BlockTopK(config, Role.WORKER, {**OPTIONS, "token_budget": 40})
    made.attention = FakeView()
    made.worker_started()
    batch = step(("a", 50, 1, 8))
    found = run(seen(made), batch, metadata(batch, [list(range(10, 23))]), cache())[-1]
    assert found.block_table.shape == (1, 10)
    assert found.seq_lens.tolist() == [39]


@pytest.mark.parametrize(
    ("options", "longest", "level", "what"),
    [
        ({"min_context": None}, 6_164, "INFO", "restricts requests from 6164 tokens on (min_context)"),
        ({"min_context": None}, 6_163, "WARNING", "from 6164 tokens on, but max_model_len is 6163: every request is "),
        ({"min_context": 30}, 29, "WARNING", "set ucm_sparse_config.BlockTopK.min_context lower (0: all beyond token_"),
        ({"min_context": 0}, 21, "INFO", "restricts requests from 21 tokens on (min_context)"),
        ({"min_context": 30}, None, "INFO", "restricts requests from 30 tokens on (min_context)"),
    ],
)
def test_the_length_from_which_on_requests_are_restricted_is_told_at_the_start(
    options: dict[str, Any], longest: int | None, level: str, what: str, told: list[logging.LogRecord]
) -> None:
    model = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=3), max_model_len=longest)
    config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(block_size=SIZE))
    made = BlockTopK(config, Role.WORKER, {**OPTIONS, **options})
    made.attention = FakeView()
    made.worker_started()
    (line,) = told
    assert line.levelname == level
    assert what in line.getMessage()


def test_a_request_is_restricted_from_that_length_on() -> None:
    """With the 21st token: the budget is 20 tokens."""
    made, kv = method(), cache()
    for computed, restricted in ((19, 0), (20, 1)):
        batch = step(("a", computed, 1, 8))
        run(made, batch, metadata(batch, [list(range(10, 22))]), kv)
        assert made.counts.get("rows", 0) == restricted


def test_doctor_says_that_short_requests_stay_dense() -> None:
    (line,) = BlockTopK.advice({"token_budget": 512})
    assert line.startswith("min_context is not set: requests with fewer than about 6,656 tokens")
    assert BlockTopK.advice({"token_budget": 512, "min_context": 0}) == []


def test_told_at_powers_of_two(told: list[logging.LogRecord]) -> None:
    made, kv = method(), cache()
    told.clear()
    row = list(range(10, 22))
    for computed in range(30, 37):
        batch = step(("a", computed, 1, 8))
        run(made, batch, metadata(batch, [row]), kv)
    lines = [record.getMessage() for record in told]
    assert [line.split(" in ")[1].split()[0] for line in lines] == ["1", "2", "4"]
    assert lines[0] == (
        "[UCM.Sparse] BlockTopK restricted 1 decodes in 1 steps: 10 of 16 blocks read (62.5%), "
        "12 representatives made, 0 requests dense after 0 failures, 0 because they asked for it, "
        "0 whose options could not be honoured; no sample of the attention yet"
    )


TABLES = [LONG, list(range(20, 28)), list(range(30, 38))]


def test_a_request_is_dense_if_it_asks_for_it() -> None:
    """From its first step to its end, and no others are; later another request has its id."""
    made, kv = method(), cache()
    asking = step(("a", 0, 30, 30), ("b", 30, 1, 8), admitted=["a"], a=False)
    run(made, asking, metadata(asking, TABLES[:2]), kv)
    both = step(("a", 30, 1, 30), ("b", 31, 1, 8))
    for _ in range(2):
        after = run(made, both, metadata(both, TABLES[:2]), kv)[-1]
        assert after.seq_lens.tolist() == [31, 20]
        assert after.block_table[0].tolist() == LONG
    assert not any(set(blocks) & set(LONG) for blocks in view_of(made).reads.values()), "nothing is kept of its blocks"
    again = step(("a", 0, 31, 30), admitted=["a"], a=False)  # resumed, where it comes whole again
    run(made, again, metadata(again, TABLES[:1]), kv)
    assert (made.counts["requests_opted_out"], made.counts["failures"]) == (1, 0)
    made.requests_finished(None, ["a"])
    new = step(("a", 30, 1, 8), admitted=["a"])
    assert run(made, new, metadata(new, TABLES[:1]), kv)[-1].seq_lens.tolist() == [19]


def test_each_row_reads_its_own_request_s_budget() -> None:
    """The same as alone in an engine with that budget."""
    kv, query = cache(), torch.randn((3, HEADS, HEAD), generator=torch.Generator().manual_seed(3))
    batch = step(("a", 30, 1, 8), ("b", 28, 1, 8), ("c", 30, 1, 8), a={"token_budget": 27}, b='{"token_budget": 16}')
    found = run(method(), batch, metadata(batch, TABLES), kv, query)[-1]
    assert found.seq_lens.tolist() == [23, 13, 19]
    for row, (budget, blocks) in enumerate(((27, 6), (16, 4), (20, 5))):
        one = step((batch.request_ids[row], int(batch.num_computed_tokens[row]), 1, 8))
        made = method(token_budget=budget)
        alone = run(made, one, metadata(one, [TABLES[row]]), kv, query[row : row + 1])[-1]
        assert alone.block_table.shape == (1, blocks)
        assert found.block_table[row, :blocks].tolist() == alone.block_table[0].tolist()


def test_blocks_read_are_counted_by_each_row_s_budget() -> None:
    made = method()
    batch = step(("a", 30, 1, 8), ("b", 28, 1, 8), a={"token_budget": 24})
    run(made, batch, metadata(batch, TABLES[:2]), cache())
    assert (made.counts["blocks_read"], made.counts["blocks_held"]) == (2 * (6 + 5), 2 * (8 + 8))


def test_a_request_has_a_share_of_its_own() -> None:
    """Half of its eight blocks is less than the method's budget, three quarters are more; its tokens replace both."""
    batch = step(*[(name, 30, 1, 8) for name in "abc"], a={"budget_share": 0.8}, b={"token_budget": 16})
    found = run(method(budget_share=0.75), batch, metadata(batch, TABLES), cache())[-1]
    assert found.seq_lens.tolist() == [23, 15, 23]


@pytest.mark.parametrize(
    "asked",
    [
        "no",
        {"budget": 3},
        {"token_budget": 10**30},
        {"token_budget": 15},
        {"token_budget": "20"},
        {"budget_share": 1},
        {"top_p": 0.9},
    ],
)
def test_who_asks_for_what_there_is_not_is_dense(asked: object, told: list[logging.LogRecord]) -> None:
    made, kv = method(), cache()
    batch = step(("a", 30, 1, 8), ("b", 30, 1, 8), ("c", 30, 1, 8), a=asked, c=asked)
    assert run(made, batch, metadata(batch, TABLES), kv)[-1].seq_lens.tolist() == [31, 19, 31]
    assert made.counts["requests_refused"] == 2
    (line,) = warnings(told)
    assert line.startswith(
        "[UCM.Sparse] request a asks BlockTopK for options that cannot be honoured, so it is dense; "
    )
    assert "where: extra_args.ucm_sparse" in line
    assert "2 whose options could not be honoured" in made.summary()


def test_one_rank_tells_for_all(told: list[logging.LogRecord]) -> None:
    made, batch = method(), step(("a", 30, 1, 8), a="no")
    told.clear()
    made.vllm_config.parallel_config.rank = 1
    run(made, batch, metadata(batch, [LONG]), cache())
    assert made.counts["requests_refused"] == 1
    assert not told


def test_others_keep_their_budgets_when_a_step_fails() -> None:
    made, kv = method(), cache()
    failing(made, LAYERS[2])
    batch = step(("a", 30, 1, 8), ("b", 0, 28, 30), admitted=["b"], b={"token_budget": 24})
    run(made, batch, metadata(batch, TABLES[:2]), kv)
    failing(made)
    after = step(("b", 30, 1, 30))
    assert run(made, after, metadata(after, TABLES[1:2]), kv)[-1].block_table.shape == (1, 6)


def test_below_the_least_context_a_request_is_dense() -> None:
    made, kv = method(min_context=33), cache()
    for computed, tokens in ((30, 31), (31, 32), (32, 21)):
        batch = step(("a", computed, 1, 8))
        found = run(made, batch, metadata(batch, [list(range(10, 19))]), kv)[-1]
        assert found.seq_lens.tolist() == [tokens - 4 * (computed == 32)]


def test_figures() -> None:
    """In tokens, summed over the two restricted layers; a request is counted once."""
    made, kv = method(), cache()
    assert set(made.figures().values()) == {0}
    batch = step(("a", 30, 1, 8), ("b", 28, 1, 8), ("c", 30, 1, 8), b=False, c="no")
    for _ in range(2):
        run(made, batch, metadata(batch, TABLES), kv)
    found = made.figures()
    assert found.pop("select_seconds") > 0
    assert found == {
        "requests.restricted": 1,
        "requests.short": 0,
        "requests.opted_out": 1,
        "requests.refused": 1,
        "requests.failed": 0,
        "requests.out_of_memory": 0,
        "rows": 2,
        "read_tokens": 2 * 2 * 20,
        "held_tokens": 2 * 2 * 32,
        "attention_samples": 0,
        "attention_kept": 0,
    }
    assert all(f"ucm:sparse_{name.partition('.')[0]}_total" in METRICS for name in found)
