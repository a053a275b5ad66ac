"""Read what shapes a request's KV beside its tokens: LoRA, media, cache salt, prompt embeddings, token types.

Requests of vLLM 0.9.0 to 0.33.0 are supported; a request with unknown content is not cacheable.

A LoRA adapter is identified by its content: the same name, or the same path at another time, may mean another adapter.

A multimodal input has a name, which is vLLM's hash of it or any text that the client chose; the two cannot be told
apart. So the name identifies the input only if the operator says that names can be trusted. Otherwise the data that the
model is given does: the processor's tensors, byte by byte.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.errors import UcmError
from ucm.hashing.file_contents import DigestCache, FileContents, process_started
from ucm.hashing.request_hasher import finds_adapters_by_name, frame
from ucm.integration.vllm.compat import (
    adapter_of,
    adapter_path,
    cache_salt,
    device_type,
    media_inputs,
    optional,
    pooling_inputs,
    prompt_embeds,
)

if TYPE_CHECKING:
    from ucm.hashing.file_contents import Digests

_SUFFIXES = frozenset({".json", ".safetensors", ".bin", ".pt"})
#: Bytes of an adapter that are read while the scheduler waits; a larger one is read in the background.
_AT_ONCE = 16 << 20

#: vLLM's name of a multimodal input that it hashed: a hexadecimal digest of 256 or 512 bits, after the name of a LoRA
#: if the vision tower has one. A client may choose such a name, too.
_HASHED = re.compile(r"(?:.*:)?([0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)

#: Names of multimodal inputs to remember; vLLM keeps far fewer encodings.
_NAMES = 50_000

#: The arguments of ``Request`` in all known releases. Those that shape KV are read below.
_KNOWN_FIELDS = frozenset(
    {
        *("self", "request_id", "client_index", "arrival_time", "priority", "trace_headers", "session_id", "kv_hints"),
        *("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", "lora_request", "cache_salt"),
        *("mm_features", "multi_modal_inputs", "multi_modal_kwargs", "multi_modal_hashes", "multi_modal_placeholders"),
        *("sampling_params", "pooling_params", "eos_token_id", "structured_output_request", "block_hasher"),
        *("resumable", "reasoning_ended", "reasoning_parser_kwargs", "abort_immediately"),
    }
)


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
        if optional(lora_request, "tensorizer_config_dict"):
            raise AdapterError(
                "a LoRA adapter is loaded by tensorizer, so its weights are not in files that we can read"
            )
        number = int(lora_request.lora_int_id)
        if optional(lora_request, "load_inplace", False):
            self.replaced(number)
            raise AdapterError("a LoRA adapter is loaded in place, so vLLM may read its files again at any step")
        path = adapter_path(lora_request)
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
        how = frame([optional(lora_request, name) for name in ("long_lora_max_len", "is_3d_lora_weight")])
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


class NotCacheableError(Exception):
    """A request's content cannot be identified; the text is the reason."""


#: The digest of a multimodal input's data, or the reason why it has none.
Digest = bytes | NotCacheableError


@dataclass(frozen=True, slots=True)
class Media:
    """A multimodal input.

    Args:
        start: The first token of its placeholder.
        identity: The encoded content of the input and the length of its placeholder.
    """

    start: int
    identity: bytes


@dataclass(frozen=True, slots=True)
class RequestContent:
    """A request's content beside its tokens; the ``BlockExtra`` of a RequestHasher.

    Args:
        salt: The request's ``cache_salt``, or None.
        adapter: The fingerprint of its LoRA adapter, or None.
        token_types: The encoded token types of a pooling request, or None.
        media: Its multimodal inputs, by their first token.
        embeds: The bytes of its prompt embeddings, uint8[tokens, bytes of a row], or None.
        embeds_dtype: Their dtype's name.
        embeds_mask: One byte for each prompt token, 1 where the token is used and not its embedding; empty if all are
            embeddings.
    """

    salt: str | None = None
    adapter: bytes | None = None
    token_types: bytes | None = None
    media: tuple[Media, ...] = ()
    embeds: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    embeds_dtype: str = ""
    embeds_mask: bytes = b""

    @property
    def is_text(self) -> bool:
        """Whether there are only tokens and at most a salt."""
        return self.adapter is None and self.token_types is None and not self.media and self.embeds is None

    @property
    def root(self) -> bytes:
        """The content that shapes the KV from the first token on; empty if there is none."""
        parts = [self.salt, self.adapter, self.token_types, self.embeds_dtype]
        return frame(parts) if any(parts) else b""

    @property
    def first_block_token(self) -> int | None:
        """The first token from which blocks may have content of their own; None if no block has."""
        if self.embeds is not None:
            return 0
        return self.media[0].start if self.media else None

    def between(self, start: int, end: int) -> bytes:
        """Return the encoded inputs that begin from token ``start`` to ``end``, and the embeddings there."""
        media = [[item.start, item.identity] for item in self.media if start <= item.start < end]
        rows = None
        if self.embeds is not None:
            rows = hashlib.sha256(self.embeds[start:end].tobytes()).digest()
        mask = self.embeds_mask[start:end]
        return frame([media, rows, mask]) if media or rows is not None else b""


