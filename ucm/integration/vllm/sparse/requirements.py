"""Refuse configurations and layers that no sparse method supports, and lower full CUDA graphs to piecewise ones.

A silent dense run would be worse than an error. Each error names the obstacle and the remedy.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ucm.compat import (
    DRAFTS,
    divided_context,
    graph_mode,
    has_whole_graphs,
    is_ascend_310p,
    is_split,
    layer_specs,
    leave_out,
    no_whole_graphs,
    optional,
    rank_of,
    runs_micro_batches,
)
from ucm.errors import SparseMethodError
from ucm.integration.vllm.connector.kv_cache import RECURRENT
from ucm.logger import get_logger
from ucm.sparse.base import refuse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

#: Values of ``cache_dtype`` with which keys are stored as the model computes them.
PLAIN_KEYS = ("auto", "float16", "half", "bfloat16", "float32", "float")
#: Settings of vLLM Ascend that run a whole step as a graph of a different kind than vLLM's.
GRAPHS_OF_ASCEND = ("torchair_graph_config", "xlite_graph_config")
WITHOUT_DRAFTS = "start vLLM without --speculative-config, or without ucm_sparse_config"
#: The maximum number of layers that a message names.
SHOWN = 3
#: vLLM's variable for graphs that are interrupted at each attention, without compilation.
BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
#: The V2 runner's attribute with its captured graphs, which knows the mode once it exists.
MANAGER = "cudagraph_manager"
#: What each lowered mode costs, for the warning.
COSTS = {
    "PIECEWISE": "each step launches the attention of every layer and the graphs between them one by one, where a full "
    "graph is a single launch; this takes the more of a step the smaller the model and the batch are",
    "NONE": "each step launches every operation one by one, because the model is not split at its attention; for "
    "piecewise graphs keep vLLM's splitting_ops and compilation mode, and do not fuse attention with quantisation",
}


def require_engine(vllm_config: Any, *, latent: bool = False, drafts: bool = False, hybrid: bool = False) -> None:
    """Refuse an engine that no sparse method supports.

    Raises:
        SparseMethodError: For the first obstacle.
    """
    _of_model(vllm_config, latent=latent, hybrid=hybrid)
    _of_drafts(vllm_config, served=drafts)
    _of_decoding(vllm_config)
    _of_graphs(vllm_config)
    _of_platform(vllm_config)


def latent_attention(where: str) -> SparseMethodError:
    """Return the refusal of latent attention by a method that does not serve it."""
    return SparseMethodError(
        "only BlockTopK (GSAOnDevice) serves latent attention (MLA)",
        where=where,
        fix="use it, or serve this model without ucm_sparse_config",
    )


def limit_of_drafts(*, served: bool) -> str:
    """Return which drafts a method refuses, for the error and for checks without an engine."""
    if not served:
        return "this sparse method does not serve speculative decoding"
    return f"sparse methods serve only drafts by {', '.join(DRAFTS)}"


def is_latent(layer: Any) -> bool:
    """Return whether a layer of vLLM's has latent attention."""
    return bool(optional(layer, "use_mla", False)) or optional(layer, "kv_lora_rank") is not None


def require_layer(layer_name: str, layer: Any, *, latent: bool = False) -> None:
    """Refuse a layer that no sparse method supports.

    Raises:
        SparseMethodError: For the first obstacle.
    """
    if is_latent(layer) and not latent:
        raise latent_attention(f"layer {layer_name}")
    impl = optional(layer, "impl")
    kind, window = optional(layer, "attn_type", "decoder"), optional(layer, "sliding_window")
    obstacles = {
        f"a {type(layer).__name__} is not attention over a KV cache": (
            impl is None or optional(layer, "num_kv_heads") is None
        ),
        f"sparse methods do not serve attention of the kind {kind!r}": kind != "decoder",
        f"the layer has a sliding window of its own, of {window} tokens": window is not None,
        "learned sinks lie in blocks of their own, ahead of a request's": optional(layer, "sink_len", 0),
        "position biases (ALiBi) need every token at its own distance": optional(impl, "alibi_slopes") is not None,
        "the layer reads the KV cache of another": optional(layer, "kv_sharing_target_layer_name") is not None,
    }
    refuse(obstacles, f"layer {layer_name}")


def attention_layers(kv_cache_groups: Sequence[Any], layers: Mapping[str, Any]) -> list[str]:
    """Return a worker's layers with keys in a KV cache; recurrent ones have a state there, which no method reads."""
    return [
        name
        for group in kv_cache_groups
        for name, spec in layer_specs(group.kv_cache_spec, group.layer_names).items()
        if name in layers and type(spec).__name__ not in RECURRENT
    ]


