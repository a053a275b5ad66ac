"""The method on attention in plain torch: what it reads, what it leaves alone, what it refuses, and how it fails."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")

import torch

from tests.ucm.sparse.fake_view import FakeView, Metadata, metadata, step
from ucm.errors import ConfigError, SparseMethodError
from ucm.logger import get_logger
from ucm.sparse.base import Role
from ucm.sparse.block_topk import BlockTopK, GSAOnDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.sparse.attention import StepBatch

BLOCKS, SIZE, HEADS, KV_HEADS, HEAD = 40, 4, 4, 2, 8
LAYERS = [f"model.layers.{n}.self_attn.attn" for n in range(3)]
#: In blocks of 4: one of sinks, two recent, two to choose.
OPTIONS = {"token_budget": 20, "sink_tokens": 4, "recent_tokens": 4, "dense_layers": 1}


def method(**options: Any) -> BlockTopK:
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=SIZE))
    made = BlockTopK(config, Role.WORKER, {**OPTIONS, **options})
    made.attention = FakeView()
    made.worker_started()
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
    """A step through all layers; their metadata."""
    if query is None:
        query = torch.ones((int(batch.num_new_tokens.sum()), HEADS, HEAD))
    made.execute_begin(None, None, batch)
    found = [made.attention_begin(name, query, query, query, kv, dense) for name in LAYERS]
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
    assert made.counts == {"steps": 1, "rows": 1, "blocks_read": 10, "blocks_held": 16, "representatives": 10}


def test_the_blocks_with_the_greatest_bounds_are_read() -> None:
    """Keys that point where the query does, in two blocks between sinks and recent ones."""
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
    batch = step(("fits", 19, 1, 8), ("chunk", 24, 6, 60), ("last", 39, 1, 40))
    dense = metadata(batch, [LONG, LONG, LONG], width=12)
    assert all(found is dense for found in run(made, batch, dense, cache()))
    assert not view_of(made).reads
    assert not made.counts


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
        assert [blocks.count(block) for block in row] == [0, 2, 1, 1, 1, 1, 1, 1, 0, 0], (
            "once, but for a look at the shape"
        )


def test_a_block_with_new_content_gets_a_new_representative() -> None:
    """One request ends and another gets its blocks; one is preempted and comes back to other content."""
    made, old, new = method(), cache() * 0.01, cache() * 0.01
    old[0, 12] = old[0, 13] = 1.0
    new[0, 14] = new[0, 15] = 1.0
    batch = step(("a", 30, 1, 8))
    assert run(made, batch, metadata(batch, [LONG]), old)[-1].block_table.tolist() == [[10, 12, 13, 16, 17]]
    made.requests_finished(None, ["a"])
    other = step(("b", 30, 1, 8))
    assert run(made, other, metadata(other, [LONG]), new)[-1].block_table.tolist() == [[10, 14, 15, 16, 17]]
    back = step(("b", 0, 30, 8), admitted=["b"])
    run(made, back, metadata(back, [LONG]), old)
    assert run(made, other, metadata(other, [LONG]), old)[-1].block_table.tolist() == [[10, 12, 13, 16, 17]]


def failing(made: BlockTopK, *layers: str) -> None:
    view_of(made).unreadable = layers


class Keeping(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def told() -> Iterator[list[logging.LogRecord]]:
    handler = Keeping()
    get_logger().addHandler(handler)
    yield handler.records
    get_logger().removeHandler(handler)


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


def test_messages_bear_the_name_that_the_operator_wrote() -> None:
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=SIZE))
    with pytest.raises(ConfigError, match="GSAOnDevice has no option 'budget'"):
        GSAOnDevice(config, Role.WORKER, {"budget": 1})
    assert GSAOnDevice(config, Role.WORKER, OPTIONS).summary().startswith("GSAOnDevice restricted 0 decodes")


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


def test_a_worker_may_have_dense_layers_alone() -> None:
    """The first stage of a pipeline."""
    made, batch = method(dense_layers=len(LAYERS)), step(("a", 30, 1, 8))
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


def test_engine_and_layers_are_required() -> None:
    made = method()
    assert view_of(made).engine_required
    made.layer_seen(LAYERS[0])
    made.layer_seen(LAYERS[1])
    assert view_of(made).required == {(LAYERS[0], False), (LAYERS[1], True)}


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        ({"token_budget": 15}, "leaves no block of 4 to choose", "let it be 16 or more"),
        ({"token_budget": "20"}, "valid integer", "1 or more"),
        ({"budget": 20}, "has no option 'budget'", "token_budget, sink_tokens, recent_tokens, dense_layers"),
        ({"dense_layers": -1}, "greater than or equal to 0", "0 or more"),
    ],
)
def test_wrong_options(options: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        method(**options)
    assert caught.value.where.startswith("ucm_sparse_config.BlockTopK.")
    assert fix in caught.value.fix


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("group", ["ATTENTION", "WORKER", "MODEL_RUNNER", "MODEL_RUNNER_V2"])
def test_switched_off_hooks_are_no_silent_dense_run(monkeypatch: pytest.MonkeyPatch, group: str, role: Role) -> None:
    monkeypatch.setenv(f"UCM_DISABLE_{group}_PATCH", "1")
    with pytest.raises(SparseMethodError, match="BlockTopK needs hooks that are switched off") as caught:
        BlockTopK(None, role, OPTIONS)
    assert f"UCM_DISABLE_{group}_PATCH" in caught.value.where


def test_the_schedulers_side_needs_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCM_DISABLE_SCHEDULER_PATCH", "1")
    monkeypatch.setenv("UCM_DISABLE_ATTENTION_PATCH", "0")
    assert method().counts == {}


def test_blocks_of_the_metadata_may_be_smaller_than_the_managers() -> None:
    """vLLM may split its blocks for the kernels; the budget is in the blocks that the metadata counts."""
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=2 * SIZE))
    made = BlockTopK(config, Role.WORKER, {**OPTIONS, "token_budget": 40})
    made.attention = FakeView()
    made.worker_started()
    batch = step(("a", 50, 1, 8))
    found = run(made, batch, metadata(batch, [list(range(10, 23))]), cache())[-1]
    assert found.block_table.shape == (1, 10)
    assert found.seq_lens.tolist() == [39]


def test_told_at_powers_of_two(told: list[logging.LogRecord]) -> None:
    made, kv = method(), cache()
    row = list(range(10, 22))
    for computed in range(30, 37):
        batch = step(("a", computed, 1, 8))
        run(made, batch, metadata(batch, [row]), kv)
    lines = [record.getMessage() for record in told]
    assert [line.split(" in ")[1].split()[0] for line in lines] == ["1", "2", "4"]
    assert lines[0] == (
        "[UCM.Sparse] BlockTopK restricted 1 decodes in 1 steps: 10 of 16 blocks read (62.5%), "
        "10 representatives made, 0 requests dense after 0 failures"
    )
