"""Skipped blocks, options and refusals; `accounting` and the end-to-end tests cover the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ucm.sparse.steps import step
from tests.ucm.sparse.told import told_meanwhile, warnings
from ucm.errors import ConfigError, SparseMethodError
from ucm.sparse.attention import AttentionView, StepBatch
from ucm.sparse.base import Role
from ucm.sparse.blocks import ReleasedBlocks, SinksAndWindow
from ucm.sparse.factory import method_class
from ucm.sparse.sink_window import SinkWindow

windows = st.builds(
    SinksAndWindow, st.integers(0, 40), st.integers(1, 60), st.booleans(), st.sampled_from([1, 6, 16, 128])
)
sizes = st.sampled_from([1, 4, 16, 32])
tokens = st.integers(0, 300)


@settings(max_examples=100, deadline=None)
@given(window=windows, size=sizes, computed=tokens, prompt=tokens)
def test_what_is_skipped_lies_between_the_sinks_and_the_window(
    window: SinksAndWindow, size: int, computed: int, prompt: int
) -> None:
    skipped = window.skipped(computed, prompt, size)
    places = set(range(window.sink_blocks(size) * size, (window.sink_blocks(size) + skipped) * size))
    assert not places & set(range(window.sink_tokens))
    assert not places & set(range(computed - window.window_tokens, computed + 1))
    if window.dense_prefill and computed < prompt:
        assert not places
    elif computed - window.tile - window.window_tokens - window.sink_tokens >= 2 * size:
        assert places, "two whole blocks between them are enough to skip one"


@settings(max_examples=100, deadline=None)
@given(window=windows, size=sizes, rows=st.lists(st.tuples(tokens, tokens), min_size=1, max_size=5))
def test_both_sides_count_alike(window: SinksAndWindow, size: int, rows: list[tuple[int, int]]) -> None:
    computed, prompt = np.array(rows, np.int64).T
    assert window.skipped(computed, prompt, size).tolist() == [window.skipped(*row, size) for row in rows]


@settings(max_examples=100, deadline=None)
@given(window=windows, sizes=st.sampled_from([(16, 16), (32, 16), (64, 16)]), computed=tokens)
def test_smaller_blocks_of_a_backend_skip_no_less_than_is_released(
    window: SinksAndWindow, sizes: tuple[int, int], computed: int
) -> None:
    """A backend may use parts of the manager's blocks: the blocks that it reads must be held."""
    whole, part = sizes
    released_from = window.sink_blocks(whole) * whole
    released_to = released_from + window.skipped(computed, 0, whole) * whole
    read_to = window.sink_blocks(part) * part
    read_from = read_to + window.skipped(computed, 0, part) * part
    assert read_to <= released_from
    assert released_to <= max(read_from, released_from)


@settings(max_examples=100, deadline=None)
@given(window=windows, size=sizes, computed=tokens, new=st.integers(1, 50))
def test_skipped_blocks_only_become_more(window: SinksAndWindow, size: int, computed: int, new: int) -> None:
    assert window.skipped(computed, 0, size) <= window.skipped(computed + new, 0, size)


