"""The worker side of the connector."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ucm.hashing.rank_geometry import must_save, rank_tag, rank_tags
from ucm.integration.vllm import hooks
from ucm.integration.vllm.connector.engine_facts import (
    load_policy,
    ranks,
    runs_micro_batches,
    weights_move,
)
from ucm.integration.vllm.connector.groups import cache_groups
from ucm.integration.vllm.connector.layerwise import LayerWiseWorker
from ucm.integration.vllm.connector.live_weights import LiveAdapters, LiveWeights, running_model
from ucm.integration.vllm.connector.memory import DeviceMemory, HostMemory, tensors_of
from ucm.integration.vllm.connector.metadata import WeightsReport, geometry_record
from ucm.integration.vllm.connector.staged_transfer import StagedTransfer
from ucm.integration.vllm.connector.transfer import GroupTransfer, HostTransfer
from ucm.integration.vllm.connector.worker import TransferWorker
from ucm.integration.vllm.metrics import create_counters
from ucm.logger import get_logger
from ucm.store.factory import OpeningStore, key_fingerprint, open_store
from ucm.store.memory.slab import SlabReader, default_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.config.settings import ConnectorConfig
    from ucm.integration.vllm.connector.groups import CacheGroup
    from ucm.integration.vllm.connector.metadata import StepPlan
    from ucm.store.memory.slab import SlabAddress


#: The log line for each KV-cache group: its number of layers, and a block's tokens and bytes on this rank.
LAYERS = "{} layers in blocks of {} tokens, {} bytes each"


class WorkerSide:
    """The connector in a worker process.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``; None in releases that do not pass it.
        settings: The connector's settings.
        connector_base: vLLM's connector class.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: ConnectorConfig, connector_base: type) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._connector_base = connector_base
        self.counters = create_counters(vllm_config, settings)
        self.counters.watch_method(self._method_figures)
        self._memories: list[HostMemory | DeviceMemory] = []
        self._worker: TransferWorker | None = None
        self._slab = SlabReader()
        self._offered: SlabAddress | None = None
        self._weights: LiveWeights | None = None
        self._adapters: LiveAdapters | None = None
        # Releases whose workers send nothing to the scheduler read their reports from the slab.
        self._reports_by_slab = not hasattr(connector_base, "build_connector_worker_meta")
        self._authentication = key_fingerprint(settings.store.as_store_config())
        self._refusal_said = False
        self._step = 0
        self.report, self._reported = WeightsReport(), WeightsReport()

    @property
    def has_begun(self) -> bool:
        """Whether blocks are transferred: a step has begun and the namespace is known.

        Graph capture and memory profiling happen before any step.
        """
        return self._worker is not None

    @property
    def worker(self) -> TransferWorker:
        """The transfer worker, once ``has_begun``."""
        if self._worker is None:
            raise RuntimeError("vLLM asked for a transfer before it began a step that may have one")
        return self._worker

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Locate the blocks in the KV caches.

        Args:
            kv_caches: vLLM's KV-cache tensors by layer name.

        Raises:
            UnknownLayoutError: If a layer's blocks cannot be located.
        """
        # Without the configuration, a worker learns the number of blocks too late.
        num_blocks = None if self._kv_cache_config is None else self._kv_cache_config.num_blocks
        about = {"layout": str(getattr(self._kv_cache_config, "kv_cache_layout", None))}
        self._on_host = all(
            tensor.device.type == "cpu" for kv_cache in kv_caches.values() for tensor in tensors_of(kv_cache)
        )
        memory = HostMemory if self._on_host else DeviceMemory
        groups = cache_groups(self._vllm_config, self._kv_cache_config).groups
        self._memories = [memory(group, kv_caches, num_blocks, about) for group in groups]
        said = "; ".join(
            LAYERS.format(len(one.layouts), one.group.block_size, one.geometry.nbytes) for one in self._memories
        )
        get_logger(__name__).info("[UCM.Connector] %s: %s", self._settings.connector, said)
        self._adapters = LiveAdapters.of(running_model())
        self._watch_weights()

    def begin(self, plan: StepPlan) -> None:
        """Begin a step; transfers start with the first step whose plan has the namespace."""
        if plan.step != self._step:
            self._step = plan.step
            self._look_at_weights(plan)
            if self._adapters is not None:
                self.report.adapters = self._adapters.replaced()
        if plan.slab is not None and plan.slab != self._offered:
            self._offered = plan.slab
            self._answer(plan.slab)
        if self._reports_by_slab and self._slab.attached:
            report = self.take_report()
            if report is not None and not self._slab.report(report.to_record()):
                self._reports_by_slab = False
                get_logger(__name__).warning(
                    "[UCM.Save] more LoRA adapters were replaced in place than this worker can report; from here on, "
                    "nothing that this engine computes is saved. Restart it to save again"
                )
        if self._worker is None:
            if not plan.namespace:
                return
            self._worker = self._create_worker(plan.namespace)
        if plan.epoch <= self.report.changed or not self.has_key_of(plan):
            self._worker.refuse(plan)
        elif self.report.adapters:
            self._worker.refuse(plan, self.report.adapters)
        self._worker.begin(plan)

    def has_key_of(self, plan: StepPlan) -> bool:
        """Return whether the scheduler that made a plan has the same authentication key; log once if it has not.

        The key's file may differ on this host, or have changed between the starts of the processes. The namespace is
        that of the scheduler's key, so that all others would refuse this worker's blocks.
        """
        if plan.authentication == self._authentication:
            return True
        if not self._refusal_said:
            self._refusal_said = True
            get_logger(__name__).error(
                "[UCM.Connector] this worker neither loads nor saves: the fingerprint of its authentication key is %s, "
                "and the scheduler's is %s; give all hosts the same authentication_key_file and restart the engine",
                self._authentication or "none",
                plan.authentication or "none",
            )
        return False

    def _answer(self, address: SlabAddress) -> None:
        """Open the slab and write this rank's block geometries into it."""
        groups = {
            memory.group.index: geometry_record(self._place(memory.group), memory.geometry) for memory in self._memories
        }
        rank = self._vllm_config.parallel_config.rank % ranks(self._vllm_config)
        if not self._slab.attach(address, rank, {"groups": groups, "authentication": self._authentication}):
            get_logger(__name__).info("[UCM.Load] rank %d cannot open the memory in which blocks are staged", rank)

    def end(self) -> None:
        """End a step."""
        if self._weights is not None:
            self._weights.stepped()

    def take_report(self) -> WeightsReport | None:
        """Return the report about the weights if it has changed since the last call."""
        if self.report == self._reported:
            return None
        self._reported = replace(self.report)
        return self._reported

    def _watch_weights(self) -> None:
        """Begin to watch the weights; must be called by the runner, which has the model."""
        begun = time.monotonic()
        model = None if weights_move(self._vllm_config) else running_model()
        transferred = getattr(self._vllm_config, "weight_transfer_config", None) is not None
        reason = "vLLM moves them, or the connector cannot reach the model"
        try:
            self._weights = None if model is None else LiveWeights(model, thorough=transferred)
        except (RuntimeError, NotImplementedError) as error:  # tensor subclasses may have no storage of their own
            reason = str(error)
        if self._weights is None:
            get_logger(__name__).info(
                "[UCM.Connector] in-place changes of the weights are noticed only after reset_connector=True (%s)",
                reason,
            )
            return
        get_logger(__name__).info(
            "[UCM.Connector] weights are watched for in-place changes (%.2f s)", time.monotonic() - begun
        )

    def _look_at_weights(self, plan: StepPlan) -> None:
        looks = plan.verify or plan.looks or bool(plan.loads or plan.saves or plan.late_saves)
        if looks and (plan.verify or plan.confirmed is not None):
            self.report.looked = plan.step
        if self._weights is None:
            return
        self._weights.step()
        if not looks:
            return
        if self._weights.changed(wholly=plan.verify):
            self.report.changed = plan.epoch
            get_logger(__name__).warning(
                "[UCM.Connector] the weights were changed in place: nothing is loaded or saved under their old identity"
            )

    def _create_worker(self, namespace: str) -> TransferWorker:
        config = self._vllm_config
        groups = [memory.group for memory in self._memories]
        policy = load_policy(self._connector_base, len(groups), self._settings.connector)
        # A layer of a micro-batch is computed before the same layer of the whole batch.
        layer_by_layer = self._settings.connector == "layerwise" and not runs_micro_batches(config)
        kind = LayerWiseWorker if layer_by_layer else TransferWorker
        worker = kind(
            {memory.group.index: self._transfer(memory, namespace) for memory in self._memories},
            self.counters,
            places={group.index: self._place(group) for group in groups},
            saves={group.index for group in groups if must_save(config, spec=group.spec)},
            between_steps=policy.between_steps,
            background=policy.background,
        )
        reported = hasattr(self._connector_base, "build_connector_worker_meta")
        worker.reports_stored = self._settings.kv_events and reported
        worker.counted_group = 0 if config.parallel_config.rank % ranks(config) == 0 else None
        if isinstance(worker, LayerWiseWorker):
            # Steps that load must not replay their layers as one graph; vLLM supports this request from 0.17.1 on.
            worker.overlaps = self._on_host or hasattr(self._connector_base, "requires_piecewise_for_cudagraph")
        return worker

    def _place(self, group: CacheGroup) -> int:
        """Return this rank's index among the ranks with different KV of a group."""
        tags = rank_tags(self._vllm_config, group.index, spec=group.spec)
        return tags.index(rank_tag(self._vllm_config, group.index, spec=group.spec))

    def _transfer(self, memory: HostMemory | DeviceMemory, namespace: str) -> GroupTransfer:
        """Create a group's transfer: in place for a KV cache in host memory, else through staging memory."""
        tag = rank_tag(self._vllm_config, memory.group.index, spec=memory.group.spec)
        config = self._settings.store.as_store_config()
        make = partial(open_store, config, f"{namespace}/{tag}", memory.geometry)
        store = OpeningStore(make, config.stuck_seconds)
        self.counters.watch(store)
        # Every rank copies queued blocks of each group out of the KV cache, so they share the memory.
        room = min(config.save_queue_bytes, default_bytes() // (ranks(self._vllm_config) * len(self._memories)))
        if isinstance(memory, HostMemory):
            return HostTransfer(memory, store, self._slab, room)
        return StagedTransfer(memory, store, self._slab, save_queue_bytes=room)

    def _method_figures(self) -> Mapping[str, float]:
        """Return the figures of a sparse method in this worker."""
        method = hooks.worker_method(self._vllm_config)
        if method is None or self._vllm_config.parallel_config.rank != 0:  # all ranks do the same with a request
            return {}
        return method.figures()

    def take_stats(self) -> Any:
        """Return the counts since the last call; None if there are none."""
        return self.counters.take()

    def close(self) -> None:
        """Finish transfers and close everything."""
        if self._worker is not None:
            self._worker.close()
        self._slab.close()
        self.counters.close()
