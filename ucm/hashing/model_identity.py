"""Compute a digest of everything that two engines must have in common to share KV blocks.

Model code may have changed the Hugging Face configuration and the KV-cache dtype in its ``VllmConfig`` by the time that
we read it, in some processes and not in others. So only facts are used that neither change after the start nor differ
by rank: the configuration is identified by its files and by the operator's overrides of them, from which vLLM derives
the rest in a way that is fixed per release.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from importlib import metadata
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ucm.compat import device_type, optional
from ucm.errors import ConfigError, UcmError
from ucm.hashing.file_contents import changed_since, configuration_since
from ucm.hashing.request_hasher import frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: Loaders that read the files beside ``config.json``, and nothing else.
_FILE_FORMATS = frozenset(
    {
        *("auto", "hf", "pt", "safetensors", "npcache", "mistral", "gguf", "bitsandbytes", "sharded_state"),
        *("runai_streamer", "runai_streamer_sharded", "fastsafetensors", "instanttensor"),
    }
)
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".npz"})
#: Files that define how the weights become a model: configurations, and remote code.
_DESCRIPTIONS = frozenset({".json", ".py"})
#: Files that affect texts, but not the KV of given tokens. Code counts whatever its name.
_TEXT_ONLY = re.compile(r"(tokenizer|vocab|merges|special_tokens|added_tokens|chat_template).*\.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: One of several files of a GGUF model.
_GGUF_PART = re.compile(r"(.+)-\d{5}-of-(\d{5}\.gguf)")
#: Directories beside the weights from which models of vLLM load some more: Kimi-Audio's.
_SUBFOLDERS = ("whisper-large-v3",)
#: Settings of models that name other models whose weights are loaded as well: Ultravox's.
_OTHER_MODELS = ("audio_model_id", "text_model_id")

#: Must change whenever the facts, or their form, or that of the keys in the namespace change.
FORMAT = "ucm.model-identity/6"

_MODEL_SETTINGS = (
    *("dtype", "quantization", "quantization_config", "override_attention_dtype", "disable_sliding_window"),
    *("hf_overrides", "rope_scaling", "rope_theta", "override_generation_config", "mm_processor_kwargs"),
    *("model_impl", "model_class_overrides", "config_format", "trust_remote_code", "code_revision"),
    *("runner_type", "convert_type", "use_mla"),
)
_MEDIA_SETTINGS = (
    *("language_model_only", "mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method"),
    *("mm_encoder_attn_backend", "mm_encoder_attn_dtype", "mm_device_do_normalize"),
)
#: The setting that names a file of scales for the vision tower's attention in FP8.
_MEDIA_SCALES = "mm_encoder_fp8_scale_path"
_CACHE_SETTINGS = (
    *("kv_cache_dtype_skip_layers", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode"),
    *("swa_bounded_replay", "use_replayssm", "kv_sharing_fast_prefill"),
)
_ATTENTION_SETTINGS = (
    *("backend", "backend_per_kind", "flash_attn_version", "use_trtllm_attention", "mla_prefill_backend"),
    *("use_prefill_decode_attention", "use_prefill_query_quantization", "disable_flashinfer_q_quantization"),
    *("indexer_kv_dtype", "indexer_sparse_logits", "use_fp4_indexer_cache", "use_non_causal", "sparse_mla_force_mqa"),
    *("minimax_m3_msa_decode_backend", "hisparse_config"),
)
_KERNEL_SETTINGS = ("moe_backend", "linear_backend", "linear_backend_per_quant", "sparse_indexer_topk_backend")
_LOADER_SETTINGS = ("model_loader_extra_config", "ignore_patterns")
#: Our key in vLLM's ``additional_config``.
_SPARSE = "ucm_sparse_config"
#: Draft methods without layers, and hence without KV.
_LAYERLESS_DRAFTS = frozenset({"ngram", "ngram_gpu", "suffix", "custom_class"})
#: RoPE types whose angles depend on the model length that is served.
_LENGTH_DEPENDENT_ROPE = frozenset({"longrope", "su", "dynamic"})


class WeightsUnknownError(UcmError):
    """The weights that an engine serves cannot be identified, so its blocks must not be shared."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights and configuration.

    Args:
        facts: Plain values known without reading: the loader's format, a hub commit, a seed, a stated name.
        files: The files that are identified by content, by name.
    """

    facts: dict[str, Any]
    files: dict[str, Path] = field(default_factory=dict)


def find_weights(model_config: Any, load_config: Any, stated: str | None = None) -> Weights:
    """Return the facts and files that identify a model's weights and its configuration.

    Args:
        model_config: vLLM's ``ModelConfig``.
        load_config: vLLM's ``LoadConfig``.
        stated: The operator's own name for the weights, trusted in place of their files.

    Raises:
        WeightsUnknownError: Neither the files nor a commit can be found.
    """
    model = str(optional(model_config, "model", ""))
    load_format = optional(load_config, "load_format", "auto")
    load_format = str(optional(load_format, "value", load_format))
    facts: dict[str, Any] = {"load_format": load_format}
    commit = None if Path(model).exists() or _uses_modelscope() else _hub_commit(model, model_config)
    place = _snapshot(model, commit, load_config) or Path(model)
    if not place.exists() or (commit is not None and not (place / "config.json").exists()):
        facts |= {"repository": model, "commit": commit}
    files = {file.name: file for file in _descriptions(place)} | _code_elsewhere(model_config, model)
    if load_format == "dummy":
        facts |= {"random": int(optional(model_config, "seed", 0) or 0), "torch": _version("torch")}
        return Weights(facts, files)
    if stated is not None:
        return Weights(facts | {"stated": stated}, files)
    if load_format not in _FILE_FORMATS:
        raise _unknown(f"UCM cannot find the files of weights in the format {load_format!r}", model)
    if optional(model_config, "model_weights", ""):
        raise _unknown("the weights are in object storage, which UCM cannot read", str(model_config.model_weights))
    files |= _weights_elsewhere(model_config, load_config)
    if place.exists():
        found = _weight_files(place)
        if not found:
            raise _unknown("there are no weights in this directory", str(place))
        root = place if place.is_dir() else place.parent
        return Weights(facts, files | {file.relative_to(root).as_posix(): file for file in found})
    if commit is None:
        raise _unknown("the model is neither a directory nor a hub repository whose commit is known", model)
    if commit != optional(model_config, "revision"):
        raise _unknown("the weights are not in the hub's cache beside the configuration, so they may be newer", model)
    return Weights(facts, files)


def _weight_files(place: Path) -> list[Path]:
    if place.is_file():
        return sorted({place, *_gguf_parts(place)})
    places = (place, *(place / name for name in _SUBFOLDERS if (place / name).is_dir()))
    return sorted(file for one in places for file in one.iterdir() if file.suffix in _WEIGHTS and file.is_file())


def _gguf_parts(file: Path) -> Iterator[Path]:
    """Yield the files that vLLM loads with a GGUF file: its other parts, and a vision tower's."""
    part = _GGUF_PART.fullmatch(file.name)
    for other in file.parent.glob("*.gguf"):
        same = _GGUF_PART.fullmatch(other.name)
        if "mmproj" in other.name or (part is not None and same is not None and same.groups() == part.groups()):
            yield other


