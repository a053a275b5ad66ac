"""Refuse engines that blending does not support, by vLLM's configuration; each error says what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.blend.isolation import names_are_kept_apart
from ucm.integration.vllm.config import sparse_method_config
from ucm.integration.vllm.connector.engine_facts import runs_micro_batches
from ucm.integration.vllm.connector.failures import UnsupportedModelError
from ucm.integration.vllm.options import leave_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.config.settings import BlendSettings

#: The values of ``cache_dtype`` with which KV is stored as the model computes it.
PLAIN = ("auto", "float16", "half", "bfloat16", "float32", "float")
OTHER = "use UCMConnector, which loads exact prefixes, for this model"
#: The attributes of a model's configuration for layers that do not rotate their keys.
UNROTATED = ("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval", "nope_layers")


def require_engine(vllm_config: Any, settings: BlendSettings, groups: Sequence[Any]) -> None:
    """Refuse an engine in which no request can be blended.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        settings: The settings of ``blend``.
        groups: The model's KV-cache groups.

    Raises:
        UnsupportedModelError: For the first obstacle.
    """
    _refuse_model(vllm_config.model_config, groups)
    _refuse_parallel(vllm_config)
    if sparse_method_config(vllm_config) is not None:
        raise UnsupportedModelError(
            "blending and a sparse method cannot be combined: each decides which tokens may be read",
            where="ucm_sparse_config",
            fix="leave one of the two out",
        )
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise UnsupportedModelError(
            "blending fills only the model's KV cache, not that of a draft model",
            where="speculative_config",
            fix="start vLLM without --speculative-config, or use UCMConnector",
        )
    if getattr(vllm_config, "lora_config", None) is not None:
        raise UnsupportedModelError(
            "vLLM maps adapters to the rows of a step, which the forward passes of blending do not have",
            where="lora_config",
            fix="start vLLM without --enable-lora, or use UCMConnector",
        )
    cache = vllm_config.cache_config
    if cache.cache_dtype not in PLAIN:
        raise UnsupportedModelError(
            f"keys stored as {cache.cache_dtype!r} cannot be rotated to another position",
            where="cache_config.cache_dtype",
            fix="start vLLM with --kv-cache-dtype auto, or use UCMConnector",
        )
    if cache.enable_prefix_caching and not names_are_kept_apart():
        raise UnsupportedModelError(
            "before vLLM 0.11.0, UCM cannot change the hashes of a request's blocks in vLLM's prefix cache: others "
            "would find blended KV as exact",
            where="cache_config.enable_prefix_caching",
            fix="start vLLM with --no-enable-prefix-caching, or use a newer one",
        )
    if settings.select == "deviation" and not vllm_config.model_config.enforce_eager:
        raise UnsupportedModelError(
            "blend: select: deviation ends a forward pass after its check layer, which a compiled model cannot do",
            where="model_config.enforce_eager",
            fix="start vLLM with --enforce-eager, or set select: edges",
        )


def require_alone(vllm_config: Any) -> None:
    """Refuse to be one of several connectors, because the others would save blended KV under exact keys.

    vLLM gives each connector of a ``MultiConnector`` its own configuration. The engine's configuration is available
    while its workers create their connectors.

    Args:
        vllm_config: vLLM's ``VllmConfig`` that this connector was given, in a worker.

    Raises:
        UnsupportedModelError: If the engine's own configuration names another connector.
    """
    try:
        from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415 - ucm imports without vLLM
    except ImportError:
        return
    transfer = getattr(get_current_vllm_config_or_none(), "kv_transfer_config", None)
    outer = getattr(transfer, "kv_connector", None)
    if outer is not None and outer != vllm_config.kv_transfer_config.kv_connector:
        raise UnsupportedModelError(
            "the other connectors would save blended KV as exact",
            where=f"kv_transfer_config.kv_connector: {outer}",
            fix="name BlendConnector, which also loads and saves exact prefixes, as the engine's only connector",
        )


def _refuse_model(model: Any, groups: Sequence[Any]) -> None:
    where = f"model {model.model!r}"
    text = getattr(model, "hf_text_config", None)
    obstacles = {
        "blending does not serve models that generate no text": getattr(model, "runner_type", "generate")
        not in {"generate", "auto"},
        "blending does not serve latent attention (MLA)": model.use_mla,
        "blending does not serve multimodal models": getattr(model, "is_multimodal_model", False),
        "blending does not serve encoder-decoder models": model.is_encoder_decoder,
        "blending does not serve positions of several dimensions (mrope)": getattr(model, "uses_mrope", False)
        or getattr(model, "uses_xdrope_dim", 0),
        "blending does not serve models that mix attention with other layers": getattr(model, "is_hybrid", False),
        "blending does not serve models that attend within chunks": getattr(model, "attention_chunk_size", None),
        "blending does not serve models in which some layers do not rotate their keys": any(
            getattr(text, name, None) for name in UNROTATED
        ),
        "blending does not serve models with sliding windows, or several kinds of attention": len(groups) != 1
        or groups[0].window is not None,
    }
    for what, there in obstacles.items():
        if there:
            raise UnsupportedModelError(what, where=where, fix=OTHER)


def _refuse_parallel(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if int(getattr(parallel, name, 1) or 1) > 1:
            raise UnsupportedModelError(
                "the forward passes of blending run only on the ranks of one tensor-parallel group",
                where=f"parallel_config.{name} = {getattr(parallel, name)}",
                fix=f"start vLLM with --{name.replace('_', '-')} 1, or use UCMConnector",
            )
    if runs_micro_batches(vllm_config):
        where, options = leave_out(parallel, "enable_dbo", "ubatch_size")
        raise UnsupportedModelError(
            "blending does not serve micro-batches, which split a step's rows",
            where=f"parallel_config: {where}",
            fix=f"start vLLM without {options}",
        )
