"""UCM's KV connectors for vLLM: a prefix cache that outlives the engine.

Only vLLM's connector factory imports this module::

    --kv-transfer-config '{"kv_connector": "UCMConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "ucm.integration.vllm.ucm_connector",
      "kv_connector_extra_config": {"UCM_CONFIG_FILE": "./ucm_config.yaml"}}'

The API is vLLM's ``KVConnectorBase_V1`` from 0.9.1 on; methods that a release does not call are not needed there.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from ucm.clock import SYSTEM
from ucm.compat import ConnectorAbilities, optional, outer_transfer, vllm_module
from ucm.config.load import load_connector_config
from ucm.errors import ConfigError
from ucm.integration.vllm.connector.failures import PromisedBlockLostError, refusals_logged
from ucm.integration.vllm.connector.metadata import SAVED, WeightsReport, is_handed_on
from ucm.integration.vllm.connector.sides import SchedulerSide, WorkerSide
from ucm.integration.vllm.metrics import SeriesSet, client_classes, copied, merge, summary
from ucm.logger import get_logger
from ucm.overlay.activation import check_left_out

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucm.clock import Clock
    from ucm.config.settings import ConnectorConfig
    from ucm.integration.vllm.connector.events import Stored
    from ucm.integration.vllm.connector.metadata import BlockMoves, StepPlan
    from ucm.integration.vllm.metrics import StatsData
    from ucm.vllm_types import KVCacheConfig, Request, SchedulerOutput, VllmConfig


def _of_vllm(module: str, name: str) -> Any:
    """Return a class of vLLM's; `object` in releases that lack it, and do not use what is derived from it either."""
    return optional(vllm_module(module), name, object)


_V1 = "distributed.kv_transfer.kv_connector.v1"
#: From 0.30.0 on; the mark of connectors that know hybrid KV-cache groups, from 0.11.1 on; messages from the workers to
#: the scheduler, from 0.18.0 on.
KVConnectorTransferResults = _of_vllm(f"{_V1}.base", "KVConnectorTransferResults")
SupportsHMA = _of_vllm(f"{_V1}.base", "SupportsHMA")
KVConnectorWorkerMetadata = _of_vllm(f"{_V1}.base", "KVConnectorWorkerMetadata")
#: From 0.32.0 on; from 0.11.0 on; from 0.11.1 on.
CacheHitSource = _of_vllm("v1.metrics.cache_hit_source", "CacheHitSource")
KVConnectorStats = _of_vllm(f"{_V1}.metrics", "KVConnectorStats")
KVConnectorPromMetrics = _of_vllm(f"{_V1}.metrics", "KVConnectorPromMetrics")

logger = get_logger(__name__)

#: For our tiers, vLLM's word for where a hit comes from; the other is for servers, and for what no tier is known of.
SOURCES, OTHER_SOURCE = {"dram": "host", "posix": "disk"}, "external_unspecified"
#: From 0.11.0 on vLLM collects the counts; before, each side publishes them itself, once per step.
VLLM_TAKES_STATS = ConnectorAbilities(KVConnectorBase_V1).takes_stats


def _takes_stats(vllm_config: VllmConfig) -> bool:
    """Whether vLLM brings what was counted to the process that logs; the MultiConnector of 0.11.0 breaks that one."""
    if not VLLM_TAKES_STATS or outer_transfer(vllm_config) is None:
        return VLLM_TAKES_STATS
    return optional(vllm_module(f"{_V1}.multi_connector"), "MultiKVConnectorPromMetrics") is not None