def _weights_elsewhere(model_config: Any, load_config: Any) -> dict[str, Path]:
    """Return the files of other models whose weights this one loads.

    Raises:
        WeightsUnknownError: They are neither in a directory nor in the hub's cache.
    """
    files: dict[str, Path] = {}
    config = optional(model_config, "hf_config")
    for name in (str(optional(config, setting) or "") for setting in _OTHER_MODELS):
        if not name:
            continue
        place = Path(name)
        if not place.is_dir():
            place = _snapshot(name, _cached_commit(name, None), load_config) or place
        if not place.is_dir():
            raise _unknown("the model loads weights of another model, which is not in the hub's cache", name)
        files |= {f"{name}--{file.name}": file for file in _weight_files(place)}
    return files


def _descriptions(directory: Path) -> Iterator[Path]:
    there = directory.iterdir() if directory.is_dir() else ()
    files = (file for file in there if file.suffix in _DESCRIPTIONS and file.is_file())
    return (file for file in sorted(files) if not _TEXT_ONLY.fullmatch(file.name))


def _code_elsewhere(model_config: Any, model: str) -> dict[str, Path]:
    """Return Python files of other repositories whose code the model runs: ``auto_map`` has ``repo--module``.

    Raises:
        WeightsUnknownError: The files are not in the hub's cache.
    """
    auto_map = optional(model_config, "hf_config.auto_map")
    if not optional(model_config, "trust_remote_code", False) or not isinstance(auto_map, dict):
        return {}
    files: dict[str, Path] = {}
    for name in sorted({str(of) for part, of in auto_map.items() if part.startswith(("AutoConfig", "AutoModel"))}):
        repository, dashes, module = name.partition("--")
        if not dashes or repository == model:
            continue
        found = _cached(repository, f"{module.split('.')[0]}.py", optional(model_config, "code_revision"))
        if found is None:
            raise _unknown("the model runs code of a repository that is not in the hub's cache", name)
        files |= {f"{repository}--{of.name}": of for of in sorted(found.parent.glob("*.py"))}
    return files


