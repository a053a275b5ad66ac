"""Chained digests of a request's tokens: one per whole block, each over the whole prefix.

One running SHA-256 takes the seed, then block after block; its state is digested, not finished, at each block's end.
Nothing in it depends on the process, the machine, ``PYTHONHASHSEED`` or object identity.

What the running hash reads, in this order:

- ``frame`` of (format, seed, block size, the request's own content);
- for each block, if it has an extra: four bytes ``0xff``, the extra's length (u64 LE) and the extra; then the block's
  tokens (u32 LE each). A token is below 2**31, so no block begins like an extra.
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

    #: Token ids as vLLM has them: a list, a ``ConstantList``, or an array of integers.
    TokenIds: TypeAlias = Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]

#: Part of every digest; a change of what is hashed, or how, changes it.
FORMAT = "ucm.request-hasher/1"
DIGEST_BYTES = 32
TOKEN_BYTES = 4
_EXTRA = b"\xff" * TOKEN_BYTES


class BlockExtra(Protocol):
    """What shapes a request's KV beside its tokens."""

    @property
    def root(self) -> bytes:
        """What shapes all of it: enters before the first block."""

    @property
    def first_block_token(self) -> int | None:
        """The first token that ``between`` may have something for; None if it never has."""

    def between(self, start: int, end: int) -> bytes:
        """What shapes the KV from token ``start`` to ``end`` and was not there before; empty for nothing."""


class RequestHashes:
    """The digests of one request, extended as its tokens grow.

    Args:
        seed: The hasher's seed.
        block_size: Tokens of a block.
        extra: The request's content beside its tokens.
    """

    __slots__ = ("_extra", "_hash", "block_size", "keys")

    def __init__(self, seed: bytes, block_size: int, extra: BlockExtra | None = None) -> None:
        self.block_size = block_size
        self.keys: list[bytes] = []
        self._extra = extra if extra is not None and extra.first_block_token is not None else None
        self._hash = hashlib.sha256(frame((FORMAT, seed, block_size, extra.root if extra is not None else b"")))

    def extend(self, token_ids: TokenIds) -> list[bytes]:
        """Hash the blocks that are complete and not hashed yet.

        Args:
            token_ids: All tokens of the request so far; those hashed before are not read again.

        Returns:
            The digests of all complete blocks: the list that this object keeps and extends.

        Raises:
            ValueError: If a token id is negative or not below 2**31.
        """
        keys, size = self.keys, self.block_size
        done, whole = len(keys), len(token_ids) // size
        if whole <= done:
            return keys
        # A slice makes a plain list of a ConstantList; a list that is hashed from its start needs no copy.
        fresh = token_ids if not done and type(token_ids) is list else token_ids[done * size : whole * size]
        data = _token_bytes(cast("TokenIds", fresh))
        update, digest, step = self._hash.update, self._hash.digest, size * TOKEN_BYTES
        extra = self._extra
        for offset in range(0, (whole - done) * step, step):
            if extra is not None:
                start = len(keys) * size
                piece = extra.between(start, start + size)
                if piece:
                    update(_EXTRA + len(piece).to_bytes(8, "little") + piece)
            update(data[offset : offset + step])
            keys.append(digest())
        return keys


class RequestHasher:
    """Names the blocks of requests.

    Args:
        seed: What all requests of this engine have in common; hashers with different seeds share no digest.
    """

    def __init__(self, seed: bytes = b"") -> None:
        self.seed = seed

    def generate_block_hashes(
        self, token_ids: TokenIds, block_size: int, extra: BlockExtra | None = None
    ) -> list[bytes]:
        """The digests of a request's whole blocks.

        Args:
            token_ids: The request's tokens, any number of them.
            block_size: Tokens of a block.
            extra: The request's content beside its tokens; None for a plain request.

        Returns:
            One digest of 32 bytes for each of the ``len(token_ids) // block_size`` whole blocks.

        Raises:
            ValueError: If a token id is negative or not below 2**31, or the block size is not positive.
        """
        return self.start(block_size, extra).extend(token_ids)

    def start(self, block_size: int, extra: BlockExtra | None = None) -> RequestHashes:
        """The digests of a request that will grow; see ``generate_block_hashes``."""
        if block_size < 1:
            raise ValueError(f"a block of {block_size} tokens")
        return RequestHashes(self.seed, block_size, extra)


def _token_bytes(token_ids: TokenIds) -> bytes:
    if isinstance(token_ids, np.ndarray):
        tokens = token_ids
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"token ids of type {tokens.dtype}")
        packed = tokens.astype("<u4")
        in_range = bool(np.array_equal(packed, tokens))
    else:
        try:
            native = array.array("I", token_ids)  # the fastest way from Python's integers to bytes
        except OverflowError as error:
            raise ValueError(f"a token id is out of range: {error}") from None
        if sys.byteorder == "big":
            native.byteswap()
        packed = np.frombuffer(native, "<u4")
        in_range = True
    if not in_range or int(packed.max()) >> 31:
        raise ValueError("a token id is negative or not below 2**31")
    return packed.tobytes()
