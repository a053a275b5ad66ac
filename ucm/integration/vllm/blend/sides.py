"""BlendConnector in each process: the sides of the connector for exact prefixes, extended by its own parts.

Engines that blending does not support are refused, by vLLM's configuration; each error says what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.clock import SYSTEM
from ucm.compat import hashes_are_bytes, leave_out, optional, runs_micro_batches
from ucm.config.settings import BlendSettings
from ucm.integration.vllm.blend.caches import OTHER, LayerCaches
from ucm.integration.vllm.blend.scheduler import AT_ONCE, OF_PIECES, PIECES, BlendScheduler
from ucm.integration.vllm.blend.worker import BlendWorker, ChunkSaves
from ucm.integration.vllm.connector.failures import UnsupportedModelError
from ucm.integration.vllm.connector.identity import running_model
from ucm.integration.vllm.connector.metadata import geometries_of, geometry_record
from ucm.integration.vllm.connector.prefix_cache import left_alone
from ucm.integration.vllm.connector.sides import SchedulerSide, WorkerSide, create_slab
from ucm.integration.vllm.connector.staging import Stager
from ucm.integration.vllm.sparse.config import sparse_method_config
from ucm.logger import get_logger
from ucm.store.factory import opening_store

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping, Sequence

    from ucm.clock import Clock
    from ucm.config.settings import ConnectorConfig
    from ucm.integration.vllm.connector.metadata import StepPlan, WeightsReport
    from ucm.integration.vllm.connector.transfer_worker import TransferWorker
    from ucm.vllm_types import KVCacheConfig, Request, SchedulerOutput, VllmConfig

#: The values of ``cache_dtype`` with which KV is stored as the model computes it.
PLAIN = ("auto", "float16", "half", "bfloat16", "float32", "float")
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


class BlendSchedulerSide(SchedulerSide):
    """The side in the scheduler's process; its arguments are those of `SchedulerSide`.

    Raises:
        UnsupportedModelError: If nothing can be blended in this engine, or it has other connectors.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig | None,
        settings: ConnectorConfig,
        connector_base: type,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        super().__init__(vllm_config, kv_cache_config, settings, connector_base, clock=clock)
        if not self.hands_over:
            raise UnsupportedModelError(
                "the other connectors would save blended KV as exact",
                where="kv_transfer_config",
                fix="name BlendConnector, which also loads and saves exact prefixes, as the engine's only connector",
            )
        require_engine(vllm_config, self._groups.groups)
        # A piece is larger than most blocks, and all rows of a slab have one size.
        self._chunk_slab = create_slab(vllm_config, settings, self._groups, self._ranks, clock=clock)
        self._chunks = Stager(
            PIECES,
            self._chunk_slab,
            settings.staging_deadline,
            self._config.rest_seconds,
            threads=AT_ONCE,
            clock=clock,
        )
        self.blending = BlendScheduler(
            settings.blend or BlendSettings(),
            self._groups.groups[0].block_size,
            self._chunks,
            self,
        )

    def hit(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens of an exact hit, or of a blended one where that reaches farther."""
        exact, between_steps = super().hit(request, num_computed_tokens)
        if exact is None:
            return None, False
        blended = self.blending.matched(request, num_computed_tokens, exact)
        # vLLM runs a step's loads ahead of its forward only where they belong to that step.
        return (blended, False) if blended != 0 else (exact, between_steps)

    def allocated(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Remember the request's blocks, and what to fill them with."""
        is_blended = self.blending.allocated(request, num_external_tokens)
        super().allocated(request, blocks, 0 if is_blended else num_external_tokens)
        if is_blended:  # KV computed after blended KV is approximate, too
            self.exclude(request)

    def tiers(self, request: Request, num_tokens: int) -> Counter[str]:
        """Return where the first tokens of a request's hit come from, exact or blended."""
        blended = self.blending.tiers(request, num_tokens)
        return super().tiers(request, num_tokens) if blended is None else blended

    def plan(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """Return the workers' part of a step; the blocks that blending writes are written by the step."""
        plan = super().plan(scheduler_output)
        plan.blend = found = self.blending.plan(scheduler_output)
        found.slab = plan.slab and self._chunk_slab.address
        written = self.blending.written(found)
        plan.fresh_block_ids |= written
        plan.saves += self.blending.saves(scheduler_output)
        plan.late_saves = left_alone(plan.late_saves, written, self.counters)
        return plan

    def finished(self, request: Request) -> int:
        """End a request."""
        self.blending.finished(request)
        return super().finished(request)

    def reported(self, report: WeightsReport) -> bool:
        """Process the workers' report of their weights and models."""
        if report.refused:
            self.blending.off = "gate"
        return super().reported(report)

    def start_anew(self) -> None:
        """Use keys from now on that were never used before."""
        super().start_anew()
        self.blending.start_anew()

    def close(self) -> None:
        """Close the stores."""
        self._chunks.close()
        super().close()

    def _begin(self, records: dict[int, dict[str, Any]]) -> None:
        super()._begin(records)
        if not records:
            self.blending.off = "no slab"
            get_logger(__name__).warning("[UCM.Blend] no request is blended, because of workers on other hosts")
        elif self.stager.has_begun:
            (tags,), geometries = self._tags.values(), geometries_of(records, {OF_PIECES: self._ranks})[OF_PIECES]
            self._stores[OF_PIECES] = [
                opening_store(self._config, f"{self.namespace}/{CHUNKS}/{tag}", geometry, clock=self._clock)
                for tag, geometry in zip(tags, geometries, strict=True)
            ]
            self._chunks.begin({0: self._stores[OF_PIECES]}, {0: geometries})


class BlendWorkerSide(WorkerSide):
    """The side in a worker's process; its arguments are those of `WorkerSide`."""

    _caches: LayerCaches | None = None
    _blending: BlendWorker | None = None

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Also find the model and its layers; must be called by the runner.

        Raises:
            UnsupportedModelError: If a layer cannot be blended.
        """
        super().register(kv_caches)
        self._find_layers(kv_caches)

    def begin(self, plan: StepPlan) -> None:
        """Begin a step; the slab's address comes with the first ones, maybe before the namespace is known."""
        super().begin(plan)
        if self._blending is not None and plan.blend is not None and plan.blend.slab is not None:
            self._blending.attach(plan.blend.slab)

    def load(self, plan: StepPlan, forward_context: Any, **given: Any) -> None:
        """Load a step's blocks, and blend, within the step's forward context."""
        super().load(plan, forward_context, **given)
        if not plan.namespace or plan.blend is None or self._blending is None or self._caches is None:
            return
        attn_metadata = given.get("attn_metadata")
        self._blending.blend(
            plan.blend,
            forward_context.attn_metadata if attn_metadata is None else attn_metadata,
            usable=self.is_valid(plan),
        )
        self.report.refused = self._blending.refused

    def close(self) -> None:
        """Finish pending saves, and close the stores."""
        if self._blending is not None:
            self._blending.close()
        super().close()

    def _create_worker(self, namespace: str) -> TransferWorker:
        worker, config = super()._create_worker(namespace), self._settings.store.as_store_config()
        if self._blending is not None and self._caches is not None:
            where = f"{namespace}/{CHUNKS}/{self._tag(self._groups.groups[0])}"
            store = opening_store(config, where, self._caches.geometry, clock=self._clock)
            saves = ChunkSaves(self._caches, self._blending, store, config.save_queue_bytes, clock=self._clock)
            saves.place = self._rank
            worker.groups[OF_PIECES, 0] = saves
        return worker

    def _find_layers(self, kv_caches: Mapping[str, Any]) -> None:
        config = self._vllm_config
        model = running_model()
        if model is None:
            raise UnsupportedModelError(
                "the connector cannot reach the model",
                where=f"platform of {config.model_config.model!r}",
                fix="use UCMConnector with this runner",
            )
        self._caches = LayerCaches(config, kv_caches, model)
        self._blending = BlendWorker(
            self._caches,
            model,
            self._settings.blend or BlendSettings(),
            self.counters,
            most_tokens=int(config.scheduler_config.max_num_batched_tokens),
            rank=self._rank,
            name=str(config.model_config.model),
            clock=self._clock,
        )

    def _geometries(self) -> dict[int, dict[str, Any]]:
        pieces = {} if self._caches is None else {OF_PIECES: geometry_record([self._rank], self._caches.geometry)}
        return super()._geometries() | pieces
