"""BlendConnector in each process: its own parts, connected to those of the connector for exact prefixes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ucm.background import call_within
from ucm.hashing.rank_geometry import Parallelism, rank_tag, rank_tags
from ucm.integration.vllm.blend.caches import LayerCaches
from ucm.integration.vllm.blend.requirements import require_alone, require_engine
from ucm.integration.vllm.blend.scheduler import BlendScheduler
from ucm.integration.vllm.blend.staging import ChunkStager
from ucm.integration.vllm.blend.worker import BlendWorker
from ucm.integration.vllm.connector.failures import UnsupportedModelError
from ucm.integration.vllm.connector.groups import cache_groups
from ucm.integration.vllm.connector.live_weights import running_model
from ucm.integration.vllm.connector.scheduler import left_alone
from ucm.integration.vllm.connector.worker import CLOSE_SECONDS
from ucm.sparse.blocks import batches_in_flight
from ucm.store.factory import OpeningStore, open_store
from ucm.store.memory.slab import Slab, default_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.config.settings import BlendSettings, ConnectorConfig
    from ucm.integration.vllm.blend.metadata import BlendPlan
    from ucm.integration.vllm.connector.metadata import StepPlan
    from ucm.integration.vllm.connector.scheduler_side import SchedulerSide
    from ucm.integration.vllm.connector.worker_side import WorkerSide
    from ucm.store.base import BlockGeometry, KVStore

#: The part of the namespace, below the engine's, for position-free KV of chunks; exact lookups never read it.
CHUNKS = "chunks"


class BlendSchedulerSide:
    """The side in the scheduler's process.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``, None in releases that do not pass it.
        settings: The connector's settings.
        blend: The settings of ``blend``.
        exact: The scheduler side of the connector for exact prefixes.

    Raises:
        UnsupportedModelError: If nothing can be blended in this engine.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: ConnectorConfig,
        blend: BlendSettings,
        exact: SchedulerSide,
    ) -> None:
        groups = cache_groups(vllm_config, kv_cache_config).groups
        require_engine(vllm_config, blend, groups)
        self._exact = exact
        self._config = settings.store.as_store_config()
        group = groups[0]
        self._tags = rank_tags(vllm_config, group.index, spec=group.spec)
        self._stores: list[KVStore] = []
        self._epoch = 0
        transfer = vllm_config.kv_transfer_config
        slab = Slab(settings.staging or default_bytes(), len(self._tags))
        self.scheduler = BlendScheduler(
            blend,
            group.block_size,
            slab,
            ChunkStager(slab, settings.staging_deadline),
            exact.counters,
            batches=batches_in_flight(vllm_config),
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer,
        )
        self._prepared = False
        self.take_note()

    def plan(self, scheduler_output: Any, plan: StepPlan) -> BlendPlan:
        """Plan the workers' part of a step.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput`` of the step.
            plan: The step's plan for exact prefixes; the blocks that blending writes are added to it.
        """
        self.take_note()
        found = self.scheduler.plan(scheduler_output)
        if not self._exact.scheduler.saves:
            found.saves = []
        written = self.scheduler.written(found)
        plan.fresh_block_ids |= written
        plan.looks = bool(found.blends or found.saves)
        plan.late_saves = left_alone(plan.late_saves, written, self._exact.counters)
        return found

    def take_note(self) -> None:
        """Open the stores once the namespace is known, and follow changes of identity of the exact connector."""
        if not self._prepared and self._exact.namespace:
            self._prepared = True
            self.scheduler.prepare(len(self._tags), self._open)
        if self._exact.scheduler.epoch != self._epoch:
            self._epoch = self._exact.scheduler.epoch
            self.scheduler.start_anew()

    def close(self) -> None:
        """Close the stores."""
        self.scheduler.close()
        for store in self._stores:
            call_within(store.close, "ucm-close", CLOSE_SECONDS)

    def _open(self, geometries: Sequence[BlockGeometry]) -> list[KVStore]:
        where = f"{self._exact.namespace}/{CHUNKS}"
        self._stores = [
            open_store(self._config, f"{where}/{tag}", geometry)
            for tag, geometry in zip(self._tags, geometries, strict=True)
        ]
        return self._stores


class BlendWorkerSide:
    """The side in a worker's process.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``, None in releases that do not pass it.
        settings: The connector's settings.
        blend: The settings of ``blend``.
        exact: The worker side of the connector for exact prefixes.

    Raises:
        UnsupportedModelError: If the engine has other connectors.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: ConnectorConfig,
        blend: BlendSettings,
        exact: WorkerSide,
    ) -> None:
        require_alone(vllm_config)
        self._vllm_config = vllm_config
        self._group = cache_groups(vllm_config, kv_cache_config).groups[0]
        self._config = settings.store.as_store_config()
        self._blend = blend
        self._exact = exact
        self._store: KVStore | None = None
        self._caches: LayerCaches | None = None
        self._worker: BlendWorker | None = None

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Find the model and its layers; must be called by the runner.

        Args:
            kv_caches: vLLM's KV-cache tensors by layer name.

        Raises:
            UnsupportedModelError: If a layer cannot be blended.
        """
        config = self._vllm_config
        model = running_model()
        if model is None:
            raise UnsupportedModelError(
                "the connector cannot reach the model",
                where=f"platform of {config.model_config.model!r}",
                fix="use UCMConnector with this runner",
            )
        self._caches = LayerCaches(config, kv_caches, model)
        self._worker = BlendWorker(
            self._caches,
            model,
            self._blend,
            self._exact.counters,
            most_tokens=int(config.scheduler_config.max_num_batched_tokens),
            rank=Parallelism.of(config).ranks(int(getattr(config.parallel_config, "rank", 0))).tp,
            name=str(config.model_config.model),
        )

    def begin(self, step: StepPlan, plan: BlendPlan, attn_metadata: Any) -> None:
        """Blend before a step's forward pass, within its forward context."""
        if self._worker is None or self._caches is None:
            return
        if self._store is None and step.namespace:
            tag = rank_tag(self._vllm_config, self._group.index, spec=self._group.spec)
            where = f"{step.namespace}/{CHUNKS}/{tag}"
            make = partial(open_store, self._config, where, self._caches.geometry)
            self._store = OpeningStore(make, self._config.stuck_seconds)
        self._worker.begin(step, plan, self._store)
        self._worker.blend(plan, attn_metadata, usable=self._unchanged(step))

    def layer_begins(self, layer_name: str) -> None:
        """See `BlendWorker.layer_begins`."""
        if self._worker is not None:
            self._worker.layer_begins(layer_name)

    def save(self, step: StepPlan, plan: BlendPlan) -> None:
        """Save chunks after a step's forward pass."""
        if self._worker is not None and self._unchanged(step):
            self._worker.save(plan)

    def close(self) -> None:
        """Finish pending saves, and close the store."""
        if self._worker is not None:
            self._worker.close()
        if self._store is not None:
            call_within(self._store.close, "ucm-close", CLOSE_SECONDS)

    def _unchanged(self, step: StepPlan) -> bool:
        """Return whether the weights, and the authentication key, are those for which the step was planned."""
        return step.epoch > self._exact.report.changed and self._exact.has_key_of(step)
