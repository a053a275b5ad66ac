"""Unique hashes of a blended request's blocks in vLLM's own prefix cache, which no other request hits.

A block's hash covers its tokens and the previous hash. From the first blended block on, the hashes are replaced
by hashes with a secret of the request, so other requests with the same tokens or the same prefix hit only exact
blocks. vLLM computes the hashes of later blocks, including generated tokens, from the last existing
one. The request itself finds its blocks again after a preemption.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any


class OwnNames:
    """The block hashes of one request.

    Args:
        request: vLLM's ``Request``.
        block_size: Tokens per block; vLLM may give a block several hashes, for parts of it.
    """

    def __init__(self, request: Any, block_size: int) -> None:
        self._request = request
        self._block_size = block_size
        self._secret = os.urandom(32)
        self._exact: list[bytes] = []
        self._first = 0

    @property
    def given(self) -> bool:
        """Whether hashes were replaced."""
        return bool(self._exact)

    def give(self, tokens: int) -> None:
        """Replace the hashes of all blocks that end after this many tokens; already replaced ones stay the same.

        Args:
            tokens: The number of tokens with exact KV.
        """
        hashes = getattr(self._request, "block_hashes", None)
        if not hashes:
            return
        first = tokens // self._named_tokens(len(hashes))
        if not self._exact:
            self._exact, self._first = list(hashes), len(hashes)
        for place in range(first, self._first):
            exact = bytes(hashes[place])
            hashes[place] = hashlib.sha512(self._secret + exact).digest()[: len(exact)]
        self._first = min(first, self._first)

    def take_back(self) -> None:
        """Restore the exact hashes: the request was not blended after all.

        Hashes that vLLM has computed since depend on the replaced ones; they are removed, and vLLM recomputes them.
        """
        if self._exact:
            self._request.block_hashes[:] = self._exact
            self._exact = []

    def _named_tokens(self, names: int) -> int:
        """Return the tokens per hash; if unclear the largest possible, so that no blended block keeps an exact hash."""
        number = self._request.num_tokens
        parts = (self._block_size // count for count in range(1, self._block_size + 1) if self._block_size % count == 0)
        return next((size for size in parts if number // size == names), max(1, number // names))


def names_are_kept_apart() -> bool:
    """Return whether this release has a request's hashes as replaceable bytes; it does from 0.11.0 on."""
    try:
        from vllm.v1.core import kv_cache_utils  # noqa: PLC0415 - ucm imports without vLLM
    except ImportError:
        return True
    return getattr(getattr(kv_cache_utils, "BlockHash", None), "__supertype__", None) is bytes
