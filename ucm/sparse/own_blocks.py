"""Keep a request's blocks from being hit by other requests in vLLM's own prefix cache.

vLLM hashes a full block by the tokens in it and before it. A token whose KV depends on more than these, such as a
generated token under a method with dense prompts, must not be hit by another request's prompt. From that token on
the hashes are unique to the request: it finds its blocks again after a preemption, and no other request does.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: The attribute of a request with its block hasher: from 0.12.0 on, and from 0.10.1 on; earlier releases have none.
HASHERS = ("_block_hasher", "get_hash_new_full_blocks")

#: The settings with the number of tokens that a hash covers; most releases only have the last one.
SIZES = ("hash_block_size", "prefix_match_unit", "block_size")


def keep_apart(request: Any, first_token: int, cache_config: Any) -> None:
    """Give blocks with tokens from a position on hashes unique to their request, including already hashed blocks.

    Call it before the request's first allocation; further calls change nothing.

    Args:
        request: vLLM's ``Request``.
        first_token: The position.
        cache_config: vLLM's ``CacheConfig``, with the number of tokens that a hash covers.
    """
    name = next((name for name in HASHERS if getattr(request, name, None) is not None), None)
    if name is None:
        return
    hasher = getattr(request, name)
    if not isinstance(hasher, _OwnNames):
        sizes = (getattr(cache_config, field, None) for field in SIZES)
        own = _OwnNames(hasher, request.block_hashes, first_token // next(size for size in sizes if size))
        setattr(request, name, own)
        request.block_hashes[:] = own.of(request.block_hashes, 0)


def rename_own(request: Any) -> None:
    """Change the request's unique hashes, so that the computed blocks are not found again."""
    for name in HASHERS:
        hasher = getattr(request, name, None)
        if isinstance(hasher, _OwnNames):
            hasher.rename()


class _OwnNames:
    """A request's block hasher.

    Args:
        hasher: vLLM's hasher.
        hashes: The request's hashes, to which vLLM appends the returned ones.
        first: The first block with unique hashes.
    """

    def __init__(self, hasher: Callable[..., list[Any]], hashes: list[Any], first: int) -> None:
        self._hasher = hasher
        self._hashes = hashes
        self._first = first
        self._secret = os.urandom(16)

    def __call__(self, *request: Any) -> list[Any]:
        """Return the hashes of blocks that became full since the last call."""
        return self.of(self._hasher(*request), len(self._hashes))

    def of(self, hashes: Sequence[Any], start: int) -> list[Any]:
        """Return hashes from the block ``start`` on, unique from the first block with unique hashes on."""
        shared = max(0, self._first - start)
        return [*hashes[:shared], *(self._own(of) for of in hashes[shared:])]

    def rename(self) -> None:
        """Change the unique hashes."""
        self._secret = os.urandom(16)
        self._hashes[:] = self.of(self._hashes, 0)

    def _own(self, of: Any) -> Any:
        if isinstance(of, bytes):
            return hashlib.sha256(self._secret + of).digest()
        return of._replace(extra_keys=(of.extra_keys, self._secret))  # 0.10.1: a named tuple with the hash's parts
