"""Compute chained digests of a request's tokens: one per full block, each over the whole prefix.

One running SHA-256 takes the seed and then block after block; at each block's end a copy of its state is finished.
Nothing in it depends on the process, the machine, ``PYTHONHASHSEED`` or object identity.

A digest covers:

- ``frame`` of (format, seed, block size, the request's own content) or, from the last block with an extra on,
  ``frame`` of (format, digest of the block before, extra);
- then the tokens of the blocks since then, u32 LE each.
"""

from __future__ import annotations

import array
import hashlib
import sys
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from ucm.hashing.framing import frame

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, TypeAlias

    #: Token ids as vLLM provides them: a list, a ``ConstantList``, or an array of integers.
    TokenIds: TypeAlias = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]

#: Part of every digest; must change whenever the hashed content, or its form, changes.
FORMAT = "ucm.request-hasher/1"
DIGEST_BYTES = 32
TOKEN_BYTES = 4


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
