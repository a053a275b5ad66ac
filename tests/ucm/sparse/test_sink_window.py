"""Which blocks are skipped, the options, and what is refused; the whole is in `accounting` and end to end."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ucm.errors import ConfigError, SparseMethodError
from ucm.sparse.attention import StepBatch
from ucm.sparse.base import Role
from ucm.sparse.factory import create_method
from ucm.sparse.released_blocks import ReleasedBlocks
from ucm.sparse.releasing import require_own_connector
from ucm.sparse.sink_window import SinkWindow
from ucm.sparse.window import SinksAndWindow

if TYPE_CHECKING:
    from ucm.sparse.attention import AttentionView

windows = st.builds(SinksAndWindow, st.integers(0, 40), st.integers(1, 60), st.booleans())
sizes = st.sampled_from([1, 4, 16, 32])
tokens = st.integers(0, 300)


@settings(max_examples=100, deadline=None)
@given(window=windows, size=sizes, computed=tokens, prompt=tokens)
def test_what_is_skipped_lies_between_the_sinks_and_the_window(
    window: SinksAndWindow, size: int, computed: int, prompt: int
) -> None:
    skipped = window.skipped_by(computed, prompt, size)
    places = set(range(window.sink_blocks(size) * size, (window.sink_blocks(size) + skipped) * size))
    assert not places & set(range(window.sink_tokens))
    assert not places & set(range(computed - window.window_tokens, computed + 1))
    if window.dense_prefill and computed < prompt:
        assert not places
    elif computed - window.window_tokens - window.sink_tokens >= 2 * size:
        assert places, "two whole blocks between them are enough to skip one"


@settings(max_examples=100, deadline=None)
@given(window=windows, size=sizes, rows=st.lists(st.tuples(tokens, tokens), min_size=1, max_size=5))
def test_both_sides_count_alike(window: SinksAndWindow, size: int, rows: list[tuple[int, int]]) -> None:
    computed, prompt = np.array(rows, np.int64).T
    assert window.skipped(computed, prompt, size).tolist() == [window.skipped_by(*row, size) for row in rows]


@settings(max_examples=100, deadline=None)
@given(window=windows, sizes=st.sampled_from([(16, 16), (32, 16), (64, 16)]), computed=tokens)
def test_smaller_blocks_of_a_backend_skip_no_less_than_is_released(
    window: SinksAndWindow, sizes: tuple[int, int], computed: int
) -> None:
    """A backend may count in parts of the manager's blocks: what it reads must be held."""
    whole, part = sizes
    released_from = window.sink_blocks(whole) * whole
    released_to = released_from + window.skipped_by(computed, 0, whole) * whole
    read_to = window.sink_blocks(part) * part
    read_from = read_to + window.skipped_by(computed, 0, part) * part
    assert read_to <= released_from
    assert released_to <= max(read_from, released_from)


@settings(max_examples=100, deadline=None)
@given(window=windows, size=sizes, computed=tokens, new=st.integers(1, 50))
def test_skipped_blocks_only_become_more(window: SinksAndWindow, size: int, computed: int, new: int) -> None:
    assert window.skipped_by(computed, 0, size) <= window.skipped_by(computed + new, 0, size)


def test_a_context_within_sinks_and_window_is_dense() -> None:
    window = SinksAndWindow(4, 100)
    assert not any(window.skipped_by(computed, 0, 16) for computed in range(116))
    assert window.skipped_by(132, 0, 16) == 1


@pytest.mark.parametrize("name", ["SinkWindow", "StreamingLLM"])
def test_its_names(name: str) -> None:
    method = create_method(name, SimpleNamespace(), Role.WORKER, {"sink_tokens": 8, "prefill": "dense"})
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
    method.attention = cast("AttentionView", SimpleNamespace(batch=lambda *_: batch))
    method.execute_begin(None, None, None)
    method.execute_finished(None, None, None)
    batch.num_computed_tokens[:] = 30
    method.execute_begin(None, None, None)
    with pytest.raises(SparseMethodError, match="did not ask what to read"):
        method.execute_finished(None, None, None)


@pytest.mark.parametrize(
    ("module", "recovers", "between_steps", "refusal"),
    [
        ("ucm.integration.vllm.ucm_connector", True, True, ""),
        ("ucm.integration.vllm.ucm_connector", False, False, ""),
        ("vllm.somewhere", False, False, "not UCM's may still want blocks that SinkWindow gives back"),
        ("ucm.integration.vllm.ucm_connector", True, False, "a layer that failed to load"),
    ],
)
def test_connectors(module: str, recovers: bool, between_steps: bool, refusal: str) -> None:
    connector = type("SomeConnector", (), {"__module__": module})()
    connector._scheduler = SimpleNamespace(policy=SimpleNamespace(recovers=recovers, between_steps=between_steps))
    with pytest.raises(SparseMethodError, match=refusal) if refusal else nullcontext():
        require_own_connector(connector, "SinkWindow")


def test_no_connector_is_no_obstacle() -> None:
    require_own_connector(None, "SinkWindow")


def scheduler(*managers: Any) -> Any:
    """As much of vLLM's scheduler as is looked at before anything is released; the real one has it all elsewhere."""
    coordinator = SimpleNamespace(single_type_managers=managers)
    return SimpleNamespace(kv_cache_manager=SimpleNamespace(coordinator=coordinator), connector=None)


def manager(name: str = "FullAttentionManager", kind: str = "FullAttentionSpec", size: int = 16, **about: Any) -> Any:
    spec = type(kind, (), {"block_size": 16, **about})()
    return type(name, (), {"kv_cache_spec": spec, "block_size": size, "block_pool": None})()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (SimpleNamespace(kv_cache_manager=SimpleNamespace()), "keeps its blocks in another way"),
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