def _snapshot(repository: str, commit: str | None, load_config: Any) -> Path | None:
    """Return the directory of a repository's files, with its weights, in the hub's cache; None if there is none."""
    if commit is None:
        return None
    folder = optional(load_config, "download_dir")
    found = _cached(repository, "config.json", commit, folder)
    # A directory of the operator's has the weights, but not the configuration.
    snapshot = f"models--{repository.replace('/', '--')}/snapshots/{commit}"
    place = found.parent if found is not None else Path(folder) / snapshot if folder else None
    return place if place is not None and place.is_dir() and _weight_files(place) else None


def _uses_modelscope() -> bool:
    """Return whether vLLM downloads models from ModelScope: a repository of that name in the hub is another one."""
    return os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in {"1", "true"}


def _hub_commit(repository: str, model_config: Any) -> str | None:
    """Return the commit of a hub repository that the engine serves, from vLLM or from the hub's cache."""
    revision = optional(model_config, "revision")
    if _COMMIT.fullmatch(revision or ""):
        return str(revision)
    known = optional(model_config, "hf_config._commit_hash")
    if known and not optional(model_config, "hf_config_path"):  # otherwise it is another repository's commit
        return str(known)
    return _cached_commit(repository, revision)


def _cached_commit(repository: str, revision: str | None) -> str | None:
    """Return the commit of a revision in the hub's cache."""
    found = _cached(repository, "config.json", revision)
    return next((part for part in (found.parts if found else ()) if _COMMIT.fullmatch(part)), None)


