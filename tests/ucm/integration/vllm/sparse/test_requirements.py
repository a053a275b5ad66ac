"""What is refused, and what each refusal says."""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ucm.errors import SparseMethodError
from ucm.integration.vllm.sparse.layers import AttentionLayers
from ucm.integration.vllm.sparse.requirements import attention_layers, require_asked

NAME = "model.layers.0.self_attn.attn"


class Graphs(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_AND_PIECEWISE = 3

    def has_full_cudagraphs(self) -> bool:
        return self in {Graphs.FULL, Graphs.FULL_AND_PIECEWISE}


def config(layers: dict[str, Any] | None = None, **changes: Any) -> Any:
    """As much of a ``VllmConfig`` as is looked at; ``changes`` are ``section__name`` to value."""
    sections: dict[str, dict[str, Any]] = {
        "model_config": {
            "model": "some/model",
            "use_mla": False,
            "is_encoder_decoder": False,
            "runner_type": "generate",
            "enforce_eager": False,
        },
        "cache_config": {"sliding_window": None, "block_size": 32, "cache_dtype": "auto"},
        "parallel_config": {"decode_context_parallel_size": 1, "enable_dbo": False},
        "compilation_config": {"cudagraph_mode": Graphs.PIECEWISE, "static_forward_context": layers or {}},
    }
    whole = {}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            sections[section][name] = value
        else:
            whole[section] = value
    made = {name: SimpleNamespace(**values) for name, values in sections.items()}
    return SimpleNamespace(**{"speculative_config": None, **made, **whole})


def old_flag(flag: bool) -> Any:
    """The compilation settings of releases before there were modes."""
    return SimpleNamespace(full_cuda_graph=flag, static_forward_context={})


def modes(graphs: Graphs, *, split: bool = True, **level: int) -> Any:
    """The compilation settings of releases with modes; `test_graphs` has the real ones."""
    return SimpleNamespace(
        cudagraph_mode=graphs,
        static_forward_context={},
        splitting_ops_contain_attention=lambda: split,
        **(level or {"mode": 3}),
    )


@pytest.mark.parametrize(
    "settings",
    [
        config(),
        config(compilation_config__cudagraph_mode=Graphs.NONE),
        config(compilation_config__cudagraph_mode=Graphs.FULL, model_config__enforce_eager=True),
        config(compilation_config=modes(Graphs.FULL_AND_PIECEWISE)),
        config(compilation_config=old_flag(False)),
        config(model_config__runner_type="auto"),
        config(additional_config={"torchair_graph_config": {"enabled": False}}),
    ],
)
def test_what_is_served(settings: Any) -> None:
    AttentionLayers(settings).require_engine()


@pytest.mark.parametrize(
    ("settings", "what", "where", "fix"),
    [
        (config(model_config__use_mla=True), "latent attention", "some/model", "without ucm_sparse_config"),
        (config(model_config__is_encoder_decoder=True), "encoder-decoder", "some/model", "without ucm_sparse_config"),
        (config(model_config__runner_type="pooling"), "text generation only", "pooling", "without ucm_sparse_config"),
        (config(cache_config__sliding_window=4096), "sliding window", "some/model", "without ucm_sparse_config"),
        (config(model_config__attention_chunk_size=8192), "within chunks", "some/model", "without"),
        (config(model_config__is_hybrid=True), "mix attention", "some/model", "without"),
        (config(model_config__is_mm_prefix_lm=True), "images in both directions", "some/model", "without"),
        (config(model_config__rswa_window=1024), "windows that depend", "some/model", "without"),
        (config(speculative_config=object()), "speculative decoding", "speculative_config", "--speculative-config"),
        (
            config(parallel_config__decode_context_parallel_size=2),
            "context parallelism",
            "decode_context_parallel_size = 2",
            "--decode-context-parallel-size 1",
        ),
        (config(parallel_config__prefill_context_parallel_size=2), "context parallelism", "prefill_", "--prefill-"),
        (config(parallel_config__enable_dbo=True), "micro-batches", "enable_dbo", "--enable-dbo"),
        (config(parallel_config__ubatch_size=4), "micro-batches", "ubatch_size", "--ubatch-size"),
        (config(compilation_config=old_flag(True)), "full CUDA graphs", "full_cuda_graph", "--enforce-eager"),
        (
            config(additional_config={"torchair_graph_config": {"enabled": True}}),
            "graphs whose replay runs no Python",
            "torchair_graph_config",
            "start vLLM without torchair_graph_config",
        ),
        (
            config(additional_config={"xlite_graph_config": {"enabled": True}}),
            "graphs whose replay runs no Python",
            "xlite_graph_config",
            "start vLLM without xlite_graph_config",
        ),
    ],
)
def test_an_engine_that_is_refused(settings: Any, what: str, where: str, fix: str) -> None:
    with pytest.raises(SparseMethodError, match=what) as caught:
        AttentionLayers(settings).require_engine()
    assert where in caught.value.where
    assert fix in caught.value.fix


def test_attention_beside_recurrent_layers_is_served_to_methods_that_declare_it() -> None:
    AttentionLayers(config(model_config__is_hybrid=True)).require_engine(hybrid=True)
    both = config(model_config__is_hybrid=True, model_config__use_mla=True)
    with pytest.raises(SparseMethodError, match="in models that mix it with other layers") as caught:
        AttentionLayers(both).require_engine(latent=True, hybrid=True)
    assert "some/model" in caught.value.where


class MambaSpec:
    """By its name alone."""


def test_recurrent_layers_are_not_asked_what_to_read() -> None:
    caches = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=MambaSpec(), layer_names=["layers.0", "layers.2"]),
            SimpleNamespace(kv_cache_spec=object(), layer_names=["layers.1", "layers.3", "of another rank"]),
        ]
    )
    layers = {f"layers.{number}": object() for number in range(4)}
    assert attention_layers(caches.kv_cache_groups, layers) == ["layers.1", "layers.3"]
    require_asked("Method", caches, layers, {"layers.1", "layers.3"})
    with pytest.raises(SparseMethodError, match="1 of the 2 layers with keys in a cache") as caught:
        require_asked("Method", caches, layers, {"layers.1"})
    assert "layers.3" in caught.value.where


