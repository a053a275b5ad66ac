"""The parts of vLLM's hashing that UCM uses, in the forms of each release; `test_with_vllm.py` uses the real ones."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from tests.ucm.hashing.stand_ins import Request


def sha256(value: Any) -> bytes:
    """``vllm.utils.hashing``"""
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


class FakeVllm:
    """vLLM's hashing in this process.

    Args:
        monkeypatch: Removes it after the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.utils: Any = ModuleType("vllm.v1.core.kv_cache_utils")
        for name in ("vllm", "vllm.v1", "vllm.v1.core"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, self.utils.__name__, self.utils)

    def release(self, kind: str) -> FakeVllm:
        """Be as one of ``0.10.0`` (no hashes of requests), ``0.28.0`` (random start), ``0.29.0`` (fixed start)."""
        if kind == "0.10.0":
            return self
        self.utils.get_request_block_hasher = lambda hash_block_size, caching_hash_fn: None
        if kind == "0.29.0":
            self.utils.resolve_none_hash_seed = lambda hash_fn: os.getenv("PYTHONHASHSEED") or "vllm-none-hash"
        seed = os.getenv("PYTHONHASHSEED") or ("vllm-none-hash" if kind == "0.29.0" else os.urandom(8).hex())
        self.utils.NONE_HASH = sha256(seed)
        return self

    def hash_blocks(self, request: Request, size: int) -> None:
        """What vLLM's hasher does with a request's new tokens."""
        while (len(request.block_hashes) + 1) * size <= len(request.all_token_ids):
            start = len(request.block_hashes) * size
            extra = (request.cache_salt,) if request.cache_salt and not start else None
            parent = request.block_hashes[-1] if start else self.utils.NONE_HASH
            tokens = tuple(request.all_token_ids[start : start + size])
            request.block_hashes.append(sha256((parent, tokens, extra)))
