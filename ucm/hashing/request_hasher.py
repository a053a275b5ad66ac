"""Hash a request's blocks: our own chained digests of its tokens, and vLLM's hashes where they can serve as keys.

One running SHA-256 takes the seed and then block after block; at each block's end a copy of its state is finished.
Nothing in it depends on the process, the machine, ``PYTHONHASHSEED`` or object identity.

A digest covers:

- ``frame`` of (format, seed, block size, the request's own content) or, from the last block with an extra on,
  ``frame`` of (format, digest of the block before, extra);
- then the tokens of the blocks since then, u32 LE each.

vLLM's own hashes are used if they are the same in every process and of a cryptographic hash function. Releases differ
(``vllm/v1/core/kv_cache_utils.py``):

- up to 0.10.0 a request has no ``block_hashes``; in 0.10.1 they are tuples that start from a 64-bit number;
- from 0.10.2 they are bytes, chained from ``NONE_HASH``: random in each process unless ``PYTHONHASHSEED`` is set;
- from 0.29.0 ``NONE_HASH`` comes from a fixed seed if the algorithm is SHA-256.

The release's number decides none of this: vLLM is asked for the seed, and before the first key is used, the first hash
of a request is computed again from the planned ``NONE_HASH`` and the tokens alone.
"""

from __future__ import annotations

import array
import hashlib
import importlib
import os
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from ucm.integration.vllm.compat import block_hashes, cache_salt, optional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import TypeAlias

    #: Token ids as vLLM provides them: a list, a ``ConstantList``, or an array of integers.
    TokenIds: TypeAlias = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]

#: Algorithms of vLLM without known collisions. The xxHash and the 64-bit ones are good enough for one engine's memory,
#: but not for a store with many writers.
_SOUND = ("sha256", "sha256_cbor")
_SEED_VARIABLE = "PYTHONHASHSEED"

#: Part of every digest; must change whenever the hashed content, or its form, changes.
FORMAT = "ucm.request-hasher/1"
DIGEST_BYTES = 32
TOKEN_BYTES = 4


def frame(value: Any) -> bytes:
    """Return the encoding of a plain value.

    Every item carries its type and its length, so no two sequences of items have the same encoding. Mappings are
    encoded in the order of their encoded keys; lists and tuples are encoded alike.

    Args:
        value: None, a bool, an int, a float, a str, bytes, or a list, tuple or mapping of those.

    Raises:
        TypeError: The value contains anything else.
    """
    if value is None or isinstance(value, bool):
        return b"n" if value is None else b"t" if value else b"f"
    if isinstance(value, int):
        return _sized(b"i", str(int(value)).encode())
    if isinstance(value, float):
        return b"d" + struct.pack("<d", value)
    if isinstance(value, str):
        return _sized(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes | bytearray | memoryview):
        return _sized(b"b", bytes(value))
    if isinstance(value, list | tuple):
        return _counted(b"l", [frame(item) for item in value])
    if isinstance(value, Mapping):
        return _counted(b"m", sorted(frame(key) + frame(item) for key, item in value.items()))
    raise TypeError(f"{type(value).__qualname__} has no encoding")


def _sized(tag: bytes, data: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(data), data)


def _counted(tag: bytes, items: list[bytes]) -> bytes:
    return b"%b%d:%b" % (tag, len(items), b"".join(items))


@dataclass(frozen=True, slots=True)
class HashPlan:
    """The choice of the hashes that are the keys of plain requests' blocks.

    Args:
        algorithm: vLLM's algorithm if its hashes are used; empty if ours are.
        none_hash: The start of vLLM's chains if its hashes are used.
        reason: The reason of the choice, for the log.
    """

    algorithm: str
    none_hash: bytes
    reason: str

    @property
    def uses_vllm(self) -> bool:
        """Whether vLLM's hashes are used."""
        return bool(self.algorithm)

    @property
    def kind(self) -> str:
        """The plan as a part of the namespace, so that engines with different seeds share nothing."""
        return f"vllm:{self.algorithm}:{self.none_hash.hex()}" if self.uses_vllm else "ucm"