class ContentReader:
    """Reads the content of requests.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        trust_media_names: Whether the names of multimodal inputs are trusted in place of their data.
    """

    def __init__(self, vllm_config: Any, *, trust_media_names: bool = False) -> None:
        lora = optional(vllm_config, "lora_config")
        self._mixes_adapters = lora is not None and device_type(vllm_config) == "cpu"
        names = (
            *("lora_dtype", "long_lora_scaling_factors", "lora_extra_vocab_size", "bias_enabled", "target_modules"),
            *("enable_tower_connector_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
        )
        shared = {name: str(optional(lora, name)) for name in names}
        self.adapters = Adapters(shared, DigestCache(), by_name=lora is not None and finds_adapters_by_name())
        self._trust_names = trust_media_names
        self._names_are_hashes = _names_are_hashes(vllm_config)
        #: The content of each name. vLLM keeps an input's encoding by its name, whatever data comes with it later.
        self._named: OrderedDict[str, bytes] = OrderedDict()
        self._unknown_fields: dict[type, tuple[str, ...]] = {}

    def is_same(self, request: Any, content: RequestContent) -> bool:
        """Return whether a request's adapter is unchanged, so that the engine has computed with it."""
        if content.adapter is None:
            return True
        try:
            return self.adapters.fingerprint(request.lora_request) == content.adapter
        except AdapterError:
            return False

    def data_of(self, request: Any) -> list[Any]:
        """Return the data that `read` hashes: that of each multimodal input, unless names count."""
        return [] if self._trust_names else [data for _, _, data, _ in media_inputs(request)]

    def read(self, request: Any, digests: Sequence[Digest] | None = None) -> RequestContent:
        """Return the content of a request.

        Args:
            request: vLLM's ``Request``.
            digests: The digests of `data_of`; computed here if None.

        Raises:
            NotCacheableError: The request has content that cannot be identified.
        """
        kind = type(request)
        if kind not in self._unknown_fields:
            parameters = inspect.signature(kind.__init__).parameters
            named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            unknown = (n for n, p in parameters.items() if p.kind in named and n not in _KNOWN_FIELDS)
            self._unknown_fields[kind] = tuple(unknown)
        for name in self._unknown_fields[kind]:
            if getattr(request, name, None):
                raise NotCacheableError(f"this vLLM release gives requests {name!r}, which UCM does not know")
        embeds, mask = prompt_embeds(request)
        return RequestContent(
            salt=cache_salt(request) or None,
            adapter=self._adapter(request),
            token_types=_token_types(request),
            media=self._media(request, digests),
            embeds=None if embeds is None else _rows(embeds),
            embeds_dtype="" if embeds is None else str(embeds.dtype),
            embeds_mask=b"" if embeds is None or mask is None else bytes(map(bool, mask)),
        )

    def _adapter(self, request: Any) -> bytes | None:
        lora_request = adapter_of(request)
        if lora_request is None:
            if self._mixes_adapters:
                raise NotCacheableError(
                    "on a CPU, vLLM computes a request without a LoRA adapter with the adapter of another request "
                    "in the same step"
                )
            return None
        try:
            return self.adapters.fingerprint(lora_request)
        except AdapterError as error:
            raise NotCacheableError(str(error)) from error

    def _media(self, request: Any, digests: Sequence[Digest] | None) -> tuple[Media, ...]:
        media = []
        for number, (modality, name, data, at) in enumerate(media_inputs(request)):
            if self._trust_names:
                content: str | bytes = self._by_name(name)
            else:
                content = self._by_data(name, digest_of(data) if digests is None else digests[number])
            is_embed = optional(at, "is_embed")
            mask = None if is_embed is None else _rows(is_embed).tobytes()
            media.append(Media(int(at.offset), frame([modality, content, int(at.length), mask])))
        return tuple(sorted(media, key=lambda item: item.start))

    def _by_name(self, name: str | None) -> str:
        hashed = _HASHED.fullmatch(name or "")
        if hashed is None or not self._names_are_hashes:
            raise NotCacheableError(
                "a multimodal input has a name in place of a hash of its content: a client gave it one, or vLLM hashes "
                "no inputs because prefix caching and mm_processor_cache_gb are both off"
            )
        return hashed[1]

    def _by_data(self, name: str | None, content: Digest) -> bytes:
        if isinstance(content, NotCacheableError):
            raise content
        if name:
            if self._named.setdefault(name, content) != content:
                raise NotCacheableError(
                    "a multimodal input has the name of another one, and vLLM may compute with the other's encoding"
                )
            self._named.move_to_end(name)
            if len(self._named) > _NAMES:
                self._named.popitem(last=False)
        return content


def digest_of(data: Any) -> Digest:
    """Hash the data of a multimodal input, at about a millisecond per megabyte, mostly without the GIL.

    Returns:
        Its SHA-256, or the reason why it has none.
    """
    if data is None:
        return NotCacheableError(
            "a multimodal input comes without its data, so only its name is known; `trust_media_names` accepts names"
        )
    digest = hashlib.sha256()
    try:
        if _digest_data(digest, data):
            return digest.digest()
    except NotCacheableError as error:
        return error
    return NotCacheableError(
        "a multimodal input comes with a reference in place of its data (mm_processor_cache_type: shm), and in "
        "another engine the same reference may mean another input; mm_processor_cache_type: lru passes data, and "
        "`trust_media_names` accepts names"
    )


def _names_are_hashes(vllm_config: Any) -> bool:
    """Return whether vLLM names multimodal inputs by their content; with all its caches off, it numbers them."""
    if optional(vllm_config, "cache_config.enable_prefix_caching", False):
        return True
    for holder in ("model_config.multimodal_config", "model_config"):
        size = optional(vllm_config, f"{holder}.mm_processor_cache_gb")
        if size is not None:
            return bool(size > 0)
    return True  # up to 0.10.0 an input is hashed or has no identifier at all


def _token_types(request: Any) -> bytes | None:
    """Return the additional inputs of a pooling request, for instance BERT's token types, encoded."""
    told = pooling_inputs(request)
    if not told:
        return None
    try:
        return frame(told)
    except TypeError as error:
        raise NotCacheableError(f"a pooling request's extra_kwargs: {error}") from error


def _digest_data(digest: Any, data: Any) -> bool:
    """Digest the processor's output for an input: tensors in mappings and lists, with or without vLLM's wrappers.

    Returns:
        Whether it contains a tensor. If not, it only refers to data elsewhere.

    Raises:
        NotCacheableError: It contains anything else.
    """
    if isinstance(data, Mapping):
        digest.update(b"m%d:" % len(data))
        found = []
        for key in sorted(data, key=str):
            digest.update(frame(str(key)))
            found.append(_digest_data(digest, data[key]))
        return any(found)
    if isinstance(data, list | tuple):
        digest.update(b"l%d:" % len(data))
        found = [_digest_data(digest, item) for item in data]
        return any(found)
    if data is None or isinstance(data, bool | int | float | str | bytes):
        digest.update(frame(data))
        return False
    if isinstance(data, np.ndarray | np.generic) or type(data).__module__ == "torch":
        if optional(data, "device.type", "cpu") != "cpu":
            raise NotCacheableError("a multimodal input's data lies on an accelerator, where UCM does not read it")
        digest.update(b"t" + frame([str(data.dtype), list(data.shape)]))
        digest.update(_rows(data.reshape(-1)))
        return True
    if hasattr(data, "data") and hasattr(data, "field"):  # vLLM's MultiModalFieldElem
        return _digest_data(digest, data.data)
    raise NotCacheableError(f"a multimodal input's data is of type {type(data).__qualname__}, which is not known")


def _rows(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a tensor's rows, uint8[len(tensor), bytes of a row]; torch tensor or NumPy array."""
    if not isinstance(tensor, np.ndarray):
        import torch  # noqa: PLC0415 - only available beside vLLM

        flat = tensor.detach().to("cpu").contiguous().view(torch.uint8)  # NumPy has no bfloat16
        tensor = flat.numpy()
    rows: np.ndarray[Any, np.dtype[np.uint8]] = np.ascontiguousarray(tensor).view(np.uint8)
    return rows.reshape(len(rows), -1) if len(rows) else rows