def require_asked(name: str, kv_cache_config: Any, layers: Mapping[str, Any], asked: AbstractSet[str]) -> None:
    """Refuse a model with layers whose attention passes no hook.

    Raises:
        SparseMethodError: Naming the layers that have keys in a cache but did not.
    """
    held = attention_layers(kv_cache_config.kv_cache_groups, layers)
    unasked = [layer for layer in held if layer not in asked]
    if unasked:
        shown = ", ".join(f"{layer} ({type(layers[layer]).__qualname__})" for layer in unasked[:SHOWN])
        raise SparseMethodError(
            f"{len(unasked)} of the {len(held)} layers with keys in a cache did not ask {name} what to read: their "
            "attention passes no hook",
            where=shown + (", …" if len(unasked) > SHOWN else ""),
            fix="serve this model without ucm_sparse_config; `ucm doctor --run` shows which hooks fire",
        )


def require_plain_keys(layer_name: str, layer: Any) -> None:
    """Refuse a layer with quantised keys in its cache."""
    stored = optional(layer, "kv_cache_dtype", "auto")
    obstacles = {f"keys stored as {stored!r} cannot be read back": stored not in PLAIN_KEYS}
    fix = "start vLLM with --kv-cache-dtype auto, or use a method that reads no keys"
    refuse(obstacles, f"layer {layer_name}, kv_cache_dtype", fix)


def require_plain_scores(layer_name: str, layer: Any) -> None:
    """Refuse a layer whose attention is not a plain softmax of scaled products."""
    cap = optional(layer.impl, "logits_soft_cap")
    obstacles = {
        f"the layer caps its scores, at {cap}": cap,
        "the layer has learned sinks among its scores": optional(layer.impl, "sinks") is not None,
    }
    refuse(obstacles, f"layer {layer_name}", "serve this model without this method")


def _of_model(vllm_config: Any, *, latent: bool, hybrid: bool) -> None:
    model = vllm_config.model_config
    mixed = optional(model, "is_hybrid", False)
    runs = optional(model, "runner_type", "generate")
    refuse(
        {"sparse methods serve text generation only": runs not in {"generate", "auto", "draft"}},
        f"runner_type {runs!r}",
    )
    if model.use_mla and not latent:
        raise latent_attention(f"model {model.model!r}")
    obstacles = {
        "sparse methods do not serve encoder-decoder models": model.is_encoder_decoder,
        "the model has a sliding window of its own": vllm_config.cache_config.sliding_window is not None,
        "the model attends within chunks": optional(model, "attention_chunk_size"),
        "the model attends to images in both directions, by the positions of their tokens": optional(
            model, "is_mm_prefix_lm", False
        ),
        "the model attends in windows that depend on the positions of tokens": optional(model, "rswa_window"),
        "only BlockTopK (GSAOnDevice) serves models that mix attention with other layers": mixed and not hybrid,
        "sparse methods do not serve latent attention (MLA) in models that mix it with other layers": (
            mixed and model.use_mla
        ),
    }
    refuse(obstacles, f"model {model.model!r}")


