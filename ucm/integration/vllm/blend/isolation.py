"""Names of a blended request's blocks in vLLM's own prefix cache, which nobody else finds.

A block's name is a hash of its tokens and of the name before it. From the first blended block on the names are replaced
by hashes with a secret of the request: so a request with the same tokens, and one that shares the prefix, finds exact
blocks alone. The names of blocks to come, those of generated tokens among them, are made by vLLM from the last one that
is there. The request itself finds its blocks again after a preemption.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any


class OwnNames:
    """The names of one request.

    Args:
        request: vLLM's ``Request``.
        block_size: Tokens of a block; vLLM may give it several names, for parts of it.
    """

    def __init__(self, request: Any, block_size: int) -> None:
        self._request = request
        self._block_size = block_size
        self._secret = os.urandom(32)
        self._exact: list[bytes] = []
        self._first = 0

    @property
    def given(self) -> bool:
        """Whether names were replaced."""
        return bool(self._exact)

    def give(self, tokens: int) -> None:
        """Replace the names of all blocks that reach beyond so many tokens; those replaced before stay as they are.

        Args:
            tokens: Those whose KV is exact.
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
        """Give blocks their exact names again: the request was not blended after all.

        Names that vLLM has made since then follow from the others; they are left out, and vLLM makes them anew.
        """
        if self._exact:
            self._request.block_hashes[:] = self._exact
            self._exact = []

    def _named_tokens(self, names: int) -> int:
        """Tokens that a name stands for: the most that it may be, so that no blended block keeps its exact one."""
        number = self._request.num_tokens
        parts = (self._block_size // count for count in range(1, self._block_size + 1) if self._block_size % count == 0)
        return next((size for size in parts if number // size == names), max(1, number // names))


def names_are_kept_apart() -> bool:
    """Whether this release keeps a request's names where they can be replaced, as bytes; it does from 0.11.0 on."""
    try:
        from vllm.v1.core import kv_cache_utils  # noqa: PLC0415 - ucm imports without vLLM
    except ImportError:
        return True
    return getattr(getattr(kv_cache_utils, "BlockHash", None), "__supertype__", None) is bytes
