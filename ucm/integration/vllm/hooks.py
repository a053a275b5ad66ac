"""The only names that rewritten vLLM modules call.

With no sparse method configured each of these is one test and hands back what it was given. A method is created where
its side of the engine starts: `scheduler_init` in EngineCore, `worker_init` in each worker. The scheduler's instance
hangs on its scheduler, because one process may hold several; the worker's is the process's own, because the attention
operators know nothing but a layer's name.

This module is imported by vLLM modules while vLLM itself is being imported: it imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.block_table import clear_row
from ucm.sparse.base import INVALID_SLOT, Role, SparseMethod

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "INVALID_SLOT",
    "allocate_slots",
    "attention_begin",
    "attention_finished",
    "blocks_updated",
    "clear_row",
    "execute_begin",
    "execute_finished",
    "ffn_begin",
    "ffn_finished",
    "kv_write_begin",
    "kv_write_finished",
    "layer_begin",
    "layer_finished",
    "mla_begin",
    "mla_finished",
    "num_slots_sparsed",
    "request_added",
    "request_freed",
    "request_preempted",
    "scheduler_init",
    "scheduler_output_built",
    "update_states",
    "v2_append_block_ids",
    "v2_execute_begin",
    "v2_execute_finished",
    "v2_requests_added",
    "v2_requests_finished",
    "v2_requests_updated",
    "worker_init",
    "worker_requests_finished",
]

_METHOD = "_ucm_sparse_method"
_SLOTS = "_ucm_sparsed_slots"
_EXTERNAL = "_ucm_external_computed_tokens"
_worker: SparseMethod | None = None
#: Whether any scheduler of this process has a method; spares the others the look at themselves.
_schedules_sparsely = False


def _started(vllm_config: Any, role: Role, start: Callable[[SparseMethod], None]) -> SparseMethod | None:
    """The configured method's instance for one side, started; the imports are only paid for where one is configured.

    Raises:
        UcmError: Why it cannot be; the log has it in one record, for vLLM prints it among its tracebacks.
    """
    from ucm.integration.vllm.config import KEY, sparse_method_config  # noqa: PLC0415
    from ucm.integration.vllm.connector.refusal import refusals_logged  # noqa: PLC0415

    with refusals_logged("UCM.Sparse"):
        configured = sparse_method_config(vllm_config)
        if configured is None:
            return None
        from ucm.sparse.factory import create_method  # noqa: PLC0415

        name, options = configured
        method = create_method(name, vllm_config, role, options)
        if isinstance(getattr(vllm_config, "additional_config", None), dict):
            # vLLM's compile cache keys on this dictionary and not on the connector's settings: without a trace of the
            # method here, a graph that was compiled without its layer calls would be loaded for a run with them.
            vllm_config.additional_config.setdefault(KEY, {name: options})
        start(method)
    from ucm.logger import get_logger  # noqa: PLC0415

    get_logger().info("[UCM.Sparse] %s is active on the %s side", name, role.value)
    return method


# The scheduler's side.


def scheduler_init(scheduler: Any) -> None:
    """A scheduler exists: create the method's instance for it, if one is configured."""

    def start(method: SparseMethod) -> None:
        global _schedules_sparsely  # noqa: PLW0603 - see where it is defined
        _schedules_sparsely = True
        setattr(scheduler, _METHOD, method)
        setattr(scheduler, _SLOTS, {})
        setattr(scheduler, _EXTERNAL, {})
        setattr(scheduler.kv_cache_manager, _METHOD, method)
        method.scheduler_started(scheduler)

    _started(scheduler.vllm_config, Role.SCHEDULER, start)


def request_added(scheduler: Any, request: Any) -> None:
    """A new request has entered the queue."""
    method = getattr(scheduler, _METHOD, None) if _schedules_sparsely else None
    if method is not None:
        method.request_added(request)