def _of_drafts(vllm_config: Any, *, served: bool) -> None:
    """Refuse drafts that a method does not serve.

    A method decides on the host what each token of a step reads, so the host must know how many drafts of the step
    before were accepted.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    method, unrun = optional(speculative, "method"), "no sparse method has been run with speculative decoding"
    obstacles = {
        limit_of_drafts(served=False): not served,
        "latent attention (MLA) is restricted only in steps with one token of each request": (
            vllm_config.model_config.use_mla
        ),
        f"{unrun} of a model that mixes attention with other layers": (
            optional(vllm_config, "model_config.is_hybrid", False)
        ),
        f"{limit_of_drafts(served=True)}, not by {method!r}": method not in DRAFTS,
        f"{unrun} on vLLM Ascend": "vllm_ascend" in sys.modules,
    }
    refuse(obstacles, "speculative_config", WITHOUT_DRAFTS)
    if optional(vllm_config, "scheduler_config.async_scheduling", False):
        raise SparseMethodError(
            "with asynchronous scheduling, vLLM starts a step before it knows which drafts the last one accepted",
            where="scheduler_config.async_scheduling",
            fix="start vLLM with --no-async-scheduling",
        )


def _of_decoding(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    divided = divided_context(parallel)
    if divided:
        raise SparseMethodError(
            "sparse methods do not serve context parallelism: a rank holds only some tokens of each block",
            where=f"parallel_config.{divided} = {optional(parallel, divided)}",
            fix=f"start vLLM with --{divided.replace('_', '-')} 1",
        )
    if runs_micro_batches(vllm_config):
        fields, named = leave_out(parallel, "enable_dbo", "ubatch_size")
        raise SparseMethodError(
            "sparse methods do not serve micro-batches, which split a step's rows",
            where=f"parallel_config: {fields}",
            fix=f"start vLLM without {named}",
        )


def _of_graphs(vllm_config: Any) -> None:
    """Refuse full CUDA graphs that `lower_graphs` leaves; a replay runs no Python and calls no hook."""
    compilation = vllm_config.compilation_config
    mode = graph_mode(compilation)
    if vllm_config.model_config.enforce_eager or not has_whole_graphs(compilation):
        return
    raise SparseMethodError(
        "sparse methods do not run in full CUDA graphs: a replay calls no hook",
        where=f"compilation_config.{'full_cuda_graph' if mode is None else f'cudagraph_mode = {mode.name}'}",
        fix=no_whole_graphs(compilation),
    )


def _of_platform(vllm_config: Any) -> None:
    """Refuse replacements by vLLM Ascend, found in its loaded modules, without accessing an NPU."""
    settings = optional(vllm_config, "additional_config")
    for name in GRAPHS_OF_ASCEND:
        chosen = settings.get(name) if isinstance(settings, dict) else None
        if isinstance(chosen, dict) and chosen.get("enabled"):
            raise SparseMethodError(
                "sparse methods do not run in graphs whose replay runs no Python: no layer would call the method",
                where=f"additional_config: {name}",
                fix=f"start vLLM without {name}, or without ucm_sparse_config",
            )
    differs = {"sparse methods do not serve the Ascend 310P, whose KV cache and attention differ": is_ascend_310p()}
    refuse(differs, "vllm_ascend.utils", "serve on another NPU, or without ucm_sparse_config")


def lower_graphs(vllm_config: Any, runner: Any) -> None:
    """Lower ``cudagraph_mode`` to one without full graphs, and say so once per engine; before the model is loaded.

    A replayed full graph calls no hook. Every release from 0.10.1 on has ``cudagraph_mode``, and its model runner
    lowers the mode itself after it has loaded the model, if an attention backend does not support the mode. Until
    then vLLM reads from it only whether there are graphs at all: the model is compiled, wrapped and captured by the
    mode that the worker finds then. So each worker lowers its own copy before it loads the model, by a rule that is
    the same in all of them, so all agree. What comes too late is refused: up to 0.10.0 there is a flag,
    ``full_cuda_graph``, which is off by default, and from it vLLM decides before a worker exists how the model is
    split; and the V2 runner of 0.16.0 to 0.19.1, which is not the default, takes the mode over when it is created.

    Attention stays outside of the remaining graphs. If no such graphs are possible, because the model is not split at
    its attention, the engine runs without graphs. Graphs for which it is too late are left as they are, also those of
    vLLM Ascend, whose platform decides from the mode how the model is split.

    Args:
        vllm_config: vLLM's ``VllmConfig``, as the worker got it.
        runner: Its model runner, which has no model yet.
    """
    compilation = vllm_config.compilation_config
    mode = graph_mode(compilation)
    if vllm_config.model_config.enforce_eager or mode is None or mode == type(mode).NONE:
        return
    if "vllm_ascend" in sys.modules or optional(runner, MANAGER) is not None:
        return
    splits = is_split(compilation)
    if splits:
        outside = compilation.splitting_ops_contain_attention()
    else:
        outside = optional(sys.modules.get("vllm.envs"), BREAKABLE, False)
    if not mode.has_full_cudagraphs() and (outside or not splits):
        return
    lowered = type(mode).PIECEWISE if outside else type(mode).NONE
    compilation.cudagraph_mode = lowered
    if rank_of(vllm_config) == 0:
        get_logger(__name__).warning(
            "[UCM.Sparse] cudagraph_mode is %s instead of %s, because the replay of a graph with attention in it calls "
            "no hook of a sparse method. The cost: %s. Set it yourself to avoid this warning: "
            '--compilation-config \'{"cudagraph_mode": "%s"}\'',
            *(lowered.name, mode.name, COSTS[lowered.name], lowered.name),
        )
