"""What a sparse method means for the names of blocks: whose KV it is, and which of it has a name at all.

KV that was computed under a method is the method's own: its class, its options and the blocks' size are part of the
engine's identity. But where a method leaves prompts dense, as `BlockTopK` does, their blocks are what an engine without
any method computes, and are shared with it. Then nothing that was computed under the method may have such a name, nor
lie in vLLM's own prefix cache under one: the next prompt would be computed behind it. Blocks of generated tokens get no
name in the store, and one of their request's own in vLLM's cache (`ucm.sparse.own_blocks`).
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

#: Where vLLM's requests are defined; whoever has a scheduler has imported it.
REQUESTS = "vllm.v1.request"


def method_identity(vllm_config: Any) -> dict[str, Any]:
    """The configured method, wherever that is; nothing without one, and if prompts are computed as without it.

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
    """From the length of a prompt to how many of a request's tokens have KV that depends on nothing but them."""
    found = sparse_method_config(vllm_config)
    if found is None:
        return all_tokens
    name, options = found
    return partial(method_class(name).lasting_tokens, options)


def _generated_blocks_are_kept_apart(vllm_config: Any) -> bool:
    """Up to 0.10.0 a request has no hasher of its own, so its generated blocks are found as anybody's."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return True
    requests = sys.modules.get(REQUESTS)
    return requests is None or "block_hasher" in inspect.signature(requests.Request.__init__).parameters