def num_slots_sparsed(
    scheduler: Any, request: Any, num_new_tokens: int, num_external_computed_tokens: int | None = None
) -> int:
    """The slots for an allocation that is about to be made; `INVALID_SLOT` leaves it to vLLM.

    Args:
        scheduler: vLLM's ``Scheduler``.
        request: vLLM's ``Request``.
        num_new_tokens: Tokens that the step will compute for it.
        num_external_computed_tokens: Tokens that a connector will load; None for a running request.
    """
    if not _schedules_sparsely:  # once per request and step: nothing before it
        return INVALID_SLOT
    method = getattr(scheduler, _METHOD, None)
    if method is None:
        return INVALID_SLOT
    slots: int = method.num_slots(request, num_new_tokens, num_external_computed_tokens or 0)
    if slots != INVALID_SLOT:
        getattr(scheduler, _SLOTS)[request.request_id] = slots
    else:  # a second attempt in the same step may have turned dense
        getattr(scheduler, _SLOTS).pop(request.request_id, None)
    if num_external_computed_tokens:
        getattr(scheduler, _EXTERNAL)[request.request_id] = num_external_computed_tokens
    return slots


def allocate_slots(
    kv_cache_manager: Any, request: Any, num_new_tokens: int, num_slots: int, new_computed_blocks: Any
) -> Any:
    """Allocate for a request whose slots a method has counted; see `SparseMethod.allocate_slots`."""
    method = getattr(kv_cache_manager, _METHOD)
    return method.allocate_slots(kv_cache_manager, request, num_new_tokens, num_slots, new_computed_blocks)


def scheduler_output_built(scheduler: Any, scheduler_output: Any) -> None:
    """A step is decided: fill the fields that travel to the workers with it.

    ``ucm_sparsed_slots`` and ``ucm_external_computed_tokens`` map the ids of the step's requests to slots and to tokens
    loaded from outside; ``ucm_sparse_metadata`` is what the method built. A request that got an estimate but was not
    scheduled after all is left out. One that waits for an asynchronous load is first scheduled in a later step; its
    count of loaded tokens goes with that step.
    """
    method = getattr(scheduler, _METHOD, None) if _schedules_sparsely else None
    if method is None:
        return
    for field, name in (("ucm_sparsed_slots", _SLOTS), ("ucm_external_computed_tokens", _EXTERNAL)):
        noted = getattr(scheduler, name)
        setattr(scheduler_output, field, {r: noted.pop(r) for r in scheduler_output.num_scheduled_tokens if r in noted})
    getattr(scheduler, _SLOTS).clear()
    scheduler_output.ucm_sparse_metadata = method.build_metadata(scheduler_output)


def request_preempted(scheduler: Any, request: Any) -> None:
    """A running request has lost its blocks, and with them its place in this step."""
    method = getattr(scheduler, _METHOD, None) if _schedules_sparsely else None
    if method is not None:
        _forget(scheduler, request)
        method.request_preempted(request)


def request_freed(scheduler: Any, request: Any) -> None:
    """A request has ended."""
    method = getattr(scheduler, _METHOD, None) if _schedules_sparsely else None
    if method is not None:
        _forget(scheduler, request)
        method.request_freed(request)


def _forget(scheduler: Any, request: Any) -> None:
    """Drop what was noted of a request for a step that it will not be in."""
    for name in (_SLOTS, _EXTERNAL):
        getattr(scheduler, name).pop(request.request_id, None)


# The worker's side.


def worker_init(vllm_config: Any) -> None:
    """A worker's parallel groups exist: create the method's instance for it, if one is configured."""
    global _worker  # noqa: PLW0603 - the operators of a process have no object to hang it on

    def start(method: SparseMethod) -> None:
        from ucm.integration.vllm.sparse.layers import AttentionLayers  # noqa: PLC0415 - most workers need none

        method.attention = AttentionLayers(vllm_config)
        method.worker_started()

    _worker = _started(vllm_config, Role.WORKER, start)


def update_states(runner: Any, scheduler_output: Any) -> None:
    """V1: a step has arrived."""
    if _worker is not None:
        _worker.update_states(runner, scheduler_output)


def worker_requests_finished(runner: Any, request_ids: Iterable[str]) -> None:
    """V1: the requests that ended since the last step; called in every step, mostly with none."""
    if _worker is not None and request_ids:
        _worker.requests_finished(runner, request_ids)


def blocks_updated(runner: Any, request_id: str, request_index: int, scheduler_output: Any) -> None:
    """V1: a running request's new blocks are in its row."""
    if _worker is not None:
        _worker.blocks_updated(runner, request_id, request_index, scheduler_output)


def execute_begin(runner: Any, scheduler_output: Any) -> None:
    """V1: the model is about to run."""
    if _worker is not None:
        _worker.execute_begin(runner, scheduler_output, runner.input_batch)


def execute_finished(runner: Any, scheduler_output: Any, model_output: Any) -> None:
    """V1: the model has run."""
    if _worker is not None:
        _worker.execute_finished(runner, scheduler_output, model_output)