def plan_hashes(vllm_config: Any) -> HashPlan:
    """Decide from vLLM itself and its configuration; every process of an engine decides the same.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
    """
    algorithm = optional(vllm_config, "cache_config.prefix_caching_hash_algo")
    if algorithm not in _SOUND:
        return _ours(f"vLLM hashes blocks with {algorithm!r}, which is not a cryptographic hash")
    utils, function = _utils(), _hash_function(algorithm)
    if utils is None or function is None:
        return _ours("this vLLM release has no block hashes of requests")
    seed = _seed(utils, function)
    if seed is None:
        return _ours(f"this vLLM release starts its hashes from a random number ({_SEED_VARIABLE} would fix it)")
    return HashPlan(algorithm, bytes(function(seed)), "they are the same in every process")


def verified_block_size(request: Any, plan: HashPlan, largest: int) -> int | None:
    """Return how many tokens each of a request's hashes covers, found by computing its first hash again.

    Args:
        request: A vLLM ``Request`` with nothing but tokens and a salt, and at least one hash.
        plan: The result of ``plan_hashes``.
        largest: The block size for which keys are wanted; a multiple of the size that the hashes cover.

    Returns:
        The tokens per hash; None if the hash covers anything but the planned ``NONE_HASH``, the tokens and the salt, so
        that it must not be the key of a stored block.
    """
    function = _hash_function(plan.algorithm)
    if function is None:
        return None
    salt = cache_salt(request)
    keys = (None,) if not salt else ((salt,), (("cache_salt", salt),))  # tagged from 0.31.0
    wanted = request.block_hashes[0]
    tokens = tuple(request.all_token_ids[:largest])
    for size in range(len(tokens), 0, -1):
        if largest % size == 0 and any(function((plan.none_hash, tokens[:size], key)) == wanted for key in keys):
            return size
    return None


def has_hashes(request: Any) -> bool:
    """Return whether vLLM hashes the blocks of this request to bytes, and the request has at least one hash."""
    hashes = block_hashes(request)
    return isinstance(hashes, list) and bool(hashes) and isinstance(hashes[0], bytes)


def finds_adapters_by_name() -> bool:
    """Return whether vLLM's own prefix cache identifies LoRA adapters by name, as it does up to 0.27.1 at least."""
    utils = _module("vllm.v1.core.kv_cache_utils")
    if utils is None:
        return False

    def keys(path: str) -> Any:
        adapter = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=path)
        return utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=adapter))  # noqa: SLF001

    try:
        return bool(keys("one") == keys("other"))
    except Exception:  # noqa: BLE001 - another release has this elsewhere; then a name is not trusted
        return True


def _ours(reason: str) -> HashPlan:
    return HashPlan("", b"", reason)


def _utils() -> ModuleType | None:
    utils = _module("vllm.v1.core.kv_cache_utils")
    return None if optional(utils, "get_request_block_hasher") is None else utils


def _hash_function(algorithm: str) -> Callable[[Any], Any] | None:
    for name in ("vllm.utils.hashing", "vllm.utils"):
        find = optional(_module(name), "get_hash_fn_by_name")
        if find is not None:
            try:
                function: Callable[[Any], Any] = find(algorithm)
                return function if isinstance(function(""), bytes) else None  # a number up to 0.10.1
            except Exception:  # noqa: BLE001 - a package of the algorithm is missing; the engine reports that itself
                return None
    return None


def _seed(utils: ModuleType, function: Callable[[Any], Any]) -> str | None:
    """Return the seed of ``NONE_HASH``, or None if it is random."""
    resolve = optional(utils, "resolve_none_hash_seed")
    if resolve is None:
        return os.environ.get(_SEED_VARIABLE)
    seed = resolve(function)
    return seed if isinstance(seed, str) and seed == resolve(function) else None  # two equal results: not random


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class BlockExtra(Protocol):
    """Content of a request, other than its tokens, that shapes its KV."""

    @property
    def root(self) -> bytes:
        """Content that shapes all of the KV; it is hashed before the first block."""

    @property
    def first_block_token(self) -> int | None:
        """The first token for which ``between`` may return content; None if there is none."""

    def between(self, start: int, end: int) -> bytes:
        """Return what shapes the KV from token ``start`` to ``end`` but not before; empty if nothing does."""


