"""The connector in the scheduler's process, put together from its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.hashing.block_keys import BlockKeys
from ucm.hashing.model_identity import model_identity, namespace
from ucm.hashing.rank_geometry import rank_tags
from ucm.integration.vllm.config import KEY as SPARSE_KEY
from ucm.integration.vllm.config import sparse_method_config
from ucm.integration.vllm.connector.engine_facts import (
    drafts_look_ahead,
    load_policy,
    refuse_method_without_hooks,
    refuse_what_cannot_work,
    reserves_blocks,
)
from ucm.integration.vllm.connector.groups import cache_groups
from ucm.integration.vllm.connector.holding import BlockHolder
from ucm.integration.vllm.connector.lookup import PrefixLookup
from ucm.integration.vllm.connector.scheduler import PlanningOptions, PrefixCacheScheduler
from ucm.integration.vllm.metrics import create_counters
from ucm.logger import get_logger
from ucm.sparse.factory import method_class
from ucm.sparse.in_flight import batches_in_flight
from ucm.store.factory import open_store
from ucm.store.identity_file import write_identity

if TYPE_CHECKING:
    from ucm.config.settings import ConnectorConfig
    from ucm.hashing.model_identity import ModelIdentity


def engine_identity(vllm_config: Any, settings: ConnectorConfig) -> ModelIdentity:
    """What the engine's blocks depend on; a sparse method's options among it, for it changes what later tokens see.

    Raises:
        ConfigError: As ``model_identity``, and if there is no such sparse method.
    """
    return model_identity(vllm_config, weights_id=settings.weights_id, more=_sparse_method(vllm_config))


def _sparse_method(vllm_config: Any) -> dict[str, Any]:
    """The configured method, wherever that is, with the options that shape the KV of tokens computed under it."""
    found = sparse_method_config(vllm_config)
    if found is None:
        return {}
    name, options = found
    declared = method_class(name).options_type
    beside = declared.beside_kv if declared else frozenset[str]()
    return {SPARSE_KEY: {name: {option: value for option, value in options.items() if option not in beside}}}


class SchedulerSide:
    """The connector in the scheduler's process.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``, None in releases that do not give it.
        settings: The connector's settings.
        connector_base: vLLM's connector class.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorConfig, connector_base: type) -> None:
        refuse_what_cannot_work(vllm_config, kv_cache_config)
        refuse_method_without_hooks(vllm_config)
        transfer = vllm_config.kv_transfer_config
        if hasattr(transfer, "kv_load_failure_policy"):
            # vLLM's own default ends a request whose blocks cannot be loaded; ours computes them.
            transfer.kv_load_failure_policy = settings.load_failure
        groups = cache_groups(vllm_config, kv_cache_config)
        identity = engine_identity(vllm_config, settings)
        self.namespace = namespace(identity)
        config = settings.store.as_store_config()
        tags = {group.index: rank_tags(vllm_config, group.index, spec=group.spec) for group in groups.groups}
        stores = {
            group: [open_store(config, f"{self.namespace}/{tag}", None) for tag in of_group]
            for group, of_group in tags.items()
        }
        for tag in dict.fromkeys(tag for of_group in tags.values() for tag in of_group):
            write_identity(config, f"{self.namespace}/{tag}", identity.to_json())
        self._stores = [store for of_group in stores.values() for store in of_group]
        self.block_pool: Any = None
        self.counters = create_counters(vllm_config, settings)
        for store in self._stores:
            self.counters.watch(store)
        self._keys = BlockKeys(vllm_config, identity.digest)
        self.policy = load_policy(connector_base, vllm_config, len(groups.groups), settings.connector)
        if transfer.is_kv_consumer and not self.policy.recovers:
            get_logger().warning(
                "[UCM.Connector] a block that is lost between lookup and load will stop the engine: %s", self.policy.gap
            )
        self.planner = PrefixCacheScheduler(
            PrefixLookup(groups, stores, self._keys, None if self.policy.recovers else BlockHolder(stores)),
            self.counters,
            PlanningOptions(
                batches=batches_in_flight(vllm_config),
                min_hit_tokens=settings.min_hit_tokens,
                hit_ratio=settings.hit_ratio,
                save_decode_blocks=settings.save_decode_blocks,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
                prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
                reloads_preempted=self.policy.reloads_preempted,
                drops_last_block=drafts_look_ahead(vllm_config),
                namespace=self.namespace,
                room=kv_cache_config.num_blocks - 1 if self.policy.between_steps and not reserves_blocks() else None,
            ),
        )
        count = len(self._stores)
        get_logger().info(
            "[UCM.Connector] namespace %s, %d %s to look up", self.namespace, count, "store" if count == 1 else "stores"
        )

    def load_failed(self, block_ids: set[int]) -> None:
        """Blocks failed to load within a step: nobody may find them, or what was computed behind them, by their hash.

        vLLM's recovery leaves them in its prefix cache, for they are about to be computed; but their request may be
        aborted or preempted before that.
        """
        behind = self.planner.load_failed(block_ids)
        if self.block_pool is not None:
            self.block_pool.evict_blocks(behind)

    def start_anew(self) -> None:
        """Use keys from now on that nobody has used before."""
        self._keys.start_anew()
        self.planner.start_anew()

    def take_stats(self) -> Any:
        """What was counted since the last call; None for nothing."""
        return self.counters.take()

    def close(self) -> None:
        """Close the stores."""
        self.counters.close()
        for store in self._stores:
            store.close()
