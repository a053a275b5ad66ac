"""Identify a model's weights by the whole contents of their files."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.errors import UcmError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
#: Files that affect texts, but not the KV of given tokens.
_TEXT_ONLY = re.compile(r"tokenizer|vocab|merges|special_tokens|added_tokens|chat_template")
_COMMIT = re.compile(r"[0-9a-f]{40}")
#: One of several files of a GGUF model.
_GGUF_PART = re.compile(r"(.+)-\d{5}-of-(\d{5}\.gguf)")
#: Directories beside the weights from which models of vLLM load some more: Kimi-Audio's.
_SUBFOLDERS = ("whisper-large-v3",)
#: Settings of models that name other models whose weights are loaded as well: Ultravox's.
_OTHER_MODELS = ("audio_model_id", "text_model_id")


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
    model = str(getattr(model_config, "model", ""))
    load_format = getattr(load_config, "load_format", "auto")
    load_format = str(getattr(load_format, "value", load_format))
    facts: dict[str, Any] = {"load_format": load_format}
    commit = None if Path(model).exists() or _uses_modelscope() else _hub_commit(model, model_config)
    place = _snapshot(model, commit, load_config) or Path(model)
    if not place.exists() or (commit is not None and not (place / "config.json").exists()):
        facts |= {"repository": model, "commit": commit}
    files = {file.name: file for file in _descriptions(place)} | _code_elsewhere(model_config, model)
    if load_format == "dummy":
        facts |= {"random": int(getattr(model_config, "seed", 0) or 0), "torch": _version("torch")}
        return Weights(facts, files)
    if stated is not None:
        return Weights(facts | {"stated": stated}, files)
    if load_format not in _FILE_FORMATS:
        raise _unknown(f"UCM cannot find the files of weights in the format {load_format!r}", model)
    if getattr(model_config, "model_weights", ""):
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
    if commit != getattr(model_config, "revision", None):
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
    config = getattr(model_config, "hf_config", None)
    for name in (str(getattr(config, setting, None) or "") for setting in _OTHER_MODELS):
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
    return (file for file in sorted(files) if not _TEXT_ONLY.match(file.name))


def _code_elsewhere(model_config: Any, model: str) -> dict[str, Path]:
    """Return Python files of other repositories whose code the model runs: ``auto_map`` has ``repo--module``.

    Raises:
        WeightsUnknownError: The files are not in the hub's cache.
    """
    auto_map = getattr(getattr(model_config, "hf_config", None), "auto_map", None)
    if not getattr(model_config, "trust_remote_code", False) or not isinstance(auto_map, dict):
        return {}
    files: dict[str, Path] = {}
    for name in sorted({str(of) for part, of in auto_map.items() if part.startswith(("AutoConfig", "AutoModel"))}):
        repository, dashes, module = name.partition("--")
        if not dashes or repository == model:
            continue
        try:
            hub = importlib.import_module("huggingface_hub")  # installed with vLLM
            file = f"{module.split('.')[0]}.py"
            revision = getattr(model_config, "code_revision", None)
            found = hub.try_to_load_from_cache(repository, file, revision=revision)
        except Exception:  # noqa: BLE001 - the hub raises errors of many classes; all mean that the file is unknown
            found = None
        if not isinstance(found, str):
            raise _unknown("the model runs code of a repository that is not in the hub's cache", name)
        files |= {f"{repository}--{of.name}": of for of in sorted(Path(found).parent.glob("*.py"))}
    return files


def _snapshot(repository: str, commit: str | None, load_config: Any) -> Path | None:
    """Return the directory of a repository's files, with its weights, in the hub's cache; None if there is none."""
    if commit is None:
        return None
    try:
        hub = importlib.import_module("huggingface_hub")  # installed with vLLM
        folder = getattr(load_config, "download_dir", None)
        found = hub.try_to_load_from_cache(repository, "config.json", revision=commit, cache_dir=folder)
        # A directory of the operator's has the weights, but not the configuration.
        place = Path(found).parent if isinstance(found, str) else _in_folder(folder, repository, commit)
    except Exception:  # noqa: BLE001 - the hub raises errors of many classes; all mean that the file is unknown
        return None
    return place if place is not None and place.is_dir() and _weight_files(place) else None


def _in_folder(folder: str | None, repository: str, commit: str) -> Path | None:
    """Return where the hub's client puts a repository's files in a directory of the operator's."""
    return Path(folder) / f"models--{repository.replace('/', '--')}" / "snapshots" / commit if folder else None


def _uses_modelscope() -> bool:
    """Return whether vLLM downloads models from ModelScope: a repository of that name in the hub is another one."""
    return os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in {"1", "true"}


def _hub_commit(repository: str, model_config: Any) -> str | None:
    """Return the commit of a hub repository that the engine serves, from vLLM or from the hub's cache."""
    revision = getattr(model_config, "revision", None)
    if _COMMIT.fullmatch(revision or ""):
        return str(revision)
    known = getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)
    if known and not getattr(model_config, "hf_config_path", None):  # otherwise it is another repository's commit
        return str(known)
    return _cached_commit(repository, revision)


def _cached_commit(repository: str, revision: str | None) -> str | None:
    """Return the commit of a revision in the hub's cache."""
    try:
        hub = importlib.import_module("huggingface_hub")  # installed with vLLM
        cached = hub.try_to_load_from_cache(repository, "config.json", revision=revision)
    except Exception:  # noqa: BLE001 - the hub raises errors of many classes; all mean that the file is unknown
        return None
    return next((part for part in Path(str(cached)).parts if _COMMIT.fullmatch(part)), None)


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
