"""The interface of a sparse-attention method.

vLLM runs a request in two kinds of processes, and a sparse method has one instance in each: one beside the scheduler
(EngineCore) and one beside each model runner (worker). The instances share no memory. What the scheduler side returns
from `SparseMethod.build_metadata` travels to the workers with the step, as ``scheduler_output.ucm_sparse_meta``.

The paired ``begin`` and ``finished`` calls of a step follow the UCM sparse framework (ModelEngine,
unified-cache-management pull request 79). Slots, block tables and positions are vLLM's own.

The calls of the base class change nothing, so a subclass implements only what it needs. An exception in a call ends the
step, like an exception in vLLM's own code.
"""

from __future__ import annotations

import enum
import os
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from ucm.errors import SparseMethodError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from ucm.sparse.attention import AttentionView
    from ucm.sparse.options import Complaints, MethodOptions
    from ucm.vllm_types import Request, SchedulerOutput, VllmConfig

#: Values with which a switch counts as unset.
OFF = frozenset({"", "0", "false", "no", "off"})


class Role(enum.Enum):
    """The side of the engine that an instance serves."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class SparseMethod:
    """A sparse-attention method. All calls have neutral defaults.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        role: The side that this instance serves.
        options: The method's own settings, as the operator wrote them.

    Raises:
        SparseMethodError: If hooks that it needs are switched off.

    Attributes:
        attention: The worker's attention layers; set before any other call on the worker side.
        asked: Maintained by the hooks: the layers of this worker whose attention has called the method, until all
            layers with keys in a cache have; None from then on, and for a method that needs no attention hooks.
        allocating: Maintained by the hooks: the first request that asked for blocks since a step was decided, and how
            many of its tokens were computed then; None if none has, without a name if it has ended.
        awaits_begin: Maintained by the hooks: whether a step has arrived in this worker and its `execute_begin` has not
            been called. No layer may run then.
        decided: Maintained by the hooks: whether a step has arrived in this worker that the scheduler's side was told
            of. From then on each one must be.
        options_type: The class that declares the settings, so that they can be checked without an engine; None if the
            method checks them itself.
        needed_hooks: The groups of rewritten modules that the method requires, as their switches name them.
        serves_latent: Whether the method serves latent attention (MLA); see `AttentionView.require_engine`.
        serves_drafts: Whether the method serves speculative decoding; see the same.
        serves_hybrids: Whether the method serves the attention of models with recurrent layers; see the same.
        frees_blocks: Whether the method frees blocks of running requests. Then it runs with UCM's connectors alone,
            because another one may still need them.
        revision: Raise it when the same options produce different KV than before.
        optional_hooks: Whether the method also runs under an overlay without some of the hooks that it implements.
            Otherwise such an overlay refuses it.
    """

    attention: AttentionView
    asked: set[str] | None = None
    allocating: tuple[str, int] | None = None
    awaits_begin: bool = False
    decided: bool = False
    options_type: ClassVar[type[MethodOptions] | None] = None
    needed_hooks: ClassVar[tuple[str, ...]] = ()
    serves_latent: ClassVar[bool] = False
    serves_drafts: ClassVar[bool] = False
    serves_hybrids: ClassVar[bool] = False
    frees_blocks: ClassVar[bool] = False
    revision: ClassVar[int] = 1
    optional_hooks: ClassVar[bool] = False

    def __init__(self, vllm_config: VllmConfig, role: Role, options: Mapping[str, Any]) -> None:
        require_hooks(type(self).__name__, self.needed_hooks)
        self.vllm_config = vllm_config
        self.role = role
        self.options = options

    def figures(self) -> Mapping[str, float]:
        """The worker side's counters since it started: ``ucm:sparse_<name>_total`` by ``<name>``.

        UCM's connector exports them (docs/metrics.md). The value of a label, if the series has one, follows a
        dot: ``requests.failed``.
        """
        return {}

    @cached_property
    def complaints(self) -> Complaints:
        """The worker side's log of client requests that the method refuses; see `StepBatch.asked`."""
        from ucm.sparse.options import Complaints  # noqa: PLC0415 - most processes have no method

        return Complaints(type(self).__name__, int(self.vllm_config.parallel_config.rank))

    # What its KV depends on, known from its settings.

    @classmethod
    def identity(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return what shapes the KV of tokens computed under the method, besides the model, as plain values.

        By default: the class, its `revision`, and the parsed options except those in `MethodOptions.beside_kv`.

        Args:
            options: As the operator wrote them.

        Raises:
            ConfigError: If an option is wrong.
        """
        from ucm.sparse.options import plain_options  # noqa: PLC0415 - most processes have no method

        plain = plain_options(cls.options_type, cls.__name__, options) if cls.options_type else dict(options)
        return {"method": f"{cls.__module__}:{cls.__qualname__}", "revision": cls.revision, "options": plain}

    @classmethod
    def prompts_are_dense(cls, options: Mapping[str, Any]) -> bool:
        """Return whether the KV of a prompt is the KV that an engine without the method computes."""
        del options
        return False

    @classmethod
    def lasting_tokens(cls, options: Mapping[str, Any], num_prompt_tokens: int) -> int:
        """Return how many tokens of a request, from its start, have KV that depends on these tokens alone.

        The KV of later tokens depends on where the prompt ends, so another request with the same tokens must not use
        it. A method that returns fewer than all calls `keep_apart`, which keeps later blocks out of other requests'
        hits in vLLM's own prefix cache.

        Args:
            options: As the operator wrote them.
            num_prompt_tokens: The length of the request's prompt.
        """
        del options, num_prompt_tokens
        return sys.maxsize

    @classmethod
    def advice(cls, options: Mapping[str, Any]) -> list[str]:
        """Return what an operator must know about the engine that these options need, one line each.

        Args:
            options: Valid options, as the operator wrote them.
        """
        del options
        return []

    # The scheduler side: one call per event, in EngineCore.

    def bytes_beside_block(self, workers: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return how many bytes each worker allocates on its device beside each block of its KV cache.

        They are taken from the memory for KV caches before vLLM divides it into blocks. Called on an instance that gets
        no other call. Allocate in `layers_seen`, so that no step runs out of memory.

        Args:
            workers: For each worker, vLLM's ``KVCacheSpec`` of each of its layers, by name.

        Raises:
            SparseMethodError: The method cannot serve a model with these layers.
        """
        return [0] * len(workers)

    def scheduler_started(self, scheduler: Any) -> None:
        """The scheduler, vLLM's ``Scheduler``, and its KV-cache manager exist. Called once, before any request."""

    def asks_workers(self) -> object:
        """Return what each worker must confirm with `confirms` before the first request; None asks nothing.

        Called once, after the workers have loaded the model. The question must pickle.
        """
        return None

    def request_added(self, request: Request) -> None:
        """A new request has entered the queue. Not called for further chunks of a streaming request.

        Args:
            request: vLLM's ``Request``.
        """

    def limit_new_tokens(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return how many tokens of a request the next step may compute; called once per step.

        Args:
            request: vLLM's ``Request``, running or waiting.
            num_computed_tokens: Its computed tokens, including, for a waiting request, those found in caches.
            num_new_tokens: The known tokens after them; may be 0.

        Returns:
            ``num_new_tokens`` or fewer, but at least 1 if there are any. vLLM limits them further.
        """
        del request, num_computed_tokens
        return num_new_tokens

    def before_allocation(self, request: Request) -> bool:
        """Blocks are about to be allocated for a request: the place to free blocks of it.

        Called before each allocation, and again in the same step if vLLM had to preempt another request for this one.
        Do not count calls.

        Args:
            request: vLLM's ``Request``, running or waiting.

        Returns:
            Whether to continue. If False, the allocation fails as if there were no memory: vLLM preempts until the
            request itself is preempted, and computes it again. Only a running request may be refused.
        """
        del request
        return True

    def build_metadata(self, scheduler_output: SchedulerOutput) -> object:
        """Return what the workers need to know about this step; None sends nothing. The result must pickle.

        Args:
            scheduler_output: vLLM's ``SchedulerOutput``, complete except for the connector's metadata.
        """
        del scheduler_output
        return None

    def request_preempted(self, request: Request) -> None:
        """A running request has lost its blocks. vLLM will compute it again from its prompt."""

    def request_freed(self, request: Request) -> None:
        """A request has ended, for any reason. Its blocks are about to be freed."""

    # The worker side: in every worker, in this order within a step.

    def worker_started(self) -> None:
        """`attention` is set, and the model is not loaded yet: the place to refuse an engine. Called once."""

    def confirms(self, question: Any) -> str:
        """Return why this worker cannot confirm the question of `asks_workers`; an empty text confirms it."""
        del question
        return ""

    def layer_seen(self, layer_name: str) -> None:
        """A layer with a KV cache exists, and no request has run yet: the place to refuse the layer.

        Called when the layer's attention runs in vLLM's memory profiling, and for each layer when the scheduler's side
        asks the workers, before the first request.
        """

    def layers_seen(self) -> None:
        """`layer_seen` was called for all layers of this worker with a KV cache, which is allocated.

        The place to refuse them together, and to allocate what belongs to their blocks. Called once, before the first
        request, when the scheduler's side asks the workers.
        """

    def update_states(self, runner: Any, scheduler_output: SchedulerOutput) -> None:
        """A step has arrived. The runner's batch is still that of the previous step."""

    def requests_finished(self, runner: Any, request_ids: Iterable[str]) -> None:
        """Requests have ended. Preempted requests are not among them."""

    def requests_added(self, runner: Any, scheduler_output: SchedulerOutput) -> None:
        """V2 runner: new and resumed requests of the step are about to be added to the batch."""

    def blocks_updated(
        self, runner: Any, request_id: str, request_index: int, scheduler_output: SchedulerOutput
    ) -> None:
        """V1 runner: the new blocks of a running request are in its row of the block table and may be replaced.

        Not called for a request that the previous step left out: vLLM adds it to the batch again, with all its blocks.
        """

    def requests_updated(self, runner: Any, scheduler_output: SchedulerOutput) -> None:
        """V2 runner: the new blocks of running requests are in the block tables."""

    def append_block_ids(
        self, block_tables: Any, request_index: int, block_ids: tuple[list[int], ...], overwrite: bool
    ) -> tuple[tuple[list[int], ...], bool]:
        """V2 runner: vLLM is about to write blocks to a row.

        Returns:
            The block ids to write, one list per KV-cache group, and whether they replace the row.
        """
        del block_tables, request_index
        return block_ids, overwrite

    def execute_begin(self, runner: Any, scheduler_output: SchedulerOutput, input_batch: Any) -> None:
        """The batch is built, and the model is about to run: the place to build the step's metadata.

        The V1 runner calls it inside the forward context, the V2 runner before it, because V2 may replay a whole graph.
        """

    def kv_write_begin(
        self, layer_name: str, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """A layer's new keys and values are about to be written.

        Called only where the write is a separate operator (per backend, from 0.16.0). Elsewhere the attention operator
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
            attn_metadata: The backend's metadata of this layer. Layers of a group share it: replace it, never change
                it.

        Returns:
            The query, key, value and metadata to use. Do not write to the arguments.
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
            output: ``[num_tokens, num_heads * head_size]``, or with the heads as a dimension. You may write to it.
        """

    def mla_begin(self, layer: Any, phase: str, query: Any, kv_cache: Tensor, attn_metadata: Any) -> Any:
        """One phase of an MLA layer's attention is about to run.

        Args:
            layer: The attention layer.
            phase: ``prefill`` or ``decode``.
            query: The query of the phase; for ``decode`` a tensor or a pair (latent, rotary), depending on the release.
            kv_cache: The layer's cache, ``[num_blocks, block_size, latent_size]``, in the release's layout.
            attn_metadata: vLLM's MLA metadata.

        Returns:
            The metadata to use in the rest of the layer's attention.
        """
        del layer, phase, query, kv_cache
        return attn_metadata

    def mla_finished(self, layer: Any, phase: str, output: Tensor) -> None:
        """One phase of an MLA layer's attention has run. In ``decode``, ``output`` is not yet projected up."""

    def layer_begin(
        self, layer: Any, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A decoder layer is about to run. torch.compile traces this call and the other layer and FFN calls once.

        Args:
            layer: The layer's module.
            positions: ``[num_tokens]``, int64.
            hidden_states: ``[num_tokens, hidden_size]`` in the model's dtype.
            residual: As ``hidden_states``, or None before the first layer.

        Returns:
            The hidden states and residual to continue with.
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

    def execute_finished(self, runner: Any, scheduler_output: SchedulerOutput, model_output: Any) -> None:
        """The model has run. On the V2 runner ``model_output`` is None, because the runner keeps it."""


def not_asked(name: str) -> SparseMethodError:
    """Return the error of a step in which no layer asked a method what to read."""
    return SparseMethodError(
        f"{name} was not asked by any layer of this step, which read everything, or blocks that are freed",
        where="the attention hooks of this worker",
        fix="unset UCM_DISABLE_ATTENTION_PATCH, leave out full CUDA graphs; `ucm doctor --run` shows which hooks fire",
    )


def refuse(obstacles: Mapping[str, Any], where: str, fix: str = "serve this model without ucm_sparse_config") -> None:
    """Refuse an engine, a model, a layer or a step for the first obstacle that it has.

    Raises:
        SparseMethodError: If it has one.
    """
    for what, there in obstacles.items():
        if there:
            raise SparseMethodError(what, where=where, fix=fix)


def require_hooks(name: str, groups: Iterable[str]) -> None:
    """Refuse to run a method without its hooks.

    Args:
        name: The method's name.
        groups: Groups of rewritten modules, as their switches name them: ``ATTENTION``, ``WORKER``, ….

    Raises:
        SparseMethodError: Naming the first switch that is set.
    """
    for group in groups:
        variable = f"UCM_DISABLE_{group}_PATCH"
        if os.environ.get(variable, "").strip().lower() not in OFF:
            raise SparseMethodError(
                f"{name} needs hooks that are switched off",
                where=f"the environment variable {variable}",
                fix="unset it, or serve without ucm_sparse_config",
            )
