"""Everything that two engines must have in common to share KV blocks, as one digest.

The engine's processes must agree on it, though a worker's model code may have changed the Hugging Face configuration
and the KV-cache dtype in its own copy of ``VllmConfig`` by the time that we look. So nothing is taken that changes
after start, or that differs by rank: the configuration is told by its files and by the operator's overrides of them,
from which vLLM derives the rest in a way that its release fixes.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ucm.errors import ConfigError
from ucm.hashing.framing import frame
from ucm.hashing.plain_values import plain
from ucm.hashing.platform_facts import platform_facts, vllm_release
from ucm.hashing.vllm_hashes import plan_hashes
from ucm.hashing.weights import weights_identity

if TYPE_CHECKING:
    from collections.abc import Mapping

#: A change of what is told, or how, changes it.
FORMAT = "ucm.model-identity/1"

_MODEL_SETTINGS = (
    *("dtype", "quantization", "quantization_config", "override_attention_dtype", "disable_sliding_window"),
    *("hf_overrides", "rope_scaling", "rope_theta", "override_generation_config", "mm_processor_kwargs"),
    *("model_impl", "model_class_overrides", "config_format", "trust_remote_code", "code_revision"),
    *("runner_type", "convert_type", "use_mla"),
)
_MEDIA_SETTINGS = (
    *("language_model_only", "mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method"),
    *("mm_encoder_attn_dtype", "mm_device_do_normalize"),
)
_CACHE_SETTINGS = (
    *("kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode"),
    *("swa_bounded_replay", "use_replayssm", "kv_sharing_fast_prefill"),
)
_ATTENTION_SETTINGS = ("backend", "backend_per_kind", "indexer_kv_dtype", "use_fp4_indexer_cache", "use_non_causal")
#: Our own key in what vLLM hands to whom it may concern.
_SPARSE = "ucm_sparse_config"
#: Ways of drafting that have no layers, hence no KV.
_LAYERLESS_DRAFTS = frozenset({"ngram", "ngram_gpu", "suffix", "custom_class"})
#: RoPE whose angles depend on the length that the model is served with.
_LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "su", "dynamic"})


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What an engine's KV blocks depend on.

    Args:
        name: The model's name, for readers.
        facts: Plain values, for readers and for finding out why two engines do not share.
    """

    name: str
    facts: dict[str, Any]

    @property
    def digest(self) -> bytes:
        """32 bytes over all facts."""
        return hashlib.sha256(frame(self.facts)).digest()

    def to_json(self) -> str:
        """The facts as they are written beside the blocks."""
        return json.dumps({"name": self.name, "digest": self.digest.hex(), **self.facts}, indent=1, sort_keys=True)


def model_identity(
    vllm_config: Any, *, weights_id: str | None = None, more: Mapping[str, Any] | None = None
) -> ModelIdentity:
    """The identity of what an engine serves; the same in each of its processes.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        weights_id: The operator's own name for the weights, believed in place of their files.
        more: What else the blocks depend on, for instance the options of a sparse method.

    Raises:
        ConfigError: If the engine is configured so that its KV has no meaning outside its own process.
        WeightsUnknownError: If it cannot be told which weights it serves.
    """
    cache = vllm_config.cache_config
    model = vllm_config.model_config
    _refuse_private_kv(vllm_config)
    facts = {
        "format": FORMAT,
        "vllm": vllm_release(),
        "hashes": plan_hashes(vllm_config).kind,
        "model": _model(model, vllm_config.load_config, weights_id),
        "cache": {"cache_dtype": _cache_dtype(cache, model), **_settings(cache, _CACHE_SETTINGS)},
        "attention": _settings(getattr(vllm_config, "attention_config", None), _ATTENTION_SETTINGS),
        "draft": _draft(vllm_config, weights_id),
        "platform": platform_facts(vllm_config),
        "additional_config": plain(_additional(vllm_config)),
        "more": plain(dict(more or {})),
    }
    return ModelIdentity(name=_readable(str(model.model)), facts=facts)


