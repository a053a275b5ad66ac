"""Keep the KV that a sparse method shapes apart, wherever vLLM's own parts and other connectors share KV.

A method that changes what a block holds changes vLLM's block hashes as well: what the KV depends on is hashed with each
block. So everything that finds KV by these hashes is right without knowing of UCM: vLLM's prefix cache, connectors,
their tiers, KV events, and routers that read them. A method that leaves KV alone changes no hash, and a method with
dense prompts (`SparseMethod.prompts_are_dense`) none of prompts; its later blocks have names of their own
(`ucm.sparse.blocks.keep_apart`).

A connector that names KV in another way, by tokens or by a request of another engine, cannot know of the method. It is
refused by name, unless the operator vouches for it with `TRUSTED`. So is every unknown connector.

The hash function is the place because it belongs to one engine. vLLM's first parent hash, ``NONE_HASH``, is a global of
the process, which several engines share; a request's extra keys know no configuration, and KV events publish them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from typing import TYPE_CHECKING, Any

from ucm.compat import inner_connectors, optional, publishes_kv_events, requests_have_hashers
from ucm.errors import ConfigError, SparseMethodError
from ucm.integration.vllm.sparse.config import KEY, TRUSTED, sparse_method_config
from ucm.logger import get_logger
from ucm.sparse.factory import method_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucm.sparse.base import SparseMethod

#: The group of rewritten modules whose hooks call `seeded` and `require_connectors`.
HASHING = "SCHEDULER"
#: The package of UCM's connectors, whose namespace contains the method.
OURS = "ucm."
_VLLM = "vllm.distributed.kv_transfer.kv_connector.v1."
_ASCEND = "vllm_ascend.distributed."
#: Connectors whose keys are vLLM's block hashes, in every release that has them.
BY_BLOCK_HASH = frozenset(
    {
        f"{_VLLM}offloading_connector:OffloadingConnector",
        f"{_VLLM}simple_cpu_offload_connector:SimpleCPUOffloadConnector",
        f"{_VLLM}mooncake.store.connector:MooncakeStoreConnector",
        f"{_VLLM}umbp.connector:UMBPStoreConnector",
        f"{_ASCEND}kvpool.ascend_store_connector:AscendStoreConnector",
        f"{_ASCEND}kv_transfer.kv_pool.ascend_store.ascend_store_connector:AscendStoreConnector",
        f"{_ASCEND}kv_transfer.kv_pool.kv_offload.native.offloading_connector:AscendOffloadingConnector",
        f"{_ASCEND}kv_transfer.kv_pool.kv_offload.simple.simple_cpu_offload_connector:AscendSimpleCPUOffloadConnector",
    }
)
#: Connectors with keys of their own that keep prompts alone, as a request starts.
PROMPTS_ALONE = frozenset(
    {
        f"{_VLLM}example_connector:ExampleConnector",
        f"{_VLLM}shared_storage_connector:SharedStorageConnector",
    }
)
#: Connectors that consist of others.
CONTAINERS = frozenset(
    {
        f"{_VLLM}multi_connector:MultiConnector",
        f"{_ASCEND}kv_transfer.ascend_multi_connector:AscendMultiConnector",
    }
)


def method_identity(vllm_config: Any) -> dict[str, Any]:
    """Return the identity of the configured method; empty without one, or if prompts are computed as without it.

    KV that was computed under a method belongs to the method: its class, its options and the block size are part of
    the engine's identity. But where a method leaves prompts dense, as `BlockTopK` does, the blocks of prompts are those
    that an engine without a method computes, and are shared with it. Then KV that was computed under the method must
    not have such a name, neither in the store nor in vLLM's own prefix cache, because the next prompt would be computed
    on top of it. So blocks of generated tokens have no name in the store, and in vLLM's cache a name of their request's
    own (`ucm.sparse.blocks`).

    Raises:
        ConfigError: If there is no such method, or an option is wrong.
    """
    found = sparse_method_config(vllm_config)
    if found is None:
        return {}
    name, options = found
    method = method_class(name)
    identity = method.identity(options)
    if method.prompts_are_dense(options) and (
        not vllm_config.cache_config.enable_prefix_caching or requests_have_hashers()
    ):
        return {}
    return {KEY: {**identity, "block_size": vllm_config.cache_config.block_size}}


def block_hash_seed(vllm_config: Any) -> bytes:
    """Return a digest of what the configured method makes KV depend on; empty if that is nothing.

    Engines with equal settings have equal digests, in any process, release and order of the options.

    Raises:
        ConfigError: If there is no such method, or an option is wrong.
    """
    identity = method_identity(vllm_config)
    if not identity:
        return b""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).digest()


def seeded(vllm_config: Any, hash_function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that hashes blocks as vLLM's does, together with the method's digest if there is one.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        hash_function: The function that vLLM has chosen: of a tuple of parent hash, tokens and extra keys.
    """
    seed = block_hash_seed(vllm_config)
    if not seed:
        return hash_function

    @functools.wraps(hash_function)
    def with_method(content: Any) -> Any:
        return hash_function((seed, content))

    get_logger(__name__).info(
        "[UCM.Sparse] vLLM's block hashes contain the method's settings (%s…): other engines find these blocks only "
        "with the same settings",
        seed.hex()[:8],
    )
    return with_method