def _cached(repository: str, file: str, revision: str | None, folder: str | None = None) -> Path | None:
    """Return a file of a repository in the hub's cache, or in a folder of the same form; None if it is not there."""
    try:
        hub = importlib.import_module("huggingface_hub")  # installed with vLLM
        found = hub.try_to_load_from_cache(repository, file, revision=revision, cache_dir=folder)
    except Exception:  # noqa: BLE001 - the hub raises errors of many classes; all mean that the file is unknown
        return None
    return Path(found) if isinstance(found, str) else None


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _unknown(what: str, where: str) -> WeightsUnknownError:
    return WeightsUnknownError(
        what,
        where=where,
        fix="serve the model from a local directory or a hub revision, or name the weights yourself with `weights_id`",
    )


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The facts that an engine's KV blocks depend on.

    Args:
        name: The model's name, for readers.
        facts: Plain values, also for readers who want to know why two engines do not share blocks.
        unread: Files whose contents belong to the identity but are not among the facts yet, by their role.
    """

    name: str
    facts: dict[str, Any]
    unread: Mapping[str, Path] = field(default_factory=dict)

    @property
    def digest(self) -> bytes:
        """32 bytes over all facts.

        Raises:
            ValueError: Files are still unread.
        """
        if self.unread:
            raise ValueError(f"{len(self.unread)} files are not read yet")
        return self.seed

    @property
    def seed(self) -> bytes:
        """32 bytes over the known facts, which need not include the contents of the files."""
        return hashlib.sha256(frame(self.facts)).digest()

    def with_contents(self, digests: Mapping[Path, str]) -> ModelIdentity:
        """Return the complete identity."""
        files = {name: digests[path] for name, path in self.unread.items()}
        return replace(self, facts={**self.facts, "files": files}, unread={})

    def to_json(self) -> str:
        """Return the facts as stored beside the blocks."""
        return json.dumps({"name": self.name, "digest": self.digest.hex(), **self.facts}, indent=1, sort_keys=True)


def model_identity(
    vllm_config: Any, *, weights_id: str | None = None, more: Mapping[str, Any] | None = None
) -> ModelIdentity:
    """Return the identity of an engine, with the contents of its files still to be read.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        weights_id: The operator's own name for the weights, trusted in place of their files.
        more: Other facts that the blocks depend on, for instance the options of a sparse method.

    Raises:
        ConfigError: The engine is configured so that its KV has no meaning outside its own process.
        WeightsUnknownError: The weights cannot be identified.
    """
    cache = vllm_config.cache_config
    model = vllm_config.model_config
    _refuse_private_kv(vllm_config)
    unread: dict[str, Path] = {}
    facts = {
        "format": FORMAT,
        "vllm": vllm_release(),
        "packages": packages(model),
        "model": _model("model", model, vllm_config.load_config, weights_id, unread),
        "cache": {"cache_dtype": _cache_dtype(cache, model), **_settings(cache, _CACHE_SETTINGS)},
        "attention": _settings(optional(vllm_config, "attention_config"), _ATTENTION_SETTINGS),
        "kernels": _settings(optional(vllm_config, "kernel_config"), _KERNEL_SETTINGS),
        "draft": _draft(vllm_config, weights_id, unread),
        "platform": platform_facts(vllm_config),
        "additional_config": plain(_additional(vllm_config)),
        "more": plain(dict(more or {})),
    }
    return ModelIdentity(name=_readable(str(model.model)), facts=facts, unread=unread)


def namespace(identity: ModelIdentity) -> str:
    """Return the namespace of an identity's blocks: the model's name, and 32 hexadecimal digits of the digest."""
    return f"{identity.name}-{identity.digest.hex()[:32]}"


def _model(
    role: str, model_config: Any, load_config: Any, weights_id: str | None, unread: dict[str, Path]
) -> dict[str, Any]:
    """Return the facts of a target or draft model: weights, configuration and loading; add its files to ``unread``."""
    weights = find_weights(model_config, load_config, weights_id)
    unread.update({f"{role}/{name}": path for name, path in weights.files.items()})
    media = optional(model_config, "multimodal_config")
    scales = optional(media, _MEDIA_SCALES)
    if scales:
        unread[f"{role}/{_MEDIA_SCALES}"] = Path(scales)
    facts: dict[str, Any] = {
        "weights": weights.facts,
        "settings": _settings(model_config, _MODEL_SETTINGS),
        "media": _settings(media, _MEDIA_SETTINGS),
        "loader": _settings(load_config, _LOADER_SETTINGS),
    }
    overrides = optional(model_config, "hf_overrides")
    if callable(overrides) and not str(optional(overrides, "__module__", "")).startswith("vllm."):
        facts["hf_config"] = _hf_config(model_config)  # the effect of an operator's function is visible only here
    rope = _settings(optional(model_config, "hf_text_config"), ("rope_parameters", "rope_scaling"))
    if not _LENGTH_DEPENDENT_ROPE.isdisjoint(re.findall(r"\w+", json.dumps(rope))):
        facts["max_model_len"] = optional(model_config, "max_model_len")
    if optional(model_config, "hf_config_path") or _may_be_newer(weights.files.values()):
        facts["hf_config"] = _hf_config(model_config)
    return facts


def _may_be_newer(files: Iterable[Path]) -> bool:
    """Return whether a configuration file may be newer than the configuration that the engine was started with.

    vLLM reads it in the process that starts EngineCore's, earlier than that process may read the weights.
    """
    since = configuration_since()
    return any(path.suffix == ".json" and changed_since(path, since) for path in files)


def _additional(vllm_config: Any) -> Any:
    """Return ``additional_config`` without our sparse method, which ``more`` describes wherever it is configured."""
    found = optional(vllm_config, "additional_config") or None
    if isinstance(found, dict):
        return {key: value for key, value in found.items() if key != _SPARSE} or None
    return found


def _hf_config(model_config: Any) -> Any:
    found = plain(optional(model_config, "hf_config"))
    return {key: value for key, value in found.items() if key != "_name_or_path"} if isinstance(found, dict) else found


def _draft(vllm_config: Any, weights_id: str | None, unread: dict[str, Path]) -> dict[str, Any] | None:
    """Return the facts of the model that drafts tokens, if it has layers: their KV is in the same blocks."""
    config = optional(vllm_config, "speculative_config")
    if config is None or optional(config, "method") in _LAYERLESS_DRAFTS:
        return None
    facts = _settings(config, ("method", "num_speculative_tokens", "draft_tensor_parallel_size", "quantization"))
    model = optional(config, "draft_model_config")
    load = optional(config, "draft_load_config") or vllm_config.load_config
    return {**facts, "model": None if model is None else _model("draft", model, load, weights_id, unread)}


def _cache_dtype(cache_config: Any, model_config: Any) -> str:
    """Return one name for the KV cache's dtype: workers rename ``fp8`` to the attention backend's variant."""
    dtype = str(optional(cache_config, "cache_dtype", "auto"))
    if dtype == "auto":
        return f"auto:{plain(optional(model_config, 'dtype'))}"
    return "fp8_e4m3" if dtype in {"fp8", "fp8_ds_mla"} else dtype


def _refuse_private_kv(vllm_config: Any) -> None:
    if optional(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "the KV cache is scaled by what the engine's first request happened to contain, so no other engine can "
            "read its blocks",
            where="calculate_kv_scales",
            fix="turn it off, and use the scales of the checkpoint",
        )
    if optional(vllm_config.model_config, "is_diffusion", False):
        raise ConfigError(
            "the model computes later tokens together with earlier ones, so a prefix does not determine its KV",
            where=f"model {vllm_config.model_config.model}",
            fix="serve this model without the UCM connector",
        )


def _settings(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings that exist in this release and are not empty."""
    found = {name: plain(optional(config, name)) for name in names}
    return {name: value for name, value in found.items() if value is not None and value not in ({}, [], "")}


