"""Determine how a sparse method affects the identity and the naming of blocks.

KV that was computed under a method belongs to the method: its class, its options and the block size are part of the
engine's identity. But where a method leaves prompts dense, as `BlockTopK` does, the blocks of prompts are those that an
engine without a method computes, and are shared with it. Then KV that was computed under the method must not have such
a name, neither in the store nor in vLLM's own prefix cache, because the next prompt would be computed on top of it. So
blocks of generated tokens have no name in the store, and in vLLM's cache a name of their request's own
(`ucm.sparse.own_blocks`).
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.config import KEY, sparse_method_config
from ucm.integration.vllm.connector.scheduler import all_tokens
from ucm.sparse.factory import method_class

if TYPE_CHECKING:
    from collections.abc import Callable

#: The module that defines vLLM's requests; every process with a scheduler has imported it.
REQUESTS = "vllm.v1.request"


def method_identity(vllm_config: Any) -> dict[str, Any]:
    """Return the identity of the configured method; empty without one, or if prompts are computed as without it.

    Raises:
        ConfigError: If there is no such method, or an option is wrong.
    """
    found = sparse_method_config(vllm_config)
    if found is None:
        return {}
    name, options = found
    method = method_class(name)
    identity = method.identity(options)
    if method.prompts_are_dense(options) and _generated_blocks_are_kept_apart(vllm_config):
        return {}
    return {KEY: {**identity, "block_size": vllm_config.cache_config.block_size}}


def lasting_tokens(vllm_config: Any) -> Callable[[int], int]:
    """Return a function from a prompt's length to how many of the tokens have KV that depends on tokens only."""
    found = sparse_method_config(vllm_config)
    if found is None:
        return all_tokens
    name, options = found
    return partial(method_class(name).lasting_tokens, options)


def _generated_blocks_are_kept_apart(vllm_config: Any) -> bool:
    """Return whether no other request finds generated blocks; up to 0.10.0 requests have no hasher of their own."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return True
    requests = sys.modules.get(REQUESTS)
    return requests is None or "block_hasher" in inspect.signature(requests.Request.__init__).parameters
