"""The public names of the runtime: import them from here to write a sparse method, a store or a tool.

Everything else below ``ucm`` is private and may change in any release. The modules that vLLM and the overlay load by
name (``ucm.integration.vllm.ucm_connector``, ``ucm.integration.vllm.hooks``) are configuration, not an interface.

This module imports numpy and pydantic, but neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Final

from ucm.errors import ConfigError, SparseMethodError, UcmError
from ucm.hashing.request_hasher import BlockExtra, RequestHasher, RequestHashes
from ucm.sparse.attention import AttentionView, QuerySplit, StepBatch
from ucm.sparse.base import Role, SparseMethod, require_hooks
from ucm.sparse.blocks import keep_apart
from ucm.sparse.options import MethodOptions, parse_options
from ucm.store.base import (
    BlockCompressedError,
    BlockCorruptError,
    BlockForeignError,
    BlockGeometry,
    BlockKey,
    BlockMissingError,
    BlockTransfer,
    BlockUnreadableError,
    Buffer,
    KVStore,
    StoreError,
    StoreFullError,
    StoreTimeoutError,
    StoreUnavailableError,
    Task,
    TaskResult,
    TierStats,
)
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.tier import Tier, TierCounters, TierOptions, TierPlace, ValueTier
from ucm.vllm_types import KVCacheConfig, Request, SchedulerOutput, VllmConfig

__all__ = [
    "API_VERSION",
    "AttentionView",
    "BlockCompressedError",
    "BlockCorruptError",
    "BlockExtra",
    "BlockForeignError",
    "BlockGeometry",
    "BlockKey",
    "BlockMissingError",
    "BlockTransfer",
    "BlockUnreadableError",
    "Buffer",
    "ConfigError",
    "KVCacheConfig",
    "KVStore",
    "MethodOptions",
    "QuerySplit",
    "Request",
    "RequestHasher",
    "RequestHashes",
    "Role",
    "SchedulerOutput",
    "SparseMethod",
    "SparseMethodError",
    "StepBatch",
    "StoreConfig",
    "StoreError",
    "StoreFullError",
    "StoreTimeoutError",
    "StoreUnavailableError",
    "Task",
    "TaskResult",
    "Tier",
    "TierCounters",
    "TierOptions",
    "TierPlace",
    "TierStats",
    "UcmError",
    "ValueTier",
    "VllmConfig",
    "keep_apart",
    "open_store",
    "parse_options",
    "require_hooks",
]

API_VERSION: Final[tuple[int, int]] = (1, 2)
"""The version of this interface, ``(major, minor)``.

The minor number rises when a name or an optional argument is added. The major number rises when a name is removed or
changes its meaning, which the changelog announces.
"""
