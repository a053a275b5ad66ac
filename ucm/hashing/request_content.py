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
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.background import call_later
from ucm.clock import SYSTEM
from ucm.compat import (
    adapter_of,
    adapter_path,
    block_hashes,
    cache_salt,
    device_type,
    media_inputs,
    optional,
    prompt_embeds,
    token_ids,
    tokens_per_hash,
)
from ucm.errors import UcmError
from ucm.hashing.file_contents import DigestCache, FileContents, process_started
from ucm.hashing.name_ledger import NameLedger, Naming, named
from ucm.hashing.request_hasher import finds_adapters_by_name, frame, hashes_cover_embeds

if TYPE_CHECKING:
    from ucm.clock import Clock
    from ucm.compat import MediaInput
    from ucm.hashing.file_contents import Digests

_SUFFIXES = frozenset({".json", ".safetensors", ".bin", ".pt"})
#: Bytes of an adapter that are read while the scheduler waits; a larger one is read in the background.
_AT_ONCE = 16 << 20

#: Adapters that are remembered, some kilobytes each.
_MOST_ADAPTERS = 4_096

#: vLLM's name of a multimodal input that it hashed: a hexadecimal digest of 256 or 512 bits, after the name of a LoRA
#: if the vision tower has one. A client may choose such a name, too.
_HASHED = re.compile(r"(?:.*:)?([0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)

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


class NotCacheableError(Exception):
    """A request's content cannot be identified; the text is the reason."""


class AdapterError(NotCacheableError):
    """An adapter's weights cannot be identified."""


class _BeingReadError(AdapterError):
    """They will be identified soon, and must be unchanged then."""


class _Adapter:
    """The files of one adapter, read once."""

    def __init__(self, directory: Path, since: float, cache: DigestCache | None, clock: Clock) -> None:
        self.directory = directory
        self.files = {path.name: path for path in _files(directory)}
        self._contents = FileContents(since, cache, clock=clock)
        self._digests: Digests | None = None
        self._error: Exception | None = None
        found = self._contents.look_up(self.files.values())
        if sum(path.stat().st_size for path in found.unread) <= _AT_ONCE:
            self._read(found)
        else:
            call_later(partial(self._read, found), "ucm-adapter", clock=clock)

    def digest(self) -> bytes:
        """Return 32 bytes over the names and contents of the files, which must be unchanged since they were read."""
        if self._error is not None:
            raise self._error
        if self._digests is None:
            self._contents.confirm()
            raise _BeingReadError("a LoRA adapter is being read; its requests are cached when that is done")
        self._contents.confirm()
        if {path.name for path in _files(self.directory)} != set(self.files):
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
        by_name: Whether vLLM's own prefix cache identifies an adapter by its name alone, and not by its path as well.
        blocks: The names under which that cache has blocks.
        most: How many adapters are remembered. If there are more, the name that was not used for longest is not
            trusted until vLLM's prefix cache is emptied.
        clock: Time and threads.
    """

    def __init__(
        self,
        shared: Any = None,
        cache: DigestCache | None = None,
        since: float | None = None,
        *,
        by_name: bool = False,
        blocks: NameLedger | None = None,
        most: int = _MOST_ADAPTERS,
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        self._most = most
        self._shared = frame(shared)
        self._cache = cache
        self._since = process_started() if since is None else since
        self._seen: OrderedDict[tuple[int, str], _Adapter] = OrderedDict()
        self._by_name = by_name
        self._blocks = NameLedger() if blocks is None else blocks
        #: vLLM's adapter numbers; workers keep an adapter under its number, and no connector hears that they drop it.
        self._numbers = NameLedger()
        #: The numbers and the names under which vLLM's prefix cache may have blocks.
        self._used: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        #: Adapters that are being read, by the name of their blocks.
        self._unread: dict[bytes, _Adapter] = {}

    def fingerprint(self, lora_request: Any) -> bytes:
        """Return 32 bytes that identify the adapter's weights and how they are applied.

        Raises:
            AdapterError: The files cannot be read, or may differ from those that the engine has loaded.
        """
        number, path = int(lora_request.lora_int_id), adapter_path(lora_request)
        name = self.name_of(lora_request)
        self._use(number, name)
        try:
            content = self._content(lora_request, number, path)
        except _BeingReadError:
            if self._unread.setdefault(name, self._seen[number, path]) is not self._seen[number, path]:
                self._blocks.stands_for(name, None)
            raise
        except AdapterError:
            self.replaced(number)
            raise
        unread = self._unread.get(name)
        if unread is self._seen[number, path]:
            del self._unread[name]
        elif unread is not None:
            self._blocks.stands_for(name, None)
        kept = self._numbers.stands_for(named(number), content)
        found = self._blocks.stands_for(name, content)
        if not kept or not found:
            what = f"lora_int_id {number}" if not kept else f"lora_name {lora_request.lora_name!r}"
            if not kept:
                self.replaced(number)
            raise AdapterError(
                f"{what} was used for different weights, or for some that could not be identified, so vLLM may compute "
                "with the first ones, or find their blocks; give each LoRA adapter a name and a number of its own"
            )
        how = frame([optional(lora_request, name) for name in ("long_lora_max_len", "is_3d_lora_weight")])
        return hashlib.sha256(frame([self._shared, content, how])).digest()

    def name_of(self, lora_request: Any) -> bytes:
        """Return the name by which vLLM finds an adapter's blocks, for a ledger."""
        return named("adapter", str(lora_request.lora_name), None if self._by_name else adapter_path(lora_request))

    def replaced(self, number: int) -> None:
        """Note, permanently, that the engine has replaced an adapter's weights or may do so at any time.

        Requests under its number may run on, and vLLM finds what they compute under its names.
        """
        self._numbers.stands_for(named(number), None)
        for used, name in self._used:
            if used == number:
                self._blocks.stands_for(name, None)

    def _use(self, number: int, name: bytes) -> None:
        self._used[number, name] = None
        self._used.move_to_end((number, name))
        if len(self._used) > self._most:
            (_, forgotten), _ = self._used.popitem(last=False)
            self._unread.pop(forgotten, None)
            self._blocks.stands_for(forgotten, None)

    def is_invalidated(self, lora_request: Any) -> bool:
        """Return whether an adapter may have other weights by now, or stands for several, or its name does."""
        return self._numbers.is_ambiguous(named(int(lora_request.lora_int_id))) or self._blocks.is_ambiguous(
            self.name_of(lora_request)
        )

    def still_run(self, lora_requests: Sequence[Any]) -> None:
        """Note that vLLM's prefix cache was emptied while requests with these adapters ran, which fill it again."""
        self._used.clear()
        self._unread.clear()
        for lora_request in lora_requests:
            number = int(lora_request.lora_int_id)
            try:
                self.fingerprint(lora_request)
            except AdapterError:
                if self._numbers.is_ambiguous(named(number)):
                    self.replaced(number)

    def _content(self, lora_request: Any, number: int, path: str) -> bytes:
        """Return the digest of an adapter's files, read again as far as they may have moved."""
        if optional(lora_request, "tensorizer_config_dict"):
            raise AdapterError(
                "a LoRA adapter is loaded by tensorizer, so its weights are not in files that we can read"
            )
        if optional(lora_request, "load_inplace", False):
            raise AdapterError("a LoRA adapter is loaded in place, so vLLM may read its files again at any step")
        key = (number, path)
        try:
            if key not in self._seen:
                self._seen[key] = _Adapter(_directory(path), self._since, self._cache, self._clock)
                if len(self._seen) > self._most:
                    self._seen.popitem(last=False)  # read again at its next use, and compared with what its number was
            self._seen.move_to_end(key)
            adapter = self._seen[key]
            if not _is_current(adapter.directory):
                raise AdapterError(
                    f"LoRA adapter {path!r} has another revision in the hub's cache since this engine first used it; "
                    "give it a name and a number of its own"
                )
            return adapter.digest()
        except OSError as error:
            raise AdapterError(f"the LoRA adapter {path!r} cannot be read: {error}") from error
        except UcmError as error:
            raise AdapterError(
                f"the files of LoRA adapter {path!r} may not be those that the engine loaded ({error.what}: "
                f"{error.where}); restart the engine, or load it from another path"
            ) from error


def _is_current(directory: Path) -> bool:
    """Return whether a snapshot in the hub's cache is still that of its repository's main branch.

    vLLM looks the branch up again whenever it loads the adapter. Other directories are never outdated.
    """
    if directory.parent.name != "snapshots":
        return True
    branch = directory.parent.parent / "refs" / "main"
    return not branch.is_file() or branch.read_text(encoding="utf-8").strip() == directory.name


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
        embeds_mask: One byte for each prompt token beside embeddings, 1 where its id is used and not its embedding.
    """

    salt: str | None = None
    adapter: bytes | None = None
    token_types: bytes | None = None
    media: tuple[Media, ...] = ()
    embeds: np.ndarray[Any, np.dtype[np.uint8]] | None = None
    embeds_dtype: str = ""
    embeds_mask: bytes = b""

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
        clock: Time and threads.
    """

    def __init__(self, vllm_config: Any, *, trust_media_names: bool = False, clock: Clock = SYSTEM) -> None:
        lora = optional(vllm_config, "lora_config")
        self._mixes_adapters = lora is not None and device_type(vllm_config) == "cpu"
        names = (
            *("lora_dtype", "long_lora_scaling_factors", "lora_extra_vocab_size", "bias_enabled", "target_modules"),
            *("enable_tower_connector_lora", "enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
        )
        shared = {name: str(optional(lora, name)) for name in names}
        #: The names of vLLM's prefix cache, beside the content that its hashes cover; cleared when that is emptied.
        self.blocks = NameLedger()
        #: The names of media there; cleared likewise, and apart because there may be so many.
        self.media = NameLedger()
        #: The names of media whose encodings vLLM has; it tells a step's connector of each that it drops.
        self.encodings = NameLedger()
        #: The names of processed inputs. No connector hears that vLLM empties their cache.
        self.inputs = NameLedger()
        self.adapters = Adapters(
            shared,
            DigestCache(),
            by_name=lora is not None and finds_adapters_by_name(),
            blocks=self.blocks,
            clock=clock,
        )
        self._trust_names = trust_media_names
        self._names_are_hashes = _names_are_hashes(vllm_config)
        self._covers_embeds = hashes_cover_embeds()
        self._shares_encodings = optional(vllm_config, "ec_transfer_config") is not None
        self._cache_config = optional(vllm_config, "cache_config")
        self._unknown_fields: dict[type, tuple[str, ...]] = {}

    @property
    def changes(self) -> int:
        """How often any name became ambiguous."""
        return sum(ledger.changes for ledger in (self.blocks, self.media, self.encodings, self.inputs))

    def prefix_cache_emptied(self) -> None:
        """Forget the names of vLLM's prefix cache."""
        self.blocks.clear()
        self.media.clear()

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
        return [] if self._trust_names else [item.data for item in media_inputs(request)]

    def read(
        self, request: Any, digests: Sequence[Digest] | None = None, names: list[Naming] | None = None
    ) -> RequestContent:
        """Return the content of a request, and note which names stand for it.

        Args:
            request: vLLM's ``Request``.
            digests: The digests of `data_of`; computed here if None.
            names: Gets the names by which vLLM finds parts of it, whatever the outcome; that of its adapter is kept by
                `adapters`.

        Raises:
            NotCacheableError: The request has content that cannot be identified, or a name of it is ambiguous.
        """
        names = [] if names is None else names
        errors: list[NotCacheableError] = []
        adapter = token_types = None
        try:
            adapter = self._adapter(request)
        except NotCacheableError as error:
            errors.append(error)
        # vLLM encodes all inputs of a request that is refused for another reason, too.
        media = self._media(request, digests, adapter, names, errors)
        embeds, mask = prompt_embeds(request)
        try:
            self._refuse_unknown_fields(request)
            token_types = _token_types(request)
        except NotCacheableError as error:
            errors.append(error)
            names += self.first_block(request)
        if token_types is not None or (embeds is not None and not self._covers_embeds):
            names += self.first_block(request)
        content = RequestContent(
            salt=cache_salt(request) or None,
            adapter=adapter,
            token_types=token_types,
            media=media,
            embeds=None if embeds is None else _rows(embeds),
            embeds_dtype="" if embeds is None else str(embeds.dtype),
            embeds_mask=b"" if mask is None else bytes(map(bool, mask)),
        )
        if embeds is not None:
            names += self._names_of_embeds(request, content)
        holds = [naming.holds() for naming in names]
        if errors:
            raise errors[0]
        if not all(holds) or any(self.blocks.is_ambiguous(one.name) for one in self.first_block(request)):
            raise NotCacheableError(
                "vLLM's caches have other content under a name of the request: that of another multimodal input, of "
                "prompt embeddings with another mask or dtype, or of a request with content that UCM does not know; so "
                "it may compute with that"
            )
        return content

    def _refuse_unknown_fields(self, request: Any) -> None:
        kind = type(request)
        if kind not in self._unknown_fields:
            parameters = inspect.signature(kind.__init__).parameters
            named_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            unknown = (n for n, p in parameters.items() if p.kind in named_kinds and n not in _KNOWN_FIELDS)
            self._unknown_fields[kind] = tuple(unknown)
        for name in self._unknown_fields[kind]:
            if getattr(request, name, None):
                raise NotCacheableError(f"this vLLM release gives requests {name!r}, which UCM does not know")

    def first_block(self, request: Any) -> list[Naming]:
        """Return the hash of the first block as a name of unknown content; empty if vLLM hashes no blocks.

        All blocks of the request lie behind it, and those of requests that share its first block.
        """
        return [Naming(self.blocks, named("first block", block), None) for block in _hash_bytes(request, 1)]

    def _names_of_embeds(self, request: Any, content: RequestContent) -> list[Naming]:
        """Return vLLM's hashes of the blocks with embeddings, which cover the rows but neither dtype nor mask."""
        if content.embeds is None:
            return []
        blocks, meant, found = _hash_bytes(request), hashlib.sha256(content.embeds_dtype.encode()), []
        number_of_tokens = len(token_ids(request))
        size = tokens_per_hash(self._cache_config) if blocks else 1
        if number_of_tokens // size != len(blocks):  # then more of the mask counts than a block has
            size = number_of_tokens // max(1, len(blocks))
        for number, block in enumerate(blocks):
            meant.update(frame(content.embeds_mask[number * size : (number + 1) * size]))
            found.append(Naming(self.blocks, named("embeds", block), meant.digest()[:16]))
        return found

    def _adapter(self, request: Any) -> bytes | None:
        lora_request = adapter_of(request)
        if lora_request is None:
            if self._mixes_adapters:
                raise NotCacheableError(
                    "on a CPU, vLLM computes a request without a LoRA adapter with the adapter of another request "
                    "in the same step"
                )
            return None
        return self.adapters.fingerprint(lora_request)

    def _media(
        self,
        request: Any,
        digests: Sequence[Digest] | None,
        adapter: bytes | None,
        names: list[Naming],
        errors: list[NotCacheableError],
    ) -> tuple[Media, ...]:
        media = []
        for number, item in enumerate(media_inputs(request)):
            content: str | bytes | None = None
            try:
                if self._trust_names:
                    content = self._by_name(item.name)
                else:
                    content = self._by_data(digest_of(item.data) if digests is None else digests[number])
            except NotCacheableError as error:
                errors.append(error)
            if not self._trust_names:
                names += self._names_of_medium(item, content, adapter, has_adapter=adapter_of(request) is not None)
            if content is None:
                continue
            at = item.position
            is_embed = optional(at, "is_embed")
            mask = None if is_embed is None else _rows(is_embed).tobytes()
            media.append(Media(int(at.offset), frame([item.modality, content, int(at.length), mask])))
        return tuple(sorted(media, key=lambda one: one.start))

    def _by_data(self, digest: Digest) -> bytes:
        if self._shares_encodings:
            raise NotCacheableError(
                "ec_transfer_config: vLLM may load the encoding of a multimodal input from another engine by the "
                "input's name; `trust_media_names` accepts names"
            )
        if isinstance(digest, NotCacheableError):
            raise digest
        return digest

    def _names_of_medium(
        self, item: MediaInput, content: str | bytes | None, adapter: bytes | None, *, has_adapter: bool
    ) -> list[Naming]:
        """Return the names of an input's processed data and of its encoding."""
        meant = None if content is None else named(item.modality, content)
        apart = item.name and item.encoding != item.name
        found = [Naming(self.inputs, named("input", item.name), meant)] if apart else []
        if item.encoding:
            if apart:
                known = meant is not None and (adapter is not None or not has_adapter)
                meant = named(meant, adapter) if known else None
            name = name_of_encoding(item.encoding)
            found += [Naming(ledger, name, meant) for ledger in (self.media, self.encodings)]
        return found

    def _by_name(self, name: str | None) -> str:
        hashed = _HASHED.fullmatch(name or "")
        if hashed is None or not self._names_are_hashes:
            raise NotCacheableError(
                "a multimodal input has a name in place of a hash of its content: a client gave it one, or vLLM hashes "
                "no inputs because prefix caching and mm_processor_cache_gb are both off"
            )
        return hashed[1]


def name_of_encoding(key: str) -> bytes:
    """Return the name of a medium's encoding for a ledger, given vLLM's key for it."""
    return named("encoding", key)


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
    told = optional(request, "pooling_params.extra_kwargs")
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


def _hash_bytes(request: Any, most: int | None = None) -> list[bytes]:
    """Return vLLM's hashes of a request's first blocks; in 0.10.1 they are tuples that start with a number."""
    return [one if isinstance(one, bytes) else repr(one).encode() for one in block_hashes(request)[:most]]


def _rows(tensor: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a tensor's rows, uint8[len(tensor), bytes of a row]; torch tensor or NumPy array."""
    if not isinstance(tensor, np.ndarray):
        import torch  # noqa: PLC0415 - only available beside vLLM

        flat = tensor.detach().to("cpu").contiguous().view(torch.uint8)  # NumPy has no bfloat16
        tensor = flat.numpy()
    rows: np.ndarray[Any, np.dtype[np.uint8]] = np.ascontiguousarray(tensor).view(np.uint8)
    return rows.reshape(len(rows), -1) if len(rows) else rows