def _readable(model: str) -> str:
    name = re.sub(r"[^a-z0-9._-]+", "-", PurePath(model).name.lower()).strip("-._")
    return name[:40].rstrip("-._") or "model"


_DEPTH = 24


def plain(value: Any, depth: int = _DEPTH) -> Any:
    """Return a value without anything that depends on the process: no addresses, no order of sets.

    Args:
        value: A setting of vLLM: numbers, texts, collections, enumerations, dataclasses, torch dtypes, callables.
        depth: How many levels to follow.

    Returns:
        None, bools, numbers, texts, lists and dicts of those.
    """
    inner = functools.partial(plain, depth=depth - 1)
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if depth == 0:
        return _name(type(value))
    if isinstance(value, Mapping):
        return {str(inner(key)): inner(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [inner(item) for item in value]
        return items if isinstance(value, list | tuple) else sorted(items, key=repr)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: inner(getattr(value, field.name, None)) for field in fields(value)}
    return _object(value, inner)


def _object(value: Any, inner: Callable[[Any], Any]) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str | bytes | PurePath) or type(value).__module__ in {
        "torch",
        "numpy",
    }:  # dtypes, devices, numbers
        return str(value)
    if isinstance(value, functools.partial):
        return inner([value.func, value.args, value.keywords])
    if callable(value):
        return _name(value)
    to_dict = getattr(value, "to_dict", None)
    return inner(to_dict() if callable(to_dict) else {"type": _name(type(value)), **getattr(value, "__dict__", {})})


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