def shares_kv(vllm_config: Any) -> bool:
    """Return whether anything beyond the engine's own prefix cache may find its KV by block hashes."""
    return optional(vllm_config, "kv_transfer_config") is not None or publishes_kv_events(vllm_config)


def needed_groups(method: type[SparseMethod], vllm_config: Any) -> tuple[str, ...]:
    """Return the groups of rewritten modules that a method needs in this engine.

    If others find KV by vLLM's block hashes, and the method changes KV, they include those that change the hashes and
    refuse connectors.
    """
    if not shares_kv(vllm_config) or HASHING in method.needed_hooks or not block_hash_seed(vllm_config):
        return method.needed_hooks
    return (*method.needed_hooks, HASHING)


def require_connectors(method: SparseMethod, connector: Any) -> None:
    """Refuse a connector that would mix KV under the method with other KV, or needs blocks that the method frees.

    Args:
        method: The method's instance on the scheduler's side.
        connector: The scheduler's connector, or None.

    Raises:
        SparseMethodError: Naming the connector, also if it is inside others.
        ConfigError: If `TRUSTED` is not a list of names.
    """
    if connector is None:
        return
    kind, name = type(method), type(method).__name__
    if kind.frees_blocks and not _is_ours(connector):
        raise SparseMethodError(
            f"another KV connector than UCM's may still need blocks that {name} releases",
            where=f"kv_transfer_config: {type(connector).__name__}",
            fix="serve without ucm_sparse_config, or without this connector",
        )
    depends = bool(block_hash_seed(method.vllm_config))
    if not depends and kind.lasting_tokens(method.options, 1) == sys.maxsize:
        return
    known = BY_BLOCK_HASH if depends else BY_BLOCK_HASH | PROMPTS_ALONE
    trusted = trusted_connectors(method.vllm_config)
    for one in _leaves(connector):
        found = type(one).__name__
        if not _is_ours(one) and _path(one) not in known and found not in trusted:
            raise SparseMethodError(
                f"{name} changes the KV of the tokens that it computes, and {found} does not find KV by vLLM's block "
                "hashes, which tell it apart: it would serve KV of other settings as this engine's, and the reverse",
                where=f"kv_transfer_config: {found} ({type(one).__module__})",
                fix="serve without ucm_sparse_config, or with UCM's connector, OffloadingConnector or another one that "
                f"uses these hashes. If all engines that share KV through {found} have the same ucm_sparse_config, "
                f'say so with --additional-config \'{{"{TRUSTED}": ["{found}"], …}}\'',
            )


def trusted_connectors(vllm_config: Any) -> frozenset[str]:
    """Return the classes of connectors for which the operator vouches.

    Raises:
        ConfigError: If the setting is not a list of names.
    """
    additional = optional(vllm_config, "additional_config")
    found = additional.get(TRUSTED, []) if isinstance(additional, dict) else []
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ConfigError(
            "trusted connectors are not a list of names",
            where=f"additional_config.{TRUSTED}: {found!r}",
            fix=f'write {{"{TRUSTED}": ["<class>", …]}}, with the names of the connectors\' classes',
        )
    return frozenset(found)


def _leaves(connector: Any) -> Iterator[Any]:
    """Yield a connector, or those that it consists of."""
    within = inner_connectors(connector) if _path(connector) in CONTAINERS else None
    if within is None:
        yield connector
    else:
        for one in within:
            yield from _leaves(one)


def _is_ours(connector: Any) -> bool:
    return type(connector).__module__.startswith(OURS)


def _path(connector: Any) -> str:
    return f"{type(connector).__module__}:{type(connector).__qualname__}"
