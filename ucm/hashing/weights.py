"""What a model's weights are, told from their files without reading them all."""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import struct
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
#: Files that say how the weights become a model: configurations, and remote code.
_DESCRIPTIONS = frozenset({".json", ".py"})
#: What shapes texts, not the KV of given tokens.
_TEXT_ONLY = re.compile(r"tokenizer|vocab|merges|special_tokens|added_tokens|chat_template")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_LENGTH = struct.Struct("<Q")
_SAMPLE = 64 << 10
_SMALL_SAMPLE = 2 << 10
_TENSORS = 512
_HEADER_LIMIT = 8 << 20
#: A tensor's place behind the header, as the header has it.
_OFFSETS = re.compile(rb'"data_offsets"\s*:\s*\[\s*(\d+)\s*,\s*(\d+)')


class WeightsUnknownError(UcmError):
    """It cannot be told which weights an engine serves, so its blocks must not be shared."""


def weights_identity(model_config: Any, load_config: Any, stated: str | None = None) -> dict[str, Any]:
    """What names a model's weights and its configuration files.

    Args:
        model_config: vLLM's ``ModelConfig``.
        load_config: vLLM's ``LoadConfig``.
        stated: The operator's own name for the weights, believed in place of the files.

    Returns:
        Plain values: digests of files, or a hub commit, or the seed of random weights.

    Raises:
        WeightsUnknownError: If neither the files nor a commit is in reach.
    """
    model = str(getattr(model_config, "model", ""))
    load_format = getattr(load_config, "load_format", "auto")
    load_format = str(getattr(load_format, "value", load_format))
    facts: dict[str, Any] = {"load_format": load_format}
    directory = Path(model)
    if directory.is_dir():
        facts["config"] = _descriptions(directory)
        commit = _COMMIT.fullmatch(directory.name)
        facts["commit"] = commit[0] if commit and directory.parent.name == "snapshots" else None
    elif not directory.is_file():
        facts |= {"repository": model, "commit": _hub_commit(model, model_config)}
    if load_format == "dummy":
        return facts | {"random": int(getattr(model_config, "seed", 0) or 0), "torch": _version("torch")}
    if stated is not None:
        return facts | {"stated": stated}
    if load_format not in _FILE_FORMATS:
        raise _unknown(f"weights in the format {load_format!r} come from where UCM cannot look", model)
    if getattr(model_config, "model_weights", ""):
        raise _unknown("the weights are in object storage, where UCM cannot look", str(model_config.model_weights))
    if directory.exists():
        files = _weight_files(directory)
        if not files:
            raise _unknown("there are no weights in this directory", model)
        return facts | {"files": {file.name: sampled_digest(file) for file in files}}
    if facts["commit"] is None:
        raise _unknown("the model is neither a directory nor a hub repository whose commit is known", model)
    return facts


def sampled_digest(path: Path) -> str:
    """A digest of a file's size and of samples of its bytes.

    Of any file: 64 KiB at the start, in the middle and at the end. Of a safetensors file also its header, which names
    every tensor with type and shape, and 2 KiB from the middle of each of up to 512 tensors, because training changes a
    tensor everywhere, if at all; of other files 2 KiB in 64 places.

    Args:
        path: The file.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(_LENGTH.pack(size))
        for offset, length in _samples(path, file.fileno(), size):
            digest.update(os.pread(file.fileno(), length, offset))
    return digest.hexdigest()


def _samples(path: Path, descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Where to look: offsets and lengths, a function of the size and of bytes that are looked at before."""
    yield 0, _SAMPLE
    yield max(0, size // 2 - _SAMPLE // 2), _SAMPLE
    yield max(0, size - _SAMPLE), _SAMPLE
    tensors = list(_tensors(descriptor, size)) if path.suffix == ".safetensors" else []
    yield from tensors or ((size * place // 65, _SMALL_SAMPLE) for place in range(1, 65))


def _tensors(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """A safetensors file's header, and the middle of its tensors."""
    if size < _LENGTH.size:
        return
    (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, 0))
    if length > min(size - _LENGTH.size, _HEADER_LIMIT):
        return
    data = _LENGTH.size + length
    spans = [(int(begin), int(end)) for begin, end in _OFFSETS.findall(os.pread(descriptor, length, _LENGTH.size))]
    inside = sorted((begin, end) for begin, end in spans if begin < end <= size - data)
    if inside:
        yield _LENGTH.size, length
    for begin, end in inside[:: len(inside) // _TENSORS + 1]:
        yield data + max(begin, (begin + end - _SMALL_SAMPLE) // 2), min(_SMALL_SAMPLE, end - begin)


def _weight_files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    return sorted(file for file in place.iterdir() if file.suffix in _WEIGHTS and file.is_file())


def _descriptions(directory: Path) -> dict[str, str]:
    files = sorted(f for f in directory.iterdir() if f.suffix in _DESCRIPTIONS and not _TEXT_ONLY.match(f.name))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _hub_commit(repository: str, model_config: Any) -> str | None:
    """The commit of a hub repository that the engine serves: as vLLM knows it, or from the hub's cache."""
    revision = getattr(model_config, "revision", None)
    if _COMMIT.fullmatch(revision or ""):
        return str(revision)
    known = getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)
    if known and not getattr(model_config, "hf_config_path", None):  # else it is another repository's
        return str(known)
    try:
        hub = importlib.import_module("huggingface_hub")  # there where vLLM is
        cached = hub.try_to_load_from_cache(repository, "config.json", revision=revision)
    except Exception:  # noqa: BLE001 - the hub has errors of many families; all mean that it does not know
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
