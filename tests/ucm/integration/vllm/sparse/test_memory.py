"""What a method keeps beside the KV cache is taken from the cache's memory, by the installed vLLM's own rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests")
pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests")

import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from ucm.compat import bound_kv_cache, optional
from ucm.integration.vllm import hooks
from ucm.sparse.base import Role
from ucm.sparse.topk.method import BlockTopK
from ucm.testing.attention_layer import real_layer

GIB = 1 << 30


def full(block_size: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)


def windowed() -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, sliding_window=64)


def layers(*kinds: Any) -> dict[str, Any]:
    return {f"model.layers.{n}.self_attn.attn": kind for n, kind in enumerate(kinds)}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """vLLM's configuration of an engine with the method."""
    return real_layer(tmp_path_factory.mktemp("model"), "bfloat16", 16, 64).config


@pytest.mark.parametrize(
    "specs",
    [
        layers(*[full()] * 6),
        layers(*[full(128)] * 6),
        layers(full(), windowed(), windowed(), full(), full(), windowed()),
    ],
    ids=["blocks of 16", "blocks of 128", "some with a window"],
)
def test_caches_and_summaries_together_fit_into_what_vllm_has(
    config: Any, specs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is left, vLLM makes its caches; of a model of one kind of layers, hardly anything is wasted."""
    options = {"dense_layers": 2}
    monkeypatch.setattr(config, "additional_config", {"ucm_sparse_config": {"BlockTopK": options}})
    monkeypatch.setattr(config.model_config.hf_text_config, "num_hidden_layers", len(specs))
    if optional(config, "cache_config.get_resolved_kv_cache_layout") is not None:  # as EngineCore does before
        monkeypatch.setattr(config.cache_config, "kv_cache_layout", "NHD")
    memory = 8 * GIB
    left = hooks.kv_cache_memory(config, [specs, specs], [memory, memory])
    assert left[0] == left[1] < memory
    (made,) = get_kv_cache_configs(config, [specs], [left[0]])
    sizes = [of.size for of in made.kv_cache_tensors]
    # In newer releases, each entry is a place in one allocation and has the size of it all.
    caches = sum(sizes) if optional(made.kv_cache_tensors[0], "layer_stride") is None else max(sizes)
    summaries = made.num_blocks * BlockTopK(config, Role.SCHEDULER, options).bytes_beside_block([specs])[0]
    assert summaries > 0.004 * caches
    assert caches + summaries <= memory
    if len({type(of) for of in specs.values()}) == 1:
        assert caches + summaries > 0.99 * memory


def test_without_summaries_the_cache_has_all_of_it(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = layers(*[full()] * 4)
    choices: list[dict[str, Any]] = [{}, {"ucm_sparse_config": {"SinkWindow": {}}}]
    for configured in choices:
        monkeypatch.setattr(config, "additional_config", configured)
        assert hooks.kv_cache_memory(config, [specs, {}], [8 * GIB, 0]) == [8 * GIB, 0]


def test_an_engine_without_a_cache_stays_as_it_is(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "additional_config", {"ucm_sparse_config": {"BlockTopK": {"dense_layers": 0}}})
    assert hooks.kv_cache_memory(config, [{}], [0]) == [0]


def test_the_layer_of_an_engine_has_its_cache_when_summaries_are_allocated(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """On the backend's own cache, in its own layout, as vLLM binds it: a tensor, or one for each virtual engine."""
    real = real_layer(tmp_path_factory.mktemp("model"), "bfloat16", 32, 64, blocks=40)
    name = next(iter(real.config.compilation_config.static_forward_context))
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    for bound in (real.kv_cache, [real.kv_cache]):
        real.layer.kv_cache = bound
        made = BlockTopK(real.config, Role.WORKER, {"dense_layers": 0, "token_budget": 512})
        made.attention = real.view
        made.worker_started()
        made.layer_seen(name)
        made.layers_seen()
        (held,) = made._representatives.values()
        assert [held.nbytes] == [40 * one for one in made.bytes_beside_block([{name: spec}])]


def test_a_pair_of_caches_stays_a_pair() -> None:
    """VLLM Ascend binds keys and values apart."""
    pair = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    for bound in (pair, [pair]):
        assert bound_kv_cache(SimpleNamespace(kv_cache=bound)) is pair
    for unbound in (torch.tensor([]), [torch.tensor([])], ()):
        assert bound_kv_cache(SimpleNamespace(kv_cache=unbound)) is None