def drafting(method: str | None = "ngram", **changes: Any) -> Any:
    return config(speculative_config=SimpleNamespace(method=method), **changes)


def test_drafts_are_served_to_methods_that_declare_it() -> None:
    AttentionLayers(drafting(scheduler_config=SimpleNamespace(async_scheduling=False))).require_engine(drafts=True)


@pytest.mark.parametrize(
    ("settings", "what", "where", "fix"),
    [
        (drafting("eagle"), "only drafts by custom_class, ngram, suffix, not by 'eagle'", "speculative", "without"),
        (drafting(None), "not by None", "speculative_config", "without"),
        (drafting(model_config__use_mla=True), "one token of each request", "speculative_config", "without"),
        (drafting(model_config__is_hybrid=True), "mixes attention with other layers", "speculative_config", "without"),
        (
            drafting(scheduler_config=SimpleNamespace(async_scheduling=True)),
            "before it knows which drafts",
            "scheduler_config.async_scheduling",
            "--no-async-scheduling",
        ),
    ],
)
def test_drafts_that_are_refused_to_every_method(settings: Any, what: str, where: str, fix: str) -> None:
    with pytest.raises(SparseMethodError, match=what) as caught:
        AttentionLayers(settings).require_engine(latent=True, drafts=True, hybrid=True)
    assert where in caught.value.where
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("compilation", "lowered"),
    [
        (modes(Graphs.FULL_AND_PIECEWISE), Graphs.PIECEWISE),
        (modes(Graphs.FULL, level=3), Graphs.PIECEWISE),
        (modes(Graphs.FULL, split=False), Graphs.NONE),
        (modes(Graphs.FULL, mode=0), Graphs.NONE),
        (modes(Graphs.FULL, level=0), Graphs.NONE),
    ],
)
def test_full_graphs_are_lowered(compilation: Any, lowered: Graphs) -> None:
    AttentionLayers(config(compilation_config=compilation)).require_engine()
    assert compilation.cudagraph_mode == lowered


def test_drafts_on_an_npu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_ascend", ModuleType("vllm_ascend"))
    with pytest.raises(SparseMethodError, match="on vLLM Ascend"):
        AttentionLayers(drafting()).require_engine(drafts=True)


