"""Hash a request's blocks: our own chained digests of its tokens, and vLLM's hashes where they can serve as keys.

One running SHA-256 takes the seed and then block after block; at each block's end a copy of its state is finished.
Nothing in it depends on the process, the machine, ``PYTHONHASHSEED`` or object identity.

A digest covers:

- ``frame`` of (format, seed, block size, the request's own content) or, from the last block with an extra on,
  ``frame`` of (format, digest of the block before, extra);
- then the tokens of the blocks since then, u32 LE each.

A key is the digest with the tag of the request's cache salt in place of four bytes; see ``ucm.salts``.

vLLM's own hashes are never keys. They start from ``NONE_HASH``, which depends on the release, on ``PYTHONHASHSEED`` and
on what else is mixed in, so that engines with the same KV would share nothing without any notice.
"""

from __future__ import annotations

import array
import hashlib
import struct
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from ucm.compat import optional, vllm_module
from ucm.salts import tag_of_salt, tagged

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    #: Token ids as vLLM provides them: a list, a ``ConstantList``, or an array of integers.
    TokenIds: TypeAlias = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]

#: Part of every digest; must change whenever the hashed content, or its form, changes.
FORMAT = "ucm.request-hasher/2"
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


def finds_adapters_by_name() -> bool:
    """Return whether vLLM's own prefix cache identifies LoRA adapters by name, as it does up to 0.27.1 at least."""
    utils = vllm_module("v1.core.kv_cache_utils")
    if utils is None:
        return False

    def keys(path: str) -> Any:
        adapter = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=path)
        return utils._gen_lora_extra_hash_keys(SimpleNamespace(lora_request=adapter))  # noqa: SLF001

    try:
        return bool(keys("one") == keys("other"))
    except Exception:  # noqa: BLE001 - another release has this elsewhere; then a name is not trusted
        return True


def hashes_cover_embeds() -> bool:
    """Return whether vLLM's block hashes cover prompt embeddings at all; in some releases they do not."""
    utils = vllm_module("v1.core.kv_cache_utils")
    return utils is None or optional(utils, "_gen_prompt_embeds_extra_hash_keys") is not None


class BlockExtra(Protocol):
    """Content of a request, other than its tokens, that shapes its KV."""

    @property
    def salt(self) -> str | None:
        """The request's ``cache_salt``, whose tag is in its keys; it belongs to ``root`` as well."""

    @property
    def root(self) -> bytes:
        """Content that shapes all of the KV; it is hashed before the first block."""

    @property
    def first_block_token(self) -> int | None:
        """The first token for which ``between`` may return content; None if there is none."""

    def between(self, start: int, end: int) -> bytes:
        """Return what shapes the KV from token ``start`` to ``end`` but not before; empty if nothing does."""


class RequestHashes:
    """The keys of one request, extended as its tokens grow.

    Args:
        seed: The hasher's seed.
        block_size: Tokens per block.
        extra: The request's content beside its tokens.
    """

    __slots__ = ("_extra", "_first", "_hash", "_tag", "block_size", "keys")

    def __init__(self, seed: bytes, block_size: int, extra: BlockExtra | None = None) -> None:
        self.block_size = block_size
        self.keys: list[bytes] = []
        self._extra = extra if extra is not None and extra.first_block_token is not None else None
        self._first = frame((FORMAT, seed, block_size, extra.root if extra is not None else b""))
        self._hash = hashlib.sha256(self._first)
        self._tag = tag_of_salt(extra.salt if extra is not None else None)

    def extend(self, token_ids: TokenIds) -> list[bytes]:
        """Hash the complete blocks that are not hashed yet.

        Args:
            token_ids: All tokens of the request so far; tokens of hashed blocks are not read again.

        Returns:
            The keys of all complete blocks: the list that this object keeps and extends.

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
            keys.append(tagged(self._hash.digest(), self._tag))
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