#: Instruction sets by which vLLM's CPU backend, or torch's, chooses the packing of KV inside a block.
_CPU_FLAGS = ("amx_tile", "amx_bf16", "avx512f", "avx512_bf16", "avx2", "bf16", "sve", "asimd")
#: Packages from which vLLM takes kernels if they are installed, and which affect its choice of a layout.
_KERNELS = ("triton", "flashinfer-python", "flash-attn", "xformers", "amd-aiter")
#: The entry points of vLLM's plug-ins, which may register models, layers and kernels.
_PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
#: The overlay changes nothing without a sparse method, and sparse methods are separate facts.
_OURS = frozenset({"ucm-vllm-overlay", "ucm-vllm-ascend-overlay", "ucm-runtime"})
#: Variables by which an operator chooses kernels, precisions or a layout outside the configuration: by their words,
#: because every release has others.
_VARIABLES = re.compile(
    r"VLLM_.*(ATTENTION|BACKEND|LAYOUT|PARTITION|MLA|MOE|QUANT|FP4|FP8|INT4|INT8|DTYPE|PRECISION|INVARIANT|KERNEL|GEMM"
    r"|AITER|AWQ|MARLIN|HUMMING|SGL|FLASH_ATTN|FLASHINFER|EMULATION|F16_ACCUM|HW_AGNOSTIC)"
)
#: Variables with such words that only concern speed, memory or where files are.
_HARMLESS = re.compile(
    r"WARMUP|PADDING|CACHE_DIR|VIDEO|SAMPLER|BUFFER_SIZE|ALLREDUCE|ALLOW_CHUNKED|DP_PACK|RAY_|STREAM"
)
#: The variable that names the plug-ins that vLLM loads; without it, it loads all.
_PLUGINS = "VLLM_PLUGINS"


def vllm_release() -> str:
    """Return the version of the vLLM in this process, or of the installed one; empty if there is none."""
    loaded = optional(sys.modules.get("vllm"), "__version__")
    return str(loaded) if loaded else _version("vllm")


def packages(model_config: Any) -> dict[str, str]:
    """Return the versions of packages beside vLLM that compute KV: kernels, plug-ins, and transformers if used."""
    found = {}
    for name in (*_KERNELS, *(("transformers",) if _runs_transformers(model_config) else ())):
        if version := _version(name):
            found[name] = version
    named = os.environ.get(_PLUGINS)
    for group in _PLUGIN_GROUPS:
        for point in metadata.entry_points(group=group):
            if named is not None and point.name not in named.split(","):
                continue
            package = point.dist
            name = str(package.name or point.name) if package is not None else point.name
            if name not in _OURS:
                found[f"plugin {name}"] = str(package.version) if package is not None else ""
    return found


def _runs_transformers(model_config: Any) -> bool:
    """Return whether the model's code is transformers', by the operator's choice or because vLLM has none."""
    architecture = str(optional(model_config, "architecture", ""))  # what vLLM resolved ``model_impl`` to
    implementation = optional(model_config, "model_impl", "")
    return (
        architecture.startswith("Transformers") or optional(implementation, "value", implementation) == "transformers"
    )


def platform_facts(vllm_config: Any) -> dict[str, Any]:
    """Return the device type with the facts that its kernels depend on, and the variables that choose layouts."""
    kind = device_type(vllm_config)
    facts: dict[str, Any] = {
        "device": kind,
        "environment": {
            name: value
            for name, value in os.environ.items()
            if value and _VARIABLES.match(name) and not _HARMLESS.search(name)
        },
    }
    if kind == "cpu":
        return facts | {"machine": platform.machine(), "instructions": _instructions()}
    current = optional(sys.modules.get("vllm.platforms"), "current_platform")
    capability = optional(current, "get_device_capability", lambda: None)()
    # ROCm's devices are "cuda" as well, and have the same numbers.
    return facts | {"capability": None if capability is None else str(capability), "platform": type(current).__name__}


def _instructions() -> list[str]:
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            line = next((line for line in file if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        return []
    there = set(line.split())
    return [flag for flag in _CPU_FLAGS if flag in there]
