"""UCM's KV connector for prompts assembled from chunks in changing orders.

Only vLLM's connector factory imports this module::

    --kv-transfer-config '{"kv_connector": "BlendConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "ucm.integration.vllm.blend_connector",
      "kv_connector_extra_config": {"UCM_CONFIG_FILE": "./ucm_config.yaml"}}'

It extends `UCMDirectConnector`, which loads exact prefixes, by reusing stored chunks anywhere in the rest of a prompt;
docs/blend.md describes the costs and losses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from ucm.clock import SYSTEM
from ucm.config.settings import BlendSettings
from ucm.integration.vllm.blend.sides import BlendSchedulerSide, BlendWorkerSide
from ucm.integration.vllm.connector.failures import refusals_logged
from ucm.integration.vllm.ucm_connector import StepMetadata, UCMDirectConnector, side_of

if TYPE_CHECKING:
    from collections import Counter

    from ucm.clock import Clock
    from ucm.integration.vllm.blend.scheduler import BlendPlan
    from ucm.integration.vllm.connector.metadata import StepPlan
    from ucm.vllm_types import KVCacheConfig, Request, SchedulerOutput, VllmConfig


class BlendMetadata(StepMetadata):
    """A step's plan, with the stretches to blend and the chunks to save."""

    def __init__(self, plan: StepPlan, blend: BlendPlan) -> None:
        super().__init__(plan)
        self.blend = blend


class BlendConnector(UCMDirectConnector):
    """Exact prefixes, and chunks anywhere in a prompt.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        role: ``SCHEDULER`` or ``WORKER``.
        kv_cache_config: vLLM's ``KVCacheConfig``.
        clock: Time and threads; vLLM gives none.

    Raises:
        ConfigError: If a setting is wrong, or nothing can be blended in this engine; the message says why.
    """

    blends = True

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: Any,
        kv_cache_config: KVCacheConfig | None = None,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config, clock=clock)
        self._blend_scheduler: BlendSchedulerSide | None = None
        self._blend_worker: BlendWorkerSide | None = None
        with refusals_logged("UCM.Config"):
            settings = self._settings(vllm_config.kv_transfer_config.kv_connector_extra_config, clock=clock)
            blend = settings.blend or BlendSettings()
            if role == KVConnectorRole.SCHEDULER:
                self._blend_scheduler = BlendSchedulerSide(
                    vllm_config, kv_cache_config, settings, blend, self._scheduler, clock=clock
                )
            else:
                self._blend_worker = BlendWorkerSide(
                    vllm_config, kv_cache_config, settings, blend, self._worker, clock=clock
                )

    @property
    def _planning(self) -> BlendSchedulerSide:
        return side_of(self._blend_scheduler)

    @property
    def _filling(self) -> BlendWorkerSide:
        return side_of(self._blend_worker)

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The tokens of an exact hit, or of a blended one where that reaches farther."""
        exact, between_steps = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if exact is None:
            return None, False
        self._planning.take_note()
        blended = self._planning.scheduler.matched(request, num_computed_tokens, exact)
        # vLLM runs a step's loads ahead of its forward only where they belong to that step.
        return (blended, False) if blended != 0 else (exact, between_steps)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Remember the request's blocks, and what to fill them with."""
        if self._planning.scheduler.allocated(request, blocks, num_external_tokens):
            super().update_state_after_alloc(request, blocks, 0)
            # KV computed after blended KV is approximate, too.
            self._scheduler.scheduler.exclude(request)
        else:
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def _tiers(self, request: Request, num_tokens: int) -> Counter[str]:
        blended = self._planning.scheduler.tiers(request, num_tokens)
        return super()._tiers(request, num_tokens) if blended is None else blended

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> BlendMetadata:
        """The step's plan for the workers."""
        plan = super().build_connector_meta(scheduler_output).plan
        return BlendMetadata(plan, self._planning.plan(scheduler_output, plan))

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Drop the request's state."""
        self._planning.scheduler.finished(request)
        return super().request_finished(request, block_ids)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Also find the layers and their rotary embeddings."""
        super().register_kv_caches(kv_caches)
        with refusals_logged("UCM.Config"):
            self._filling.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load the step's blocks, and blend."""
        super().start_load_kv(forward_context, **kwargs)
        metadata = self._get_connector_metadata()
        if isinstance(metadata, BlendMetadata):
            given = kwargs.get("attn_metadata")
            attn_metadata = forward_context.attn_metadata if given is None else given
            self._filling.begin(metadata.plan, metadata.blend, attn_metadata)

    def wait_for_save(self) -> None:
        """Start the step's saves."""
        super().wait_for_save()
        metadata = self._get_connector_metadata()
        if isinstance(metadata, BlendMetadata):
            self._filling.save(metadata.plan, metadata.blend)

    def shutdown(self) -> None:
        """Finish what is under way."""
        if self._blend_worker is not None:
            self._blend_worker.close()
        if self._blend_scheduler is not None:
            self._blend_scheduler.close()
        super().shutdown()


class UCMBlendConnector(BlendConnector):
    """`BlendConnector` under UCM's name."""