class RequestHashes:
    """The digests of one request, extended as its tokens grow.

    Args:
        seed: The hasher's seed.
        block_size: Tokens per block.
        extra: The request's content beside its tokens.
    """

    __slots__ = ("_extra", "_first", "_hash", "block_size", "keys")

    def __init__(self, seed: bytes, block_size: int, extra: BlockExtra | None = None) -> None:
        self.block_size = block_size
        self.keys: list[bytes] = []
        self._extra = extra if extra is not None and extra.first_block_token is not None else None
        self._first = frame((FORMAT, seed, block_size, extra.root if extra is not None else b""))
        self._hash = hashlib.sha256(self._first)

    def extend(self, token_ids: TokenIds) -> list[bytes]:
        """Hash the complete blocks that are not hashed yet.

        Args:
            token_ids: All tokens of the request so far; tokens of hashed blocks are not read again.

        Returns:
            The digests of all complete blocks: the list that this object keeps and extends.

        Raises:
            ValueError: A token id is no integer from 0 to 2**32 - 1.
        """
        keys, size = self.keys, self.block_size
        done, whole = len(keys), len(token_ids) // size
        if whole <= done:
            return keys
        # A slice turns a ConstantList into a plain list; a list that is hashed from its start needs no copy.
        fresh = token_ids if not done and type(token_ids) is list else token_ids[done * size : whole * size]
        data, step = _token_bytes(cast("TokenIds", fresh)), size * TOKEN_BYTES
        for offset in range(0, (whole - done) * step, step):
            if self._extra is not None:
                self._take_extra(self._extra)
            self._hash.update(data[offset : offset + step])
            keys.append(self._hash.digest())
        return keys

    def _take_extra(self, extra: BlockExtra) -> None:
        """Start a new running hash if the next block has an extra."""
        start = len(self.keys) * self.block_size
        piece = extra.between(start, start + self.block_size)
        if piece:
            before = self.keys[-1] if self.keys else self._first
            self._hash = hashlib.sha256(frame((FORMAT, before, piece)))


class RequestHasher:
    """Computes the block digests of requests.

    Args:
        seed: What all requests of this engine have in common; hashers with different seeds share no digest.
    """

    def __init__(self, seed: bytes = b"") -> None:
        self.seed = seed

    def generate_block_hashes(
        self, token_ids: TokenIds, block_size: int, extra: BlockExtra | None = None
    ) -> list[bytes]:
        """Return the digests of a request's full blocks.

        Args:
            token_ids: The request's tokens, any number of them.
            block_size: Tokens per block.
            extra: The request's content beside its tokens; None for a plain request.

        Returns:
            One digest of 32 bytes for each of the ``len(token_ids) // block_size`` full blocks.

        Raises:
            ValueError: A token id is no integer from 0 to 2**32 - 1, or the block size is not positive.
        """
        return self.start(block_size, extra).extend(token_ids)

    def start(self, block_size: int, extra: BlockExtra | None = None) -> RequestHashes:
        """Return the digests of a request that will grow; see ``generate_block_hashes``."""
        if block_size < 1:
            raise ValueError(f"a block of {block_size} tokens")
        return RequestHashes(self.seed, block_size, extra)


def _token_bytes(token_ids: TokenIds) -> bytes:
    if isinstance(token_ids, np.ndarray):
        packed = token_ids.astype("<u4")
        if token_ids.dtype.kind not in "iu" or not np.array_equal(packed, token_ids):
            raise ValueError(f"token ids of type {token_ids.dtype} are not integers from 0 to 2**32 - 1")
        return packed.tobytes()
    try:
        native = array.array("I", token_ids)  # the fastest conversion from Python's integers to bytes
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a token id is not an integer from 0 to 2**32 - 1: {error}") from None
    if sys.byteorder == "big":
        native.byteswap()
    return native.tobytes()
