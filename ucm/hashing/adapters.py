"""LoRA adapters by content: two adapters of one name, or one path at two times, are two adapters."""

from __future__ import annotations

import hashlib
import importlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.hashing.framing import frame

if TYPE_CHECKING:
    from typing import TypeAlias

    #: Per file: name, size, times of change and inode; another one means that the file may have other content.
    Signature: TypeAlias = tuple[tuple[str, int, int, int, int], ...]

_SUFFIXES = frozenset({".json", ".safetensors", ".bin", ".pt"})
_CHUNK = 1 << 20


class AdapterError(Exception):
    """An adapter's weights cannot be told; its text is the reason."""


class Adapters:
    """The adapters that this process has seen.

    The engine reads an adapter's files when it first needs them, we when the first request names it. Files that have
    changed since then are not believed: which of the two contents the engine computes with cannot be known here.

    Args:
        shared: What shapes the KV of every adapter's requests, for instance the dtype that adapters are cast to.
    """

    def __init__(self, shared: Any = None) -> None:
        self._shared = frame(shared)
        self._seen: dict[tuple[int, str], tuple[Signature, bytes]] = {}

    def fingerprint(self, lora_request: Any) -> bytes:
        """32 bytes that name the adapter's weights and how they are applied.

        Args:
            lora_request: vLLM's ``LoRARequest``.

        Raises:
            AdapterError: If the files cannot be read, or changed after they were read first.
        """
        if getattr(lora_request, "tensorizer_config_dict", None):
            raise AdapterError(
                "a LoRA adapter is loaded by tensorizer, so its weights are not in files that we can read"
            )
        path = getattr(lora_request, "lora_path", "") or getattr(lora_request, "lora_local_path", None) or ""
        key = (int(lora_request.lora_int_id), path)
        try:
            directory = _directory(path)
            now = _signature(directory)
            if key not in self._seen:
                self._seen[key] = (now, _content(directory, now))
        except OSError as error:
            raise AdapterError(f"the LoRA adapter {path!r} cannot be read: {error}") from error
        first, content = self._seen[key]
        if now != first:
            raise AdapterError(
                f"the files of LoRA adapter {path!r} have changed since the engine loaded it; restart the engine, or "
                "load it from another path"
            )
        how = frame([getattr(lora_request, name, None) for name in ("long_lora_max_len", "is_3d_lora_weight")])
        return hashlib.sha256(frame([self._shared, content, how])).digest()


def _directory(path: str) -> Path:
    """Where an adapter lies: a directory, or what the hub's cache holds of a repository."""
    local = Path(path).expanduser()
    if path and local.is_dir():
        return local
    try:
        hub = importlib.import_module("huggingface_hub")  # there where vLLM is
        return Path(hub.snapshot_download(path, local_files_only=True))
    except Exception as error:  # the hub raises errors of many families for a name that it does not know
        raise OSError(f"it is no directory, and not in the hub's cache ({error})") from error


def _signature(directory: Path) -> Signature:
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if Path(entry.name).suffix in _SUFFIXES:
                state = entry.stat()
                if stat.S_ISREG(state.st_mode):
                    found.append((entry.name, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino))
    if not any(not name.endswith(".json") for name, *_ in found):
        raise FileNotFoundError(f"{directory} holds no weights")
    return tuple(sorted(found))


def _content(directory: Path, files: Signature) -> bytes:
    digests = []
    for name, *_ in files:
        digest = hashlib.sha256()
        with (directory / name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        digests.append([name, digest.digest()])
    return frame(digests)