steps = st.lists(st.tuples(tokens, st.integers(1, 200), tokens), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(window=windows, size=sizes, rows=steps)
def test_what_a_token_reads_is_a_matter_of_its_position_alone(
    window: SinksAndWindow, size: int, rows: list[tuple[int, int, int]]
) -> None:
    """Whatever its chunk, the other rows of the step, and the end of a hit."""
    batch = step(*[(str(number), computed, new, prompt) for number, (computed, new, prompt) in enumerate(rows)])
    pieces, skipped = window.cut(batch, size)
    assert pieces.whole == (len(pieces.rows) == len(rows))
    assert [int(pieces.rows[last]) for last in pieces.lasts] == list(range(len(rows)))
    read = [
        (row, position, of_piece)
        for row, begin, end, of_piece in zip(pieces.rows, pieces.begins, pieces.ends, skipped, strict=True)
        for position in range(begin, end)
    ]
    assert read == [
        (row, position, window.skipped(position, prompt, size))
        for row, (computed, new, prompt) in enumerate(rows)
        for position in range(computed, computed + new)
    ]


def test_a_context_within_sinks_and_window_is_dense() -> None:
    window = SinksAndWindow(4, 100)
    assert not any(window.skipped(position, 0, 16) for position in range(128))
    assert window.skipped(128, 0, 16) == 0
    assert {window.skipped(position, 0, 16) for position in range(256, 384)} == {8}


@pytest.mark.parametrize("name", ["SinkWindow", "StreamingLLM"])
def test_its_names(name: str) -> None:
    method = method_class(name)(SimpleNamespace(), Role.WORKER, {"sink_tokens": 8, "prefill": "dense"})
    assert isinstance(method, SinkWindow)
    assert method.window == SinksAndWindow(8, 4096, dense_prefill=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 5}, "no option 'window'"),
        ({"window_tokens": 0}, "greater than or equal to 1"),
        ({"sink_tokens": -1}, "greater than or equal to 0"),
        ({"prefill": "sparse"}, "'window' or 'dense'"),
        ({"sink_tokens": "4"}, "valid integer"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        SinkWindow(SimpleNamespace(), Role.WORKER, options)
    assert "ucm_sparse_config.SinkWindow" in raised.value.where
    assert raised.value.fix


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("group", ["ATTENTION", "WORKER", "SCHEDULER", "MODEL_RUNNER"])
def test_one_side_alone_is_refused(role: Role, group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"UCM_DISABLE_{group}_PATCH", "1")
    with pytest.raises(SparseMethodError, match="SinkWindow needs hooks"):
        SinkWindow(SimpleNamespace(), role, {})


def test_a_step_whose_attention_does_not_ask_is_an_error() -> None:
    method = SinkWindow(SimpleNamespace(), Role.WORKER, {"window_tokens": 16})
    batch = StepBatch(["a"], np.array([1]), np.array([20]), np.array([8]), np.array([False]))
    view = method.attention = create_autospec(AttentionView, instance=True)
    view.batch.return_value = batch
    method.execute_begin(None, None, None)
    method.execute_finished(None, None, None)
    batch.num_computed_tokens[:] = 30
    method.execute_begin(None, None, None)
    with pytest.raises(SparseMethodError, match="was not asked by any layer"):
        method.execute_finished(None, None, None)


def scheduler(*managers: Any) -> Any:
    """The parts of vLLM's scheduler that are checked before blocks are released; other tests use the real one."""
    coordinator = SimpleNamespace(single_type_managers=managers)
    return SimpleNamespace(kv_cache_manager=SimpleNamespace(coordinator=coordinator), connector=None)


def manager(name: str = "FullAttentionManager", kind: str = "FullAttentionSpec", size: int = 16, **about: Any) -> Any:
    spec = type(kind, (), {"block_size": 16, **about})()
    return type(name, (), {"kv_cache_spec": spec, "block_size": size, "block_pool": None})()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (SimpleNamespace(kv_cache_manager=SimpleNamespace()), "manages its blocks in another way"),
        (scheduler(), "one kind of KV cache"),
        (scheduler(manager(), manager("SlidingWindowManager")), "has 2"),
        (scheduler(manager("SlidingWindowManager", "SlidingWindowSpec")), "plain full attention"),
        (scheduler(manager(kind="MLAAttentionSpec")), "plain full attention"),
        (scheduler(manager(use_mla=True)), "plain full attention"),
        (scheduler(manager(sliding_window=512)), "plain full attention"),
        (scheduler(manager(size=32)), "context parallelism"),
    ],
)
def test_other_kv_caches_are_refused(found: Any, message: str) -> None:
    with pytest.raises(SparseMethodError, match=message) as raised:
        ReleasedBlocks(found, SinksAndWindow(4, 16))
    assert raised.value.fix


CONFIG = SimpleNamespace(parallel_config=SimpleNamespace(rank=0), cache_config=SimpleNamespace(block_size=16))


def both_sides(options: dict[str, Any], asked: object) -> tuple[SinkWindow, SinkWindow, Any]:
    """Return the scheduler side, the worker side, and a request with options; another request of the step has none."""
    scheduler, worker = (method_class("SinkWindow")(CONFIG, role, options) for role in Role)
    assert isinstance(scheduler, SinkWindow)
    assert isinstance(worker, SinkWindow)
    scheduler._blocks = create_autospec(ReleasedBlocks, instance=True)
    worker.attention = create_autospec(AttentionView, instance=True)
    batch = step(("a", 300, 1, 8), ("b", 300, 1, 8), a=asked)
    worker.attention.batch.return_value = batch  # type: ignore[attr-defined]
    params = SimpleNamespace(extra_args={"ucm_sparse": asked})
    return scheduler, worker, SimpleNamespace(request_id="a", num_prompt_tokens=8, sampling_params=params)


@pytest.mark.parametrize(
    ("asked", "dense", "told"),
    [
        (False, True, ""),
        (True, False, ""),
        ("{}", False, ""),
        ("no", True, "so it is dense; "),
        ({"token_budget": 64}, True, "SinkWindow has no token_budget"),
    ],
)
def test_both_sides_take_alike_who_is_dense(asked: object, dense: bool, told: str) -> None:
    """With dense prompts."""
    scheduler, worker, request = both_sides({"window_tokens": 16, "prefill": "dense"}, asked)
    assert scheduler.before_allocation(request)
    assert scheduler._blocks.release.called == (not dense)  # type: ignore[attr-defined]
    with told_meanwhile() as records:
        worker.execute_begin(None, None, None)
    assert worker._batch is not None
    _, skipped = worker.window.cut(worker._batch, 16)
    assert (skipped[0] == 0) == dense
    assert skipped[1] > 0
    assert [told in line for line in warnings(records)] == [True] * bool(told)
    worker.requests_finished(None, ["a"])
    assert not worker._dense


def test_where_prompts_are_not_dense_nobody_is() -> None:
    scheduler, worker, request = both_sides({}, False)
    assert scheduler.before_allocation(request)
    assert scheduler._blocks.release.called  # type: ignore[attr-defined]
    with told_meanwhile() as records:
        worker.execute_begin(None, None, None)
    assert worker._batch is worker.attention.batch(None, None, None)
    (line,) = warnings(records)
    assert "SinkWindow has no options for single requests" in line
    assert "it runs like all others" in line
