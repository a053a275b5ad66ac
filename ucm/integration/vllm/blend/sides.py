"""BlendConnector in each process: its own parts, connected to those of the connector for exact prefixes.

Engines that blending does not support are refused, by vLLM's configuration; each error says what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.background import call_within
from ucm.clock import SYSTEM
from ucm.compat import (
    batches_in_flight,
    hashes_are_bytes,
    leave_out,
    optional,
    rank_of,
    runs_micro_batches,
)
from ucm.hashing.rank_geometry import Parallelism, rank_tag, rank_tags
from ucm.integration.vllm.blend.caches import LayerCaches
from ucm.integration.vllm.blend.scheduler import AT_ONCE, PIECES, BlendScheduler
from ucm.integration.vllm.blend.worker import BlendWorker
from ucm.integration.vllm.connector.failures import UnsupportedModelError
from ucm.integration.vllm.connector.identity import running_model
from ucm.integration.vllm.connector.kv_cache import cache_groups
from ucm.integration.vllm.connector.prefix_cache import left_alone
from ucm.integration.vllm.connector.saving import Saver
from ucm.integration.vllm.connector.sides import create_slab
from ucm.integration.vllm.connector.staging import Stager
from ucm.integration.vllm.connector.transfer_worker import CLOSE_SECONDS
from ucm.integration.vllm.sparse.config import sparse_method_config
from ucm.store.factory import opening_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.clock import Clock
    from ucm.config.settings import BlendSettings, ConnectorConfig
    from ucm.integration.vllm.blend.scheduler import BlendPlan
    from ucm.integration.vllm.connector.metadata import StepPlan
    from ucm.integration.vllm.connector.sides import SchedulerSide, WorkerSide
    from ucm.store.base import BlockGeometry, KVStore

#: The values of ``cache_dtype`` with which KV is stored as the model computes it.
PLAIN = ("auto", "float16", "half", "bfloat16", "float32", "float")
OTHER = "use UCMConnector, which loads exact prefixes, for this model"
#: The attributes of a model's configuration for layers that do not rotate their keys.
UNROTATED = ("no_rope_layers", "no_rope_layer_interval", "nope_layer_interval", "nope_layers")

#: The part of the namespace, below the engine's, for position-free KV of chunks; exact lookups never read it.
CHUNKS = "chunks"


def require_engine(vllm_config: Any, groups: Sequence[Any]) -> None:
    """Refuse an engine in which no request can be blended.

    Raises:
        UnsupportedModelError: For the first obstacle.
    """
    _refuse_model(vllm_config.model_config, groups)
    _refuse_parallel(vllm_config)
    if sparse_method_config(vllm_config) is not None:
        raise UnsupportedModelError(
            "blending and a sparse method cannot be combined: each decides which tokens may be read",
            where="ucm_sparse_config",
            fix="leave one of the two out",
        )
    if optional(vllm_config, "speculative_config") is not None:
        raise UnsupportedModelError(
            "blending fills only the model's KV cache, not that of a draft model",
            where="speculative_config",
            fix="start vLLM without --speculative-config, or use UCMConnector",
        )
    if optional(vllm_config, "lora_config") is not None:
        raise UnsupportedModelError(
            "vLLM maps adapters to the rows of a step, which the forward passes of blending do not have",
            where="lora_config",
            fix="start vLLM without --enable-lora, or use UCMConnector",
        )
    cache = vllm_config.cache_config
    if cache.cache_dtype not in PLAIN:
        raise UnsupportedModelError(
            f"keys stored as {cache.cache_dtype!r} cannot be rotated to another position",
            where="cache_config.cache_dtype",
            fix="start vLLM with --kv-cache-dtype auto, or use UCMConnector",
        )
    if cache.enable_prefix_caching and not hashes_are_bytes():
        raise UnsupportedModelError(
            "before vLLM 0.11.0, UCM cannot change the hashes of a request's blocks in vLLM's prefix cache: others "
            "would find blended KV as exact",
            where="cache_config.enable_prefix_caching",
            fix="start vLLM with --no-enable-prefix-caching, or use a newer one",
        )


def require_alone(vllm_config: Any) -> None:
    """Refuse to be one of several connectors, because the others would save blended KV under exact keys.

    vLLM gives each connector of a ``MultiConnector`` its own configuration. The engine's configuration is available
    while its workers create their connectors.

    Args:
        vllm_config: vLLM's ``VllmConfig`` that this connector was given, in a worker.

    Raises:
        UnsupportedModelError: If the engine's own configuration names another connector.
    """
    try:
        from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415 - ucm imports without vLLM
    except ImportError:
        return
    outer = optional(get_current_vllm_config_or_none(), "kv_transfer_config.kv_connector")
    if outer is not None and outer != vllm_config.kv_transfer_config.kv_connector:
        raise UnsupportedModelError(
            "the other connectors would save blended KV as exact",
            where=f"kv_transfer_config.kv_connector: {outer}",
            fix="name BlendConnector, which also loads and saves exact prefixes, as the engine's only connector",
        )


def _refuse_model(model: Any, groups: Sequence[Any]) -> None:
    where = f"model {model.model!r}"
    text = optional(model, "hf_text_config")
    obstacles = {
        "blending does not serve models that generate no text": optional(model, "runner_type", "generate")
        not in {"generate", "auto"},
        "blending does not serve latent attention (MLA)": model.use_mla,
        "blending does not serve multimodal models": optional(model, "is_multimodal_model", False),
        "blending does not serve encoder-decoder models": model.is_encoder_decoder,
        "blending does not serve positions of several dimensions (mrope)": optional(model, "uses_mrope", False)
        or optional(model, "uses_xdrope_dim", 0),
        "blending does not serve models that mix attention with other layers": optional(model, "is_hybrid", False),
        "blending does not serve models that attend within chunks": optional(model, "attention_chunk_size"),
        "blending does not serve models in which some layers do not rotate their keys": any(
            optional(text, name) for name in UNROTATED
        ),
        "blending does not serve models with sliding windows, or several kinds of attention": len(groups) != 1
        or not groups[0].needs_all,
    }
    for what, there in obstacles.items():
        if there:
            raise UnsupportedModelError(what, where=where, fix=OTHER)


def _refuse_parallel(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if int(optional(parallel, name, 1) or 1) > 1:
            raise UnsupportedModelError(
                "the forward passes of blending run only on the ranks of one tensor-parallel group",
                where=f"parallel_config.{name} = {optional(parallel, name)}",
                fix=f"start vLLM with --{name.replace('_', '-')} 1, or use UCMConnector",
            )
    if runs_micro_batches(vllm_config):
        where, options = leave_out(parallel, "enable_dbo", "ubatch_size")
        raise UnsupportedModelError(
            "blending does not serve micro-batches, which split a step's rows",
            where=f"parallel_config: {where}",
            fix=f"start vLLM without {options}",
        )


class BlendSchedulerSide:
    """The side in the scheduler's process.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``, None in releases that do not pass it.
        settings: The connector's settings.
        blend: The settings of ``blend``.
        exact: The scheduler side of the connector for exact prefixes.
        clock: Time and threads.

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
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        groups = cache_groups(vllm_config, kv_cache_config)
        require_engine(vllm_config, groups.groups)
        self._exact = exact
        self._config = settings.store.as_store_config()
        group = groups.groups[0]
        self._tags = rank_tags(vllm_config, group.index, spec=group.spec)
        self._stores: list[KVStore] = []
        self._epoch = 0
        transfer = vllm_config.kv_transfer_config
        slab = create_slab(vllm_config, settings, groups, len(self._tags), clock=clock)
        self.scheduler = BlendScheduler(
            blend,
            group.block_size,
            slab,
            Stager(PIECES, slab, settings.staging_deadline, self._config.rest_seconds, threads=AT_ONCE, clock=clock),
            exact.counters,
            batches=batches_in_flight(vllm_config),
            loads=transfer.is_kv_consumer,
            may_save=lambda request: transfer.is_kv_producer and not exact.scheduler.is_excluded(request),
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
        plan.looks |= bool(found.blends or found.saves)
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
            call_within(store.close, "ucm-close", CLOSE_SECONDS, clock=self._clock)

    def _open(self, geometries: Sequence[BlockGeometry]) -> list[KVStore]:
        where = f"{self._exact.namespace}/{CHUNKS}"
        self._stores = [
            opening_store(self._config, f"{where}/{tag}", geometry, clock=self._clock)
            for tag, geometry in zip(self._tags, geometries, strict=True)
        ]
        return self._stores


class BlendWorkerSide:
    """The side in a worker's process; its arguments are those of `BlendSchedulerSide`, with the exact worker side.

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
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        require_alone(vllm_config)
        self._vllm_config = vllm_config
        self._group = cache_groups(vllm_config, kv_cache_config).groups[0]
        self._config = settings.store.as_store_config()
        self._blend = blend
        self._exact = exact
        self._saver: Saver | None = None
        self._caches: LayerCaches | None = None
        self._worker: BlendWorker | None = None

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Find the model and its layers; must be called by the runner.

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
            rank=Parallelism.of(config).ranks(rank_of(config)).tp,
            name=str(config.model_config.model),
            clock=self._clock,
        )

    def begin(self, step: StepPlan, plan: BlendPlan, attn_metadata: Any) -> None:
        """Blend before a step's forward pass, within its forward context."""
        if self._worker is None or self._caches is None:
            return
        if self._saver is None and step.namespace:
            tag = rank_tag(self._vllm_config, self._group.index, spec=self._group.spec)
            where = f"{step.namespace}/{CHUNKS}/{tag}"
            geometry = self._caches.geometry
            store = opening_store(self._config, where, geometry, clock=self._clock)
            self._saver = Saver(store, geometry.nbytes, self._config.save_queue_bytes, clock=self._clock)
        self._worker.begin(step, plan, self._saver)
        self._worker.blend(plan, attn_metadata, usable=self._unchanged(step))

    def save(self, step: StepPlan, plan: BlendPlan) -> None:
        """Save chunks after a step's forward pass."""
        if self._worker is not None and self._unchanged(step):
            self._worker.save(plan)

    def close(self) -> None:
        """Finish pending saves, and close the store."""
        if self._worker is not None:
            self._worker.close()
        if self._saver is not None:
            self._saver.close()
            call_within(self._saver.store.close, "ucm-close", CLOSE_SECONDS, clock=self._clock)

    def _unchanged(self, step: StepPlan) -> bool:
        """Return whether the weights, and the authentication key, are those for which the step was planned."""
        return step.epoch > self._exact.report.changed and self._exact.has_key_of(step)
