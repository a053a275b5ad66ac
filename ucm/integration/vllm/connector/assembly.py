"""Putting the parts together: one side in the scheduler's process, one in each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.config.load import load_connector_config
from ucm.hashing.block_keys import BlockKeys
from ucm.hashing.model_identity import model_identity, namespace
from ucm.hashing.rank_geometry import must_save, rank_tag, rank_tags
from ucm.integration.vllm.connector.commit_gate import CommitGate
from ucm.integration.vllm.connector.device_memory import DeviceMemory
from ucm.integration.vllm.connector.engine_facts import (
    batches_in_flight,
    drafts_look_ahead,
    load_policy,
    ranks,
    refuse_what_cannot_work,
)
from ucm.integration.vllm.connector.groups import cache_groups
from ucm.integration.vllm.connector.holding import BlockHolder
from ucm.integration.vllm.connector.host_memory import HostMemory
from ucm.integration.vllm.connector.layerwise import LayerWiseWorker
from ucm.integration.vllm.connector.lookup import PrefixLookup
from ucm.integration.vllm.connector.scheduler import PlanningOptions, PrefixCacheScheduler
from ucm.integration.vllm.connector.staged_transfer import StagedTransfer
from ucm.integration.vllm.connector.transfer import HostTransfer
from ucm.integration.vllm.connector.worker import TransferWorker
from ucm.integration.vllm.metrics import create_counters
from ucm.logger import get_logger
from ucm.store.factory import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.config.settings import ConnectorConfig
    from ucm.hashing.model_identity import ModelIdentity
    from ucm.integration.vllm.connector.groups import CacheGroup
    from ucm.integration.vllm.connector.metadata import StepPlan
    from ucm.integration.vllm.connector.transfer import GroupTransfer


def connector_settings(vllm_config: Any, kind: str | None) -> ConnectorConfig:
    """The connector's settings.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kind: How blocks are moved, where the connector's class says it; None leaves it to the settings.
    """
    given = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    if kind is not None:
        given["connector"] = kind
    return load_connector_config(given)


def engine_identity(vllm_config: Any, settings: ConnectorConfig) -> ModelIdentity:
    """What the engine's blocks depend on; a sparse method's options among it, for it changes what later tokens see."""
    sparse = settings.ucm_sparse_config
    return model_identity(vllm_config, more={"ucm_sparse_config": sparse} if sparse else None)


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
        transfer = vllm_config.kv_transfer_config
        if hasattr(transfer, "kv_load_failure_policy"):
            # vLLM's own default ends a request whose blocks cannot be loaded; ours computes them.
            transfer.kv_load_failure_policy = settings.load_failure
        groups = cache_groups(vllm_config, kv_cache_config)
        identity = engine_identity(vllm_config, settings)
        self.namespace = namespace(identity)
        config = settings.store.as_store_config()
        stores = {
            group.index: [
                open_store(config, f"{self.namespace}/{tag}", None)
                for tag in rank_tags(vllm_config, group.index, spec=group.spec)
            ]
            for group in groups.groups
        }
        self._stores = [store for of_group in stores.values() for store in of_group]
        self.block_pool: Any = None
        self.counters = create_counters(vllm_config, settings)
        self._keys = BlockKeys(vllm_config, identity.digest)
        self.policy = load_policy(connector_base, vllm_config, len(groups.groups), settings.connector)
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
            ),
        )
        get_logger().info("[UCM.Connector] namespace %s, %d stores to look up", self.namespace, len(self._stores))

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

    def take_stats(self) -> Any:
        """What was counted since the last call; None for nothing."""
        return self.counters.take()

    def close(self) -> None:
        """Close the stores."""
        self.counters.close()
        for store in self._stores:
            store.close()


class WorkerSide:
    """The connector in a worker's process.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``, None in releases that do not give it.
        settings: The connector's settings.
        connector_base: vLLM's connector class.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorConfig, connector_base: type) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._connector_base = connector_base
        self.counters = create_counters(vllm_config, settings)
        self._mover: TransferWorker | None = None

    @property
    def mover(self) -> TransferWorker:
        """What moves the blocks; there once the KV caches are."""
        if self._mover is None:
            raise RuntimeError("vLLM asked for a transfer before it registered its KV caches")
        return self._mover

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Locate the blocks and open the stores.

        Args:
            kv_caches: vLLM's KV-cache tensors by layer name.
        """
        config = self._vllm_config
        groups = cache_groups(config, self._kv_cache_config)
        # Without that configuration, the number of blocks is known to the worker too late.
        blocks = None if self._kv_cache_config is None else self._kv_cache_config.num_blocks
        identity = namespace(engine_identity(config, self._settings))
        transfers: dict[int, GroupTransfer] = {}
        for group in groups.groups:
            tag = rank_tag(config, group.index, spec=group.spec)
            transfers[group.index] = self._transfer(group, kv_caches, blocks, f"{identity}/{tag}")
        policy = load_policy(self._connector_base, config, len(groups.groups), self._settings.connector)
        kind = LayerWiseWorker if self._settings.connector == "layerwise" else TransferWorker
        self._mover = kind(
            transfers,
            CommitGate(ranks(config), batches_in_flight(config)),
            self.counters,
            places={
                group.index: rank_tags(config, group.index, spec=group.spec).index(
                    rank_tag(config, group.index, spec=group.spec)
                )
                for group in groups.groups
            },
            saves={group.index for group in groups.groups if must_save(config, spec=group.spec)},
            recovers=policy.recovers,
            between_steps=policy.between_steps,
            background=policy.background,
        )
        if isinstance(self._mover, LayerWiseWorker):
            self._mover.overlaps = self._runs_between_layers(kv_caches)
        size = sum(transfer.block_bytes for transfer in transfers.values())
        get_logger().info(
            "[UCM.Connector] %s: %d layers, %d bytes per block of tokens, namespace %s",
            self._settings.connector,
            sum(len(transfer.layer_names) for transfer in transfers.values()),
            size,
            identity,
        )

    def _transfer(
        self,
        group: CacheGroup,
        kv_caches: Mapping[str, Any],
        num_blocks: int | None,
        namespace: str,
    ) -> GroupTransfer:
        """A group's way to its store: in place where the KV cache lies in host memory, else through staging memory."""
        config = self._settings.store.as_store_config()
        on_host = all(kv_cache.device.type == "cpu" for kv_cache in kv_caches.values())
        about = {"layout": str(getattr(self._kv_cache_config, "kv_cache_layout", None))}
        memory = (HostMemory if on_host else DeviceMemory)(group, kv_caches, num_blocks, about)
        store = open_store(config, namespace, memory.geometry)
        self.counters.watch(store)
        return HostTransfer(memory, store) if isinstance(memory, HostMemory) else StagedTransfer(memory, store)

    def _runs_between_layers(self, kv_caches: Mapping[str, Any]) -> bool:
        """Whether the layers of a step that loads are never replayed as one graph; vLLM can be told from 0.17.1 on."""
        on_host = all(kv_cache.device.type == "cpu" for kv_cache in kv_caches.values())
        return on_host or hasattr(self._connector_base, "requires_piecewise_for_cudagraph")

    def begin(self, plan: StepPlan) -> None:
        """Before a step."""
        if self._mover is not None:
            self._mover.begin(plan)

    def take_stats(self) -> Any:
        """What was counted since the last call; None for nothing."""
        return self.counters.take()

    def close(self) -> None:
        """Finish what is under way."""
        if self._mover is not None:
            self._mover.close()
        self.counters.close()
