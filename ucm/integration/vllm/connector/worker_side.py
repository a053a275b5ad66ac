"""The connector in a worker's process, put together from its parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.hashing.rank_geometry import must_save, rank_tag, rank_tags
from ucm.integration.vllm.connector.commit_gate import CommitGate
from ucm.integration.vllm.connector.device_memory import DeviceMemory
from ucm.integration.vllm.connector.engine_facts import (
    load_policy,
    ranks,
    runs_micro_batches,
)
from ucm.integration.vllm.connector.groups import cache_groups
from ucm.integration.vllm.connector.host_memory import HostMemory
from ucm.integration.vllm.connector.layerwise import LayerWiseWorker
from ucm.integration.vllm.connector.staged_transfer import StagedTransfer
from ucm.integration.vllm.connector.transfer import GroupTransfer, HostTransfer
from ucm.integration.vllm.connector.worker import TransferWorker
from ucm.integration.vllm.metrics import create_counters
from ucm.logger import get_logger
from ucm.sparse.in_flight import batches_in_flight
from ucm.store.factory import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.config.settings import ConnectorConfig
    from ucm.integration.vllm.connector.groups import CacheGroup
    from ucm.integration.vllm.connector.metadata import StepPlan


#: What the log says at the start of each KV-cache group: its layers, and a block's tokens and bytes on this rank.
LAYERS = "{} layers in blocks of {} tokens, {} bytes each"


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
        self._memories: list[HostMemory | DeviceMemory] = []
        self._mover: TransferWorker | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a step was begun; graphs are captured, and memory is profiled, before."""
        return self._mover is not None

    @property
    def mover(self) -> TransferWorker:
        """What moves the blocks; there from the first step on."""
        if self._mover is None:
            raise RuntimeError("vLLM asked for a transfer before it began a step")
        return self._mover

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Locate the blocks.

        Args:
            kv_caches: vLLM's KV-cache tensors by layer name.

        Raises:
            UnknownLayoutError: If a layer's blocks cannot be located.
        """
        # Without that configuration, the number of blocks is known to the worker too late.
        num_blocks = None if self._kv_cache_config is None else self._kv_cache_config.num_blocks
        about = {"layout": str(getattr(self._kv_cache_config, "kv_cache_layout", None))}
        self._on_host = all(kv_cache.device.type == "cpu" for kv_cache in kv_caches.values())
        memory = HostMemory if self._on_host else DeviceMemory
        groups = cache_groups(self._vllm_config, self._kv_cache_config).groups
        self._memories = [memory(group, kv_caches, num_blocks, about) for group in groups]
        said = "; ".join(
            LAYERS.format(len(one.layouts), one.group.block_size, one.geometry.nbytes) for one in self._memories
        )
        get_logger().info("[UCM.Connector] %s: %s", self._settings.connector, said)

    def begin(self, plan: StepPlan) -> None:
        """Before a step; the first one says where the blocks are kept."""
        if self._mover is None:
            self._mover = self._create_mover(plan.namespace)
        self._mover.begin(plan)

    def _create_mover(self, namespace: str) -> TransferWorker:
        config = self._vllm_config
        groups = [memory.group for memory in self._memories]
        policy = load_policy(self._connector_base, config, len(groups), self._settings.connector)
        # A layer of a micro-batch is there, or done, before it is for the whole batch.
        layer_by_layer = self._settings.connector == "layerwise" and not runs_micro_batches(config)
        kind = LayerWiseWorker if layer_by_layer else TransferWorker
        mover = kind(
            {memory.group.index: self._transfer(memory, namespace) for memory in self._memories},
            CommitGate(ranks(config), batches_in_flight(config)),
            self.counters,
            places={group.index: self._place(group) for group in groups},
            saves={group.index for group in groups if must_save(config, spec=group.spec)},
            recovers=policy.recovers,
            between_steps=policy.between_steps,
            background=policy.background,
        )
        mover.counted_group = 0 if config.parallel_config.rank % ranks(config) == 0 else None
        if isinstance(mover, LayerWiseWorker):
            # The layers of a step that loads must not be replayed as one graph; vLLM can be told so from 0.17.1 on.
            mover.overlaps = self._on_host or hasattr(self._connector_base, "requires_piecewise_for_cudagraph")
        return mover

    def _place(self, group: CacheGroup) -> int:
        """This rank's place among those that hold different KV of a group."""
        tags = rank_tags(self._vllm_config, group.index, spec=group.spec)
        return tags.index(rank_tag(self._vllm_config, group.index, spec=group.spec))

    def _transfer(self, memory: HostMemory | DeviceMemory, namespace: str) -> GroupTransfer:
        """A group's way to its store: in place where the KV cache lies in host memory, else through staging memory."""
        tag = rank_tag(self._vllm_config, memory.group.index, spec=memory.group.spec)
        config = self._settings.store.as_store_config()
        store = open_store(config, f"{namespace}/{tag}", memory.geometry)
        self.counters.watch(store)
        if isinstance(memory, HostMemory):
            return HostTransfer(memory, store)
        return StagedTransfer(memory, store, dump_queue_bytes=config.dump_queue_bytes)

    def take_stats(self) -> Any:
        """What was counted since the last call; None for nothing."""
        return self.counters.take()

    def close(self) -> None:
        """Finish what is under way."""
        if self._mover is not None:
            self._mover.close()
        self.counters.close()