def v2_requests_finished(runner: Any, scheduler_output: Any) -> None:
    """V2: a step has arrived; its finished requests, without the preempted ones that V2 counts among them."""
    if _worker is not None:
        _worker.update_states(runner, scheduler_output)
        if scheduler_output.finished_req_ids:
            _worker.requests_finished(runner, scheduler_output.finished_req_ids)


def v2_requests_added(runner: Any, scheduler_output: Any) -> None:
    """V2: the step's new and resumed requests are about to be added."""
    if _worker is not None:
        _worker.requests_added(runner, scheduler_output)


def v2_requests_updated(runner: Any, scheduler_output: Any) -> None:
    """V2: the running requests' new blocks are in the block tables."""
    if _worker is not None:
        _worker.requests_updated(runner, scheduler_output)


def v2_append_block_ids(
    block_tables: Any, request_index: int, block_ids: tuple[list[int], ...], overwrite: bool
) -> tuple[tuple[list[int], ...], bool]:
    """V2: blocks are about to be written to a row."""
    if _worker is None:
        return block_ids, overwrite
    return _worker.append_block_ids(block_tables, request_index, block_ids, overwrite)


def v2_execute_begin(runner: Any, scheduler_output: Any, input_batch: Any, dummy_run: bool) -> None:
    """V2: the model is about to run, or its graph to be replayed; not called on for warm-up steps."""
    if _worker is not None and not dummy_run:
        _worker.execute_begin(runner, scheduler_output, input_batch)


def v2_execute_finished(runner: Any, scheduler_output: Any, dummy_run: bool) -> None:
    """V2: the model has run."""
    if _worker is not None and not dummy_run:
        _worker.execute_finished(runner, scheduler_output, None)


# Inside the model. A step without attention metadata is vLLM measuring its memory: there is nothing to act on.


def kv_write_begin(layer_name: str, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> Any:
    """A layer's new keys and values are about to be written."""
    if _worker is None:
        return slot_mapping
    return _worker.kv_write_begin(layer_name, key, value, kv_cache, slot_mapping)


def kv_write_finished(layer_name: str, kv_cache: Any, slot_mapping: Any) -> None:
    """A layer's new keys and values are written."""
    if _worker is not None:
        _worker.kv_write_finished(layer_name, kv_cache, slot_mapping)


def attention_begin(
    layer_name: str, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any
) -> tuple[Any, Any, Any, Any]:
    """A layer's attention is about to run."""
    if _worker is None:
        return query, key, value, attn_metadata
    if attn_metadata is None:
        _worker.layer_seen(layer_name)
        return query, key, value, attn_metadata
    return _worker.attention_begin(layer_name, query, key, value, kv_cache, attn_metadata)


def attention_finished(layer_name: str, query: Any, kv_cache: Any, attn_metadata: Any, output: Any) -> None:
    """A layer's attention has run."""
    if _worker is not None and attn_metadata is not None:
        _worker.attention_finished(layer_name, query, kv_cache, attn_metadata, output)


def mla_begin(layer: Any, phase: str, query: Any, kv_cache: Any, attn_metadata: Any) -> Any:
    """One half of an MLA layer's attention is about to run."""
    if _worker is None:
        return attn_metadata
    return _worker.mla_begin(layer, phase, query, kv_cache, attn_metadata)


def mla_finished(layer: Any, phase: str, output: Any) -> None:
    """One half of an MLA layer's attention has run."""
    if _worker is not None:
        _worker.mla_finished(layer, phase, output)


def layer_begin(layer: Any, positions: Any, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
    """A decoder layer is about to run."""
    if _worker is None:
        return hidden_states, residual
    return _worker.layer_begin(layer, positions, hidden_states, residual)


def layer_finished(layer: Any, positions: Any, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
    """A decoder layer has run."""
    if _worker is None:
        return hidden_states, residual
    return _worker.layer_finished(layer, positions, hidden_states, residual)


def ffn_begin(layer: Any, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
    """A decoder layer's feed-forward block is about to run."""
    if _worker is None:
        return hidden_states, residual
    return _worker.ffn_begin(layer, hidden_states, residual)


def ffn_finished(layer: Any, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
    """A decoder layer's feed-forward block has run."""
    if _worker is None:
        return hidden_states, residual
    return _worker.ffn_finished(layer, hidden_states, residual)
