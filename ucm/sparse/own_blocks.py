"""Keeping a request's blocks apart from other requests' in vLLM's own prefix cache.

vLLM names a full block by the tokens in it and before it. A token whose KV depends on more than these, as that of a
generated token under a method that leaves prompts dense, must not be found by another request's prompt. From there on
the names are the request's own: it finds its blocks again when it is preempted, and nobody else does.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Where a request keeps what hashes its full blocks: from 0.12.0 on, and from 0.10.1 on; before, there is none.
HASHERS = ("_block_hasher", "get_hash_new_full_blocks")

#: Where vLLM keeps how many tokens a hash covers; most often only the last of them is there.
SIZES = ("hash_block_size", "prefix_match_unit", "block_size")


def keep_apart(request: Any, first_token: int, cache_config: Any) -> None:
    """Give blocks with a token from some position on names of their request's own; at once for those that have names.

    Called before the request's first allocation, and as often as one likes.

    Args:
        request: vLLM's ``Request``.
        first_token: The position.
        cache_config: vLLM's ``CacheConfig``, which tells how many tokens a hash covers.
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
    """Give the blocks that have names of their request's own others, so that what was computed is not found again."""
    for name in HASHERS:
        hasher = getattr(request, name, None)
        if isinstance(hasher, _OwnNames):
            hasher.rename()


class _OwnNames:
    """A request's hasher.

    Args:
        hasher: vLLM's.
        hashes: The request's, which grow with what is returned here.
        first: The first block with names of its own.
    """

    def __init__(self, hasher: Callable[..., list[Any]], hashes: list[Any], first: int) -> None:
        self._hasher = hasher
        self._hashes = hashes
        self._first = first
        self._secret = os.urandom(16)

    def __call__(self, *request: Any) -> list[Any]:
        """The hashes of blocks that are full since the last call."""
        return self.of(self._hasher(*request), len(self._hashes))

    def of(self, hashes: Sequence[Any], start: int) -> list[Any]:
        """Some hashes, from that of a block on."""
        shared = max(0, self._first - start)
        return [*hashes[:shared], *(self._own(of) for of in hashes[shared:])]

    def rename(self) -> None:
        """Change the names of the request's own."""
        self._secret = os.urandom(16)
        self._hashes[:] = self.of(self._hashes, 0)

    def _own(self, of: Any) -> Any:
        if isinstance(of, bytes):
            return hashlib.sha256(self._secret + of).digest()
        return of._replace(extra_keys=(of.extra_keys, self._secret))  # 0.10.1: a tuple that names what it is made of