def test_full_graphs_of_an_npu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_ascend", ModuleType("vllm_ascend"))
    compilation = modes(Graphs.FULL_AND_PIECEWISE)
    with pytest.raises(SparseMethodError, match="full CUDA graphs") as caught:
        AttentionLayers(config(compilation_config=compilation)).require_engine()
    assert caught.value.where == "compilation_config.cudagraph_mode = FULL_AND_PIECEWISE"
    assert '{"cudagraph_mode": "PIECEWISE"}' in caught.value.fix
    assert compilation.cudagraph_mode == Graphs.FULL_AND_PIECEWISE


class Runner:
    def __init__(self, manager: object) -> None:
        self.cudagraph_manager = manager


def test_full_graphs_that_a_runner_knows_already_are_refused() -> None:
    compilation = modes(Graphs.FULL_AND_PIECEWISE)
    settings, early, late = config(compilation_config=compilation), Runner(object()), Runner(None)
    with pytest.raises(SparseMethodError, match="full CUDA graphs"):
        AttentionLayers(settings, early).require_engine()
    AttentionLayers(settings, late).require_engine()
    assert compilation.cudagraph_mode == Graphs.PIECEWISE


class Device(enum.Enum):
    A2 = 0
    _310P = 2


@pytest.mark.parametrize(
    "utils",
    [
        SimpleNamespace(get_ascend_device_type=lambda: Device["_310P"]),
        SimpleNamespace(is_310p=lambda: True),
    ],
    ids=["by its type", "by a flag, in 0.11.0"],
)
def test_the_310p_is_refused_by_name(utils: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_ascend.utils", utils)
    with pytest.raises(SparseMethodError, match="the Ascend 310P"):
        AttentionLayers(config()).require_engine()


def test_other_npus_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    utils: Any = SimpleNamespace(get_ascend_device_type=lambda: Device.A2, is_310p=lambda: True)
    monkeypatch.setitem(sys.modules, "vllm_ascend.utils", utils)
    AttentionLayers(config()).require_engine()


class CPUAttentionBackendImpl:
    """By its name alone; its metadata would stand in its module."""

    alibi_slopes: object = None


class FlashInferImpl(CPUAttentionBackendImpl):
    pass


def layer(**changes: Any) -> Any:
    plain = {
        "impl": FlashInferImpl(),
        "num_kv_heads": 2,
        "head_size": 64,
        "attn_type": "decoder",
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "kv_sharing_target_layer_name": None,
    }
    return SimpleNamespace(**{**plain, **changes})


def biased() -> Any:
    impl = FlashInferImpl()
    impl.alibi_slopes = [0.5]
    return impl


@pytest.mark.parametrize(
    ("found", "what", "fix"),
    [
        (layer(use_mla=True), "latent attention", "without ucm_sparse_config"),
        (SimpleNamespace(kv_lora_rank=512), "latent attention", "without ucm_sparse_config"),
        (SimpleNamespace(), "is not attention over a KV cache", "without ucm_sparse_config"),
        (layer(attn_type="encoder_only"), "of the kind 'encoder_only'", "without ucm_sparse_config"),
        (layer(sink_len=128), "learned sinks lie in blocks of their own", "without ucm_sparse_config"),
        (layer(sliding_window=512), "sliding window of its own, of 512 tokens", "without ucm_sparse_config"),
        (layer(impl=biased()), "ALiBi", "without ucm_sparse_config"),
        (layer(kv_sharing_target_layer_name="model.layers.1"), "KV cache of another", "without ucm_sparse_config"),
        (layer(), "FlashInferImpl has no block table", "FLASH_ATTN or --attention-backend TRITON_ATTN"),
        (layer(impl=CPUAttentionBackendImpl()), "CPUAttentionBackendImpl has no block table", "--attention-backend"),
    ],
)
def test_a_layer_that_is_refused(found: Any, what: str, fix: str) -> None:
    with pytest.raises(SparseMethodError, match=what) as caught:
        AttentionLayers(config({NAME: found})).require(NAME)
    assert caught.value.where == f"layer {NAME}"
    assert fix in caught.value.fix
