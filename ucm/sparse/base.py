"""The interface of a sparse-attention method.

vLLM runs a request in two kinds of processes, and a method has one instance in each: one beside the scheduler
(EngineCore), one beside each model runner (worker). The two share nothing but what the scheduler side returns from
`SparseMethod.build_metadata`, which travels with the step as ``scheduler_output.ucm_sparse_metadata``.

The division of a step into paired ``begin`` and ``finished`` calls follows the UCM sparse framework (ModelEngine,
unified-cache-management pull request 79); slots, block tables and positions are vLLM's own.

Every method of the base class does nothing and changes nothing, so a method implements what it needs. An exception
raised in one ends the step, as one in vLLM's own code would.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, ClassVar

from ucm.errors import SparseMethodError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from ucm.sparse.attention import AttentionView
    from ucm.sparse.options import MethodOptions

#: The slot count that means: this request is dense, allocate as vLLM does.
INVALID_SLOT = -1


class Role(enum.Enum):
    """The side of the engine that an instance serves."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class SparseMethod:
    """A sparse-attention method; all its methods have neutral defaults.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        role: The side that this instance serves.
        options: The method's own settings, as the operator wrote them.

    Attributes:
        attention: The worker's attention layers; set before any other call on the worker's side.
        options_type: What declares its settings, so that they can be checked without an engine; None if nothing does.
        needed_hooks: The groups of rewritten modules that it cannot do without, as their switches name them.
    """

    attention: AttentionView
    options_type: ClassVar[type[MethodOptions] | None] = None
    needed_hooks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, vllm_config: Any, role: Role, options: Mapping[str, Any]) -> None:
        self.vllm_config = vllm_config
        self.role = role
        self.options = options

    # The scheduler's side: one call per event, in EngineCore.

    def scheduler_started(self, scheduler: Any) -> None:
        """The scheduler exists, vLLM's ``Scheduler``, with its KV-cache manager; called once, before any request."""

    def request_added(self, request: Any) -> None:
        """A new request has entered the queue; not called for further chunks of a streaming one.

        Args:
            request: vLLM's ``Request``.
        """

    def num_slots(self, request: Any, num_new_tokens: int, num_external_computed_tokens: int) -> int:
        """How many slots (tokens' worth of KV) the request shall hold after this step.

        Called right before its allocation, and again in the same step if another request had to be preempted for it,
        so it must not count its calls.

        Args:
            request: vLLM's ``Request``.
            num_new_tokens: Tokens that the step will compute for it.
            num_external_computed_tokens: Tokens whose KV a connector will load; 0 for a running request.

        Returns:
            The slots, or `INVALID_SLOT` for a dense request.
        """
        del request, num_new_tokens, num_external_computed_tokens
        return INVALID_SLOT

    def allocate_slots(
        self, kv_cache_manager: Any, request: Any, num_new_tokens: int, num_slots: int, new_computed_blocks: Any
    ) -> Any:
        """Allocate for a request for which `num_slots` gave a count.

        Args:
            kv_cache_manager: vLLM's ``KVCacheManager``.
            request: vLLM's ``Request``.
            num_new_tokens: Tokens that the step will compute for it.
            num_slots: What `num_slots` returned.
            new_computed_blocks: vLLM's ``KVCacheBlocks`` of a prefix hit, or None.

        Returns:
            vLLM's ``KVCacheBlocks`` that are new in this step, or None if they cannot be had; vLLM then preempts.

        Raises:
            SparseMethodError: If the method gives slot counts but does not allocate.
        """
        del kv_cache_manager, num_new_tokens, new_computed_blocks
        raise SparseMethodError(
            f"{type(self).__name__} asked for {num_slots} slots but does not allocate them",
            where=f"request {request.request_id}",
            fix="implement allocate_slots, or return INVALID_SLOT from num_slots",
        )

    def build_metadata(self, scheduler_output: Any) -> object:
        """What the workers need to know of this step; it must pickle. None sends nothing.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput``, complete but for the connector's metadata.
        """
        del scheduler_output
        return None

    def request_preempted(self, request: Any) -> None:
        """A running request has lost its blocks; it will be computed again from its prompt."""

    def request_freed(self, request: Any) -> None:
        """A request has ended, for whatever reason; its blocks are about to be freed."""

    # The worker's side: in every worker, in this order within a step.

    def worker_started(self) -> None:
        """`attention` is there, the model not yet; called once: the place to refuse an engine."""

    def layer_seen(self, layer_name: str) -> None:
        """A layer's attention ran without a request, while vLLM measured its memory: the place to refuse a layer."""

    def update_states(self, runner: Any, scheduler_output: Any) -> None:
        """A step has arrived; the runner's batch is still that of the step before."""

    def requests_finished(self, runner: Any, request_ids: Iterable[str]) -> None:
        """These requests have ended; a preempted one is not among them."""

    def requests_added(self, runner: Any, scheduler_output: Any) -> None:
        """V2 runner: the step's new requests, among them resumed ones, are about to be added to its batch."""

    def blocks_updated(self, runner: Any, request_id: str, request_index: int, scheduler_output: Any) -> None:
        """V1 runner: a running request's new blocks are in its row of the block table; they may be replaced now."""

    def requests_updated(self, runner: Any, scheduler_output: Any) -> None:
        """V2 runner: the running requests' new blocks are in the block tables."""

    def append_block_ids(
        self, block_tables: Any, request_index: int, block_ids: tuple[list[int], ...], overwrite: bool
    ) -> tuple[tuple[list[int], ...], bool]:
        """V2 runner: blocks are about to be written to a row.

        Returns:
            The block ids to write, one list per KV-cache group, and whether they replace the row.
        """
        del block_tables, request_index
        return block_ids, overwrite

    def execute_begin(self, runner: Any, scheduler_output: Any, input_batch: Any) -> None:
        """The batch is built and the model is about to run: the place to build the step's metadata.

        Inside the forward context on the V1 runner; before it on the V2 runner, which may replay a whole graph.
        """

    def kv_write_begin(
        self, layer_name: str, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """A layer's new keys and values are about to be written.

        Only where the write is an operator of its own (per backend, from 0.16.0); elsewhere the attention operator
        writes, after `attention_begin`.

        Args:
            layer_name: The layer's prefix in the model.
            key: ``[num_tokens, num_kv_heads, head_size]`` in the model's dtype.
            value: As ``key``.
            kv_cache: The layer's cache, in its backend's layout.
            slot_mapping: ``[num_tokens]``, int64: the slot of each token.

        Returns:
            The slot mapping to use.
        """
        del layer_name, key, value, kv_cache
        return slot_mapping

    def kv_write_finished(self, layer_name: str, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """A layer's new keys and values are in its cache."""

    def attention_begin(
        self, layer_name: str, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """A layer's attention is about to run.

        Args:
            layer_name: The layer's prefix in the model.
            query: ``[num_tokens, num_heads, head_size]`` in the model's dtype; for MLA the unsplit query.
            key: ``[num_tokens, num_kv_heads, head_size]``; for MLA the normed latent.
            value: As ``key``; for MLA the rotary part of the key.
            kv_cache: The layer's cache, in its backend's layout.
            attn_metadata: The backend's metadata of this layer; shared by the layers of a group, so it is to be
                replaced, not changed.

        Returns:
            The query, key, value and metadata to use. The arguments themselves must not be written to.
        """
        del layer_name, kv_cache
        return query, key, value, attn_metadata

    def attention_finished(
        self, layer_name: str, query: Tensor, kv_cache: Tensor, attn_metadata: Any, output: Tensor
    ) -> None:
        """A layer's attention has run.

        Args:
            layer_name: The layer's prefix in the model.
            query: The query that was used.
            kv_cache: The layer's cache.
            attn_metadata: The metadata that was used.
            output: ``[num_tokens, num_heads * head_size]``, or with the heads as a dimension; may be written to.
        """

    def mla_begin(self, layer: Any, phase: str, query: Any, kv_cache: Tensor, attn_metadata: Any) -> Any:
        """One half of an MLA layer's attention is about to run.

        Args:
            layer: The attention layer.
            phase: ``prefill`` or ``decode``.
            query: The half's query; for ``decode`` a tensor or a pair (latent, rotary), as the release has it.
            kv_cache: The layer's cache, ``[num_blocks, block_size, latent_size]`` up to the release's layout.
            attn_metadata: vLLM's MLA metadata.

        Returns:
            The metadata to use in the rest of the layer's attention.
        """
        del layer, phase, query, kv_cache
        return attn_metadata

    def mla_finished(self, layer: Any, phase: str, output: Tensor) -> None:
        """One half of an MLA layer's attention has run; for ``decode``, ``output`` is not yet projected up."""

    def layer_begin(
        self, layer: Any, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A decoder layer is about to run. Traced once under torch.compile, as the other layer and FFN calls are.

        Args:
            layer: The layer's module.
            positions: ``[num_tokens]``, int64.
            hidden_states: ``[num_tokens, hidden_size]`` in the model's dtype.
            residual: As ``hidden_states``, or None before the first layer.

        Returns:
            The hidden states and residual to go on with.
        """
        del layer, positions
        return hidden_states, residual

    def layer_finished(
        self, layer: Any, positions: Tensor, hidden_states: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A decoder layer has run; see `layer_begin`."""
        del layer, positions
        return hidden_states, residual

    def ffn_begin(self, layer: Any, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """A decoder layer's norm and feed-forward block are about to run; see `layer_begin`."""
        del layer
        return hidden_states, residual

    def ffn_finished(self, layer: Any, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """A decoder layer's feed-forward block has run; see `layer_begin`."""
        del layer
        return hidden_states, residual

    def execute_finished(self, runner: Any, scheduler_output: Any, model_output: Any) -> None:
        """The model has run; on the V2 runner ``model_output`` is None (the runner keeps it)."""