def namespace(identity: ModelIdentity, *parts: str) -> str:
    """Where blocks of this identity are kept: lower-case letters, digits and ``._/-``.

    Args:
        identity: Of the engine.
        parts: Further levels, for instance a ``rank_tag``.

    Returns:
        The model's name and 32 hexadecimal digits of the digest, then the parts, with slashes between.
    """
    return "/".join([f"{identity.name}-{identity.digest.hex()[:32]}", *parts])


def _model(model_config: Any, load_config: Any, weights_id: str | None) -> dict[str, Any]:
    """A target or draft model: its weights, its configuration, and how they are read."""
    facts = {
        "weights": weights_identity(model_config, load_config, weights_id),
        "settings": _settings(model_config, _MODEL_SETTINGS),
        "media": _settings(getattr(model_config, "multimodal_config", None), _MEDIA_SETTINGS),
        "loader": plain(getattr(load_config, "model_loader_extra_config", None) or None),
    }
    overrides = getattr(model_config, "hf_overrides", None)
    if callable(overrides) and not str(getattr(overrides, "__module__", "")).startswith("vllm."):
        facts["hf_config"] = _hf_config(model_config)  # what a function of the operator's does shows only here
    rope = _settings(getattr(model_config, "hf_text_config", None), ("rope_parameters", "rope_scaling"))
    if not _LENGTH_DEPENDENT_ROPE.isdisjoint(re.findall(r"\w+", json.dumps(rope))):
        facts["max_model_len"] = getattr(model_config, "max_model_len", None)
    path = getattr(model_config, "hf_config_path", None)
    if path:
        facts["hf_config"] = _hf_config(model_config)
    return facts


def _additional(vllm_config: Any) -> Any:
    """What others read there; a sparse method of ours is told by ``more``, whether it is configured there or not."""
    found = getattr(vllm_config, "additional_config", None) or None
    if isinstance(found, dict):
        return {key: value for key, value in found.items() if key != _SPARSE} or None
    return found


def _hf_config(model_config: Any) -> Any:
    found = plain(getattr(model_config, "hf_config", None))
    return {key: value for key, value in found.items() if key != "_name_or_path"} if isinstance(found, dict) else found


def _draft(vllm_config: Any, weights_id: str | None) -> dict[str, Any] | None:
    """The model that drafts tokens, if it has layers: their KV lies in the same blocks."""
    config = getattr(vllm_config, "speculative_config", None)
    if config is None or getattr(config, "method", None) in _LAYERLESS_DRAFTS:
        return None
    facts = _settings(config, ("method", "num_speculative_tokens", "draft_tensor_parallel_size", "quantization"))
    model = getattr(config, "draft_model_config", None)
    load = getattr(config, "draft_load_config", None) or vllm_config.load_config
    return {**facts, "model": None if model is None else _model(model, load, weights_id)}


def _cache_dtype(cache_config: Any, model_config: Any) -> str:
    """The KV cache's dtype under one name: workers rename ``fp8`` to what the attention backend makes of it."""
    dtype = str(getattr(cache_config, "cache_dtype", "auto"))
    if dtype == "auto":
        return f"auto:{plain(getattr(model_config, 'dtype', None))}"
    return "fp8_e4m3" if dtype in {"fp8", "fp8_ds_mla"} else dtype


def _refuse_private_kv(vllm_config: Any) -> None:
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "the KV cache is scaled by what the engine's first request happened to contain, so no other engine can "
            "read its blocks",
            where="calculate_kv_scales",
            fix="turn it off, and use the scales of the checkpoint",
        )
    if getattr(vllm_config.model_config, "is_diffusion", False):
        raise ConfigError(
            "the model computes later tokens together with earlier ones, so a prefix does not determine its KV",
            where=f"model {vllm_config.model_config.model}",
            fix="serve this model without the UCM connector",
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ConfigError(
            "the engine's weights are replaced while it runs, so its blocks cannot be told apart",
            where="weight_transfer_config",
            fix="serve without the UCM connector while weights are transferred",
        )


def _settings(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Those settings that are there and say something."""
    found = {name: plain(getattr(config, name, None)) for name in names}
    return {name: value for name, value in found.items() if value is not None and value not in ({}, [], "")}


def _readable(model: str) -> str:
    name = re.sub(r"[^a-z0-9._-]+", "-", PurePath(model).name.lower()).strip("-._")
    return name[:40].rstrip("-._") or "model"
