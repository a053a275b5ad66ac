"""Identify LoRA adapters by content: the same name, or the same path at another time, may mean another adapter."""

from __future__ import annotations

import hashlib
import importlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.errors import UcmError
from ucm.hashing.file_contents import FileContents, process_started
from ucm.hashing.framing import frame

if TYPE_CHECKING:
    from ucm.hashing.file_contents import DigestCache, Digests

_SUFFIXES = frozenset({".json", ".safetensors", ".bin", ".pt"})
#: Bytes of an adapter that are read while the scheduler waits; a larger one is read in the background.
_AT_ONCE = 16 << 20


class AdapterError(Exception):
    """An adapter's weights cannot be identified; the text is the reason."""


class _Adapter:
    """The files of one adapter, read once."""

    def __init__(self, directory: Path, since: float, cache: DigestCache | None) -> None:
        self.files = {path.name: path for path in _files(directory)}
        self._contents = FileContents(since, cache)
        self._digests: Digests | None = None
        self._error: Exception | None = None
        found = self._contents.look_up(self.files.values())
        if sum(path.stat().st_size for path in found.unread) <= _AT_ONCE:
            self._read(found)
        else:
            threading.Thread(target=self._read, args=(found,), name="ucm-adapter", daemon=True).start()

    def digest(self) -> bytes:
        """Return 32 bytes over the names and contents of the files, which must be unchanged since they were read."""
        if self._error is not None:
            raise self._error
        if self._digests is None:
            raise AdapterError("a LoRA adapter is being read; its requests are cached when that is done")
        self._contents.confirm()
        if {path.name for path in _files(next(iter(self.files.values())).parent)} != set(self.files):
            raise AdapterError("files were added or removed since the engine loaded it")
        contents = [[name, self._digests.of[path]] for name, path in sorted(self.files.items())]
        return hashlib.sha256(frame(contents)).digest()

    def _read(self, found: Digests) -> None:
        try:
            self._digests = self._contents.read(found)
        except Exception as error:  # noqa: BLE001 - reported with the next request
            self._error = error


class Adapters:
    """The adapters that this process has seen.

    The engine reads an adapter's files when it is added or first requested, and possibly again later; we read them at
    the first request. So an adapter is identified only if its files have not changed since this process started, nor
    since we read them; or if they are in the hub's cache, where a file's name identifies its content.

    Args:
        shared: What shapes the KV of all adapters' requests, for instance the dtype that adapters are cast to.
        cache: The cache of digests; None for none.
        since: When the engine may have begun to read adapters, in seconds since the epoch; by default the start of this
            process.
        by_name: Whether vLLM identifies adapters by name, so that a request may find another adapter's blocks in vLLM's
            own prefix cache and have them saved.
    """

    def __init__(
        self,
        shared: Any = None,
        cache: DigestCache | None = None,
        since: float | None = None,
        *,
        by_name: bool = False,
    ) -> None:
        self._shared = frame(shared)
        self._cache = cache
        self._since = process_started() if since is None else since
        self._seen: dict[tuple[int, str], _Adapter] = {}
        self._by_name = by_name
        #: The content that each of vLLM's adapter numbers, and each name, stood for; None: more than one.
        self._stood_for: dict[int | str, bytes | None] = {}

    def fingerprint(self, lora_request: Any) -> bytes:
        """Return 32 bytes that identify the adapter's weights and how they are applied.

        Args:
            lora_request: vLLM's ``LoRARequest``.

        Raises:
            AdapterError: The files cannot be read, or may differ from those that the engine has loaded.
        """
        if getattr(lora_request, "tensorizer_config_dict", None):
            raise AdapterError(
                "a LoRA adapter is loaded by tensorizer, so its weights are not in files that we can read"
            )
        number = int(lora_request.lora_int_id)
        if getattr(lora_request, "load_inplace", False):
            self.replaced(number)
            raise AdapterError("a LoRA adapter is loaded in place, so vLLM may read its files again at any step")
        path = getattr(lora_request, "lora_path", "") or getattr(lora_request, "lora_local_path", None) or ""
        key = (number, path)
        try:
            if key not in self._seen:
                self._seen[key] = _Adapter(_directory(path), self._since, self._cache)
            content = self._seen[key].digest()
        except OSError as error:
            raise AdapterError(f"the LoRA adapter {path!r} cannot be read: {error}") from error
        except UcmError as error:
            raise AdapterError(
                f"the files of LoRA adapter {path!r} may not be those that the engine loaded ({error.what}: "
                f"{error.where}); restart the engine, or load it from another path"
            ) from error
        self._stands_for(number, content, f"lora_int_id {number}")
        if self._by_name:
            self._stands_for(str(lora_request.lora_name), content, f"lora_name {lora_request.lora_name!r}")
        how = frame([getattr(lora_request, name, None) for name in ("long_lora_max_len", "is_3d_lora_weight")])
        return hashlib.sha256(frame([self._shared, content, how])).digest()

    def replaced(self, number: int) -> None:
        """Note, permanently, that the engine has replaced an adapter's weights or may do so at any time."""
        self._stood_for[number] = None

    def is_invalidated(self, lora_request: Any) -> bool:
        """Return whether an adapter with a fingerprint may have other weights by now, or stands for several."""
        return self._stood_for.get(int(lora_request.lora_int_id), b"") is None

    def _stands_for(self, sign: int | str, content: bytes, what: str) -> None:
        if self._stood_for.setdefault(sign, content) != content:
            self._stood_for[sign] = None
            raise AdapterError(
                f"{what} was used for different weights, so vLLM may compute with the first ones, or find their "
                "blocks; give each LoRA adapter a name and a number of its own"
            )


def _directory(path: str) -> Path:
    """Return the directory of an adapter, which may be a repository's copy in the hub's cache."""
    local = Path(path).expanduser()
    if path and local.is_dir():
        return local
    try:
        hub = importlib.import_module("huggingface_hub")  # installed with vLLM
        return Path(hub.snapshot_download(path, local_files_only=True))
    except Exception as error:  # the hub raises errors of many classes for an unknown name
        raise OSError(f"it is not a directory, and not in the hub's cache ({error})") from error


def _files(directory: Path) -> list[Path]:
    found = sorted(path for path in directory.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if all(path.suffix == ".json" for path in found):
        raise FileNotFoundError(f"{directory} contains no weights")
    return found
