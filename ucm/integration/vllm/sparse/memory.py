"""The memory that a sparse method needs beside the KV cache, taken from the cache's own before that has blocks."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ucm.compat import optional
from ucm.config.settings import format_size
from ucm.integration.vllm.connector.failures import refusals_logged
from ucm.integration.vllm.sparse.config import sparse_method_config
from ucm.logger import get_logger
from ucm.sparse.base import Role
from ucm.sparse.factory import method_class

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def left_for_kv_caches(
    vllm_config: Any, kv_cache_specs: Sequence[Mapping[str, Any]], available: Sequence[int]
) -> list[int]:
    """Return the bytes of each worker that remain for its KV cache.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_specs: For each worker, vLLM's ``KVCacheSpec`` of each layer.
        available: The bytes of each worker that vLLM has for its KV cache.

    Raises:
        UcmError: If the method's settings are wrong, or it cannot serve the model.
    """
    with refusals_logged("UCM.Sparse"):
        configured = sparse_method_config(vllm_config)
        if configured is None:
            return list(available)
        name, options = configured
        method = method_class(name)(vllm_config, Role.SCHEDULER, options)
        beside = method.bytes_beside_block(kv_cache_specs)
        left = [
            _left(memory, _bytes_of_block(layers), kept)
            for layers, memory, kept in zip(kv_cache_specs, available, beside, strict=True)
        ]
    taken, of = max((memory - rest, memory) for memory, rest in zip(available, left, strict=True))
    if taken:
        get_logger(__name__).info(
            "[UCM.Sparse] of the %s for the KV cache of a worker, %s takes %s for what it keeps of each block",
            format_size(of),
            name,
            format_size(taken),
        )
    return left


def _left(memory: int, block: int, beside: int) -> int:
    return memory * block // (block + beside) if beside else memory


def _bytes_of_block(layers: Mapping[str, Any]) -> int:
    """Return the least bytes of a block in all layers that vLLM can give it.

    Layers of one kind have a tensor each. Layers of different kinds may share tensors: then a block takes the bytes
    of a group, in which vLLM has at least as many layers as the kind with the fewest.
    """
    kinds: Counter[tuple[str, Any]] = Counter()
    for spec in layers.values():
        kinds[type(spec).__name__, optional(spec, "sliding_window")] += int(spec.page_size_bytes)
    return min(kinds.values(), default=1)