class StepMetadata(KVConnectorMetadata):  # type: ignore[misc] # vLLM is untyped here
    """A step's plan, sent to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc, valid-type] # vLLM is untyped here
    """What a worker found out about its weights and has stored, on its way to the scheduler.

    Args:
        report: About the weights; None: nothing new.
        stored: The blocks that have become visible.
    """

    def __init__(self, report: WeightsReport | None, stored: Stored | None = None) -> None:
        self.report = report
        self.stored: Stored = stored or {}

    def aggregate(self, other: WorkerMetadata) -> WorkerMetadata:
        """Merge the reports of two workers."""
        reports = [report for report in (self.report, other.report) if report is not None]
        report = WeightsReport.merged(reports) if reports else None
        names = {**self.stored, **other.stored}
        return WorkerMetadata(
            report, {name: {**self.stored.get(name, {}), **other.stored.get(name, {})} for name in names}
        )


class UCMConnectorStats(KVConnectorStats):  # type: ignore[misc, valid-type] # vLLM is untyped here
    """Counts of one or more ranks, or of one or more steps."""

    def reset(self) -> None:
        """Drop them."""
        self.data: StatsData = {}

    def is_empty(self) -> bool:
        """Return whether there are none."""
        return not self.data

    def aggregate(self, other: UCMConnectorStats) -> UCMConnectorStats:
        """Add others."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, float]:
        """Return what vLLM logs."""
        return summary(self.data)


class UCMPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc, valid-type] # vLLM is untyped here
    """UCM's metrics in the process that answers /metrics; the arguments are vLLM's."""

    def __init__(
        self, vllm_config: VllmConfig, metric_types: Any, labelnames: Iterable[str], per_engine_labelvalues: Any
    ) -> None:
        names = list(labelnames)
        super().__init__(vllm_config, metric_types, names, per_engine_labelvalues)
        used = {kind: metric_types[one] for kind, one in client_classes().items()}
        self._series = SeriesSet(used, names, per_engine_labelvalues)

    def observe(self, transfer_stats_data: StatsData, engine_idx: int = 0) -> None:
        """Export counts that have arrived."""
        self._series.observe(transfer_stats_data, engine_idx)


class UCMConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc, valid-type] # vLLM is untyped here
    """Persistent prefix cache; ``connector`` in its configuration chooses how blocks are moved.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        role: ``SCHEDULER`` or ``WORKER``.
        kv_cache_config: vLLM's ``KVCacheConfig``; releases up to 0.11.0 do not give it.
        clock: Time and threads; vLLM gives none.

    Raises:
        ConfigError: If a setting is wrong, or the model has KV that cannot be restored.
        OverlayImportError: If an overlay is installed but inactive, and vLLM did not check that.
    """

    #: What the configuration says, unless a class below fixes it.
    kind: ClassVar[str | None] = None
    #: Whether chunks are blended.
    blends: ClassVar[bool] = False
    #: What runs in the scheduler's process, and in each worker's.
    scheduler_side: ClassVar[type[SchedulerSide]] = SchedulerSide
    worker_side: ClassVar[type[WorkerSide]] = WorkerSide
    #: Either of them: a connector has one role.
    _side: SchedulerSide | WorkerSide
    _scheduler: SchedulerSide
    _worker: WorkerSide

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: Any,
        kv_cache_config: KVCacheConfig | None = None,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        if kv_cache_config is None:
            super().__init__(vllm_config, role)
        else:
            super().__init__(vllm_config, role, kv_cache_config)
        self._takes_stats = _takes_stats(vllm_config)
        check_left_out()
        with refusals_logged("UCM.Config"):
            settings = self._settings(vllm_config.kv_transfer_config.kv_connector_extra_config, clock=clock)
            given = vllm_config, kv_cache_config, settings, KVConnectorBase_V1
            if role == KVConnectorRole.SCHEDULER:
                self._side = self._scheduler = self.scheduler_side(*given, clock=clock)
            else:
                self._side = self._worker = self.worker_side(*given, clock=clock)

    @classmethod
    def _settings(cls, extra_config: dict[str, Any] | None, *, clock: Clock = SYSTEM) -> ConnectorConfig:
        fixed = {} if cls.kind is None else {"connector": cls.kind}
        found = load_connector_config({**(extra_config or {}), **fixed}, clock=clock)
        if found.blend is not None and not cls.blends:
            raise ConfigError(
                f"{cls.__name__} blends nothing",
                where="blend",
                fix="use BlendConnector, from ucm.integration.vllm.blend_connector; or remove the section",
            )
        if found.kv_head_shards and cls.blends:
            raise ConfigError(
                f"{cls.__name__} stores each rank's part of a chunk as it is",
                where="kv_head_shards",
                fix="remove it, or use UCMConnector",
            )
        return found

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The tokens that the store can give beyond the computed ones, and whether they come between two steps.

        None tells vLLM to ask again with the next step.
        """
        return self._scheduler.hit(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Remember the request's blocks, and what to load into them."""
        self._scheduler.allocated(request, blocks, num_external_tokens)
        logger.debug("[UCM.Load] request %s: %d tokens to load", request.request_id, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Where the tokens of a hit come from, in vLLM's words; releases from 0.32.0 on ask, once per admission."""
        found = Counter[str]()
        for tier, tokens in self._scheduler.tiers(request, num_external_tokens).items():
            found[SOURCES.get(tier, OTHER_SOURCE)] += tokens
        found[OTHER_SOURCE] += num_external_tokens - found.total()  # vLLM wants each token in one place
        return {CacheHitSource(source): tokens for source, tokens in found.items() if tokens}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """The step's plan for the workers."""
        if not self._takes_stats:
            self._scheduler.counters.take_data()
        plan = self._scheduler.plan(scheduler_output)
        if logger.isEnabledFor(logging.DEBUG):
            saves = _count(plan.saves) + _count(plan.late_saves)
            logger.debug("[UCM.Connector] step %d: %d blocks to load, %d to save", plan.step, _count(plan.loads), saves)
        return StepMetadata(plan)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:  # noqa: ARG002
        """Never delays the free: what is still being read is waited for before it is written again.

        A prefill engine's answer says how much of the prompt is saved, for the engine that decodes.
        """
        saved = self._scheduler.finished(request)
        said = bool(saved) and self._scheduler.hands_over and is_handed_on(request)
        return False, {SAVED: saved} if said else None

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """The same, where the model has several KV-cache groups."""
        return self.request_finished(request, block_ids)

    def update_connector_output(self, connector_output: Any) -> None:
        """Process changes of weights that any rank reported."""
        told = optional(connector_output, "kv_connector_worker_meta")
        if isinstance(told, WorkerMetadata):
            if told.report is not None:
                self._scheduler.reported(told.report)
            if self._scheduler.events is not None:
                self._scheduler.events.stored(told.stored)

    def take_events(self) -> Iterable[Any]:
        """The events of the step for routers, of vLLM's own classes."""
        return () if self._scheduler.events is None else self._scheduler.events.take()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """What shows that vLLM's prefix cache was emptied."""
        self._scheduler.bind(gpu_block_pool)

    def reset_cache(self) -> bool:
        """Stop using all blocks stored until now, as after an in-place change of the weights.

        vLLM also calls it when it sleeps, or pauses with ``clear_cache``, without giving the reason.
        """
        self._scheduler.start_anew()
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a lost save is only a later miss."""
        return False

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Find the blocks in the KV caches, and open the stores."""
        with refusals_logged("UCM.Config"):
            self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Called ahead of everything that a step writes, with its metadata (until 0.18.1: with request ids)."""
        if isinstance(kv_connector_metadata, StepMetadata):
            self._worker.begin(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Finish pending transfers of the blocks that the step writes."""
        super().bind_connector_metadata(connector_metadata)
        logger.debug("[UCM.Connector] step %d: begins on this worker", connector_metadata.plan.step)
        self._worker.begin(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load the step's blocks."""
        plan = self._plan()
        self._worker.load(plan, forward_context, **kwargs)
        _log_moves("[UCM.Load] request %s: %d blocks of KV-cache group %d to load", plan.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for one layer, where blocks are loaded layer by layer."""
        self._worker.worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: a step's blocks are saved when it ends, with all their layers."""

    def wait_for_save(self) -> None:
        """Start the step's saves."""
        plan = self._plan()
        self._worker.save(plan)
        _log_moves("[UCM.Save] request %s: %d blocks of KV-cache group %d to save", plan.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        """Return the requests whose loads have ended, and those whose whole load failed; saves delay no request.

        Releases from 0.30.0 on call this instead of ``get_finished``.
        """
        loaded = self._take_loaded()
        failed = self._worker.worker.take_failed_requests()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:  # noqa: ARG002
        """Return the requests whose loads have ended, successfully or not; saves delay no request.

        Raises:
            PromisedBlockLostError: A whole load failed, but a runner that calls this method does not ask for those.
        """
        loaded = self._take_loaded()
        if failed := self._worker.worker.take_failed_requests():
            raise PromisedBlockLostError(
                "promised blocks could not be loaded, and this model runner does not recompute a request's whole load",
                where=f"request {min(failed)}",
                fix="use vLLM's own model runner, or run this model without a UCM connector",
            )
        return None, loaded or None

    def _take_loaded(self) -> set[str]:
        if not self._takes_stats:
            self._worker.counters.take_data()
        self._worker.end()
        return self._worker.worker.take_loaded()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """News about the weights and stored blocks, for the scheduler."""
        report = self._worker.take_report()
        stored = self._worker.worker.take_stored()
        return WorkerMetadata(report, stored) if report is not None or stored else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks whose tokens have to be computed again."""
        return self._worker.worker.take_failed_blocks()

    def shutdown(self) -> None:
        """Finish running transfers."""
        self._side.close()

    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, StepMetadata):
            raise TypeError(f"the worker's connector was given {type(metadata).__name__}")
        return metadata.plan

    # Metrics

    def get_kv_connector_stats(self) -> Any:
        """What this side counted since the last call."""
        data = self._side.counters.take_data() if self._takes_stats else None
        return None if data is None else self.build_kv_connector_stats(data)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Counts that arrived from another process; copied, because vLLM adds later ones to the object."""
        return UCMConnectorStats(data=copied(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: Iterable[str],
        per_engine_labelvalues: Any,
    ) -> Any:
        """UCM's metrics among vLLM's own."""
        return UCMPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer by layer needs Python between the layers, which a full graph skips."""
        with refusals_logged("UCM.Config"):
            return cls._settings(extra_config).connector == "layerwise"


def _count(moves: Iterable[BlockMoves]) -> int:
    """Return the number of blocks to transfer."""
    return sum(len(one.keys) for one in moves)


def _log_moves(text: str, moves: Iterable[BlockMoves]) -> None:
    """Log a line for each request with transfers."""
    if logger.isEnabledFor(logging.DEBUG):
        for one in moves:
            logger.debug(text, one.request_id, len(one.keys), one.group)


class UCMDirectConnector(UCMConnector):
    """Loads all layers before the forward pass; saves in the background after it."""

    kind = "direct"


class UCMLayerWiseConnector(UCMConnector):
    """Loads the next layers while one computes; saves in the background after the forward pass."""

    kind = "layerwise"


class UCMMockConnector(UCMConnector):
    """Like the direct one, with hits capped at ``hit_ratio`` of a request's tokens, for capacity planning."""

    kind = "mock"


# vLLM's MultiConnector finds a connector by its module when it creates it, but only by its registered name when its
# metrics arrive in another process.
for _kind in (UCMConnector, UCMDirectConnector, UCMLayerWiseConnector, UCMMockConnector):
    if _kind.__name__ not in KVConnectorFactory._registry:  # noqa: SLF001 - it refuses a name that is there
        KVConnectorFactory.register_connector(_kind.__name__, __name__, _kind.__name__)
