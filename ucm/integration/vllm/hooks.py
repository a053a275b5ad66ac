"""The only names that rewritten vLLM modules call.

With no sparse method configured each of these is one test and hands back what it was given. A method is created where
its side of the engine starts: `scheduler_init` in EngineCore, `worker_init` in each worker; before the first request
`engine_core_started` compares the two. One process may hold several engines, with a method or without, so the
scheduler's instance hangs on its scheduler and the worker's on its model runner. Inside the model, where an operator
knows nothing but a layer's name, vLLM's forward context says whose layers run.

This module is imported by vLLM modules while vLLM itself is being imported: it imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from ucm.integration.vllm.block_table import clear_row
from ucm.sparse.base import Role, SparseMethod

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "attention_begin",
    "attention_finished",
    "before_allocation",
    "blocks_updated",
    "clear_row",
    "engine_core_started",
    "execute_begin",
    "execute_finished",
    "ffn_begin",
    "ffn_finished",
    "kv_write_begin",
    "kv_write_finished",
    "layer_begin",
    "layer_finished",
    "limit_new_tokens",
    "mla_begin",
    "mla_finished",
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

#: What a step carries whose method built nothing for it, so that the workers see that the scheduler's side was told.
BUILT_NOTHING = "built nothing"
#: The attribute of a scheduler, a KV-cache manager and a model runner that holds its method.
METHOD = "_ucm_sparse_method"
#: Whether any scheduler, or any worker, of this process ever had a method; spares the others a look at themselves.
_schedules_sparsely = False
_works_sparsely = False
#: The workers' methods by the identity of their engine's layers, as long as their model runners live. A method keeps
#: its engine's configuration alive, and with it the layers, so an identity is not used again while its method is here.
_by_layers: dict[int, ref[SparseMethod]] = {}


def _started(vllm_config: Any, role: Role, owner: Any, start: Callable[[SparseMethod], None]) -> SparseMethod | None:
    """The configured method's instance for one side, started; the imports are only paid for where one is configured.

    Raises:
        UcmError: Why it cannot be; the log has it in one record, for vLLM prints it among its tracebacks.
    """
    from ucm.integration.vllm.config import KEY, sparse_method_config  # noqa: PLC0415
    from ucm.integration.vllm.connector.failures import refusals_logged  # noqa: PLC0415

    with refusals_logged("UCM.Sparse"):
        configured = sparse_method_config(vllm_config)
        if configured is None:
            return None
        from ucm.integration.vllm.handshake import require_built_hooks  # noqa: PLC0415
        from ucm.integration.vllm.proof import require_hooked  # noqa: PLC0415
        from ucm.sparse.factory import create_method  # noqa: PLC0415

        name, options = configured
        method = create_method(name, vllm_config, role, options)
        require_built_hooks(type(method))
        require_hooked(name, method.needed_hooks, owner)
        if isinstance(getattr(vllm_config, "additional_config", None), dict):
            # vLLM's compile cache keys on this dictionary and not on the connector's settings: without a trace of the
            # method here, a graph that was compiled without its layer calls would be loaded for a run with them.
            vllm_config.additional_config.setdefault(KEY, {name: options})
        start(method)
    from ucm.logger import get_logger  # noqa: PLC0415

    get_logger(__name__).info("[UCM.Sparse] %s is active on the %s side", name, role.value)
    return method


# The scheduler's side.


def scheduler_init(scheduler: Any) -> None:
    """A scheduler exists: create the method's instance for it, if one is configured."""

    def start(method: SparseMethod) -> None:
        global _schedules_sparsely  # noqa: PLW0603 - see where it is defined
        _schedules_sparsely = True
        setattr(scheduler, METHOD, method)
        setattr(scheduler.kv_cache_manager, METHOD, method)
        method.scheduler_started(scheduler)

    _started(scheduler.vllm_config, Role.SCHEDULER, scheduler, start)


def engine_core_started(engine_core: Any) -> None:
    """The model is loaded, and no request is there yet: ask every worker what it runs.

    Raises:
        SparseMethodError: If one does not answer, or runs anything else than this process.
    """
    from ucm.integration.vllm.config import sparse_method_config  # noqa: PLC0415 - as in `_started`

    if sparse_method_config(engine_core.vllm_config) is not None:
        from ucm.integration.vllm.handshake import require_same_in_workers  # noqa: PLC0415

        require_same_in_workers(engine_core)


def request_added(scheduler: Any, request: Any) -> None:
    """A new request has entered the queue."""
    method = getattr(scheduler, METHOD, None) if _schedules_sparsely else None
    if method is not None:
        method.request_added(request)


def limit_new_tokens(scheduler: Any, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
    """So many tokens of a request are to be computed: how many at once; see `SparseMethod.limit_new_tokens`."""
    method = getattr(scheduler, METHOD, None) if _schedules_sparsely else None
    if method is not None:
        num_new_tokens = method.limit_new_tokens(request, num_computed_tokens, num_new_tokens)
    return num_new_tokens


def before_allocation(kv_cache_manager: Any, request: Any) -> bool:
    """Blocks are about to be allocated for a request: whether to go on; see `SparseMethod.before_allocation`."""
    method: SparseMethod | None = getattr(kv_cache_manager, METHOD, None) if _schedules_sparsely else None
    if method is None:
        return True
    name, computed = method.allocating or ("", 0)
    if name in ("", request.request_id):
        if name and request.num_computed_tokens > computed:
            _check_built(method, name)
        method.allocating = (request.request_id, request.num_computed_tokens)
    return method.before_allocation(request)


def scheduler_output_built(scheduler: Any, scheduler_output: Any) -> None:
    """A step is decided: what the method built for it travels to the workers as ``ucm_sparse_meta``."""
    method = getattr(scheduler, METHOD, None) if _schedules_sparsely else None
    if method is not None:
        if method.allocating is None:
            _check_allocated(method, scheduler_output)
        method.allocating = None
        built = method.build_metadata(scheduler_output)
        scheduler_output.ucm_sparse_meta = BUILT_NOTHING if built is None else built


def request_preempted(scheduler: Any, request: Any) -> None:
    """A running request has lost its blocks, and with them its place in this step."""
    method = getattr(scheduler, METHOD, None) if _schedules_sparsely else None
    if method is not None:
        method.request_preempted(request)


def request_freed(scheduler: Any, request: Any) -> None:
    """A request has ended."""
    method = getattr(scheduler, METHOD, None) if _schedules_sparsely else None
    if method is not None:
        if method.allocating is not None and method.allocating[0] == request.request_id:
            method.allocating = ("", 0)  # the next request that asks takes its place
        method.request_freed(request)


def _check_built(method: SparseMethod, request_id: str) -> None:
    """A request asks for blocks again, and more of it is computed than when it asked before: a step lies between.

    A scheduler's class may ask as often as it wants within a step; what is computed of a request grows behind a step.
    """
    if "SCHEDULER" in method.needed_hooks:
        from ucm.integration.vllm.sparse.requirements import hook_lost  # noqa: PLC0415 - as in `worker_init`

        runs = f"another step of request {request_id}"
        raise hook_lost(type(method).__name__, "scheduler_output_built", runs, "scheduler")


def _check_allocated(method: SparseMethod, scheduler_output: Any) -> None:
    """A step is decided for which nobody asked: it must be without requests, for each gets blocks before it runs."""
    if scheduler_output.num_scheduled_tokens and "KV_CACHE_MANAGER" in method.needed_hooks:
        from ucm.integration.vllm.sparse.requirements import hook_lost  # noqa: PLC0415 - as in `worker_init`

        runs = f"a step of {len(scheduler_output.num_scheduled_tokens)} requests"
        raise hook_lost(type(method).__name__, "before_allocation", runs, "KV-cache manager")


# The worker's side.


def worker_init(wrapper: Any) -> None:
    """A worker has its device, its parallel groups and its model runner: create the runner's method, if configured.

    Args:
        wrapper: vLLM's ``WorkerWrapperBase``; every platform's worker passes here.
    """

    def start(method: SparseMethod) -> None:
        global _works_sparsely  # noqa: PLW0603 - see where it is defined
        from ucm.integration.vllm.handshake import model_runner  # noqa: PLC0415 - most workers need neither
        from ucm.integration.vllm.sparse.layers import AttentionLayers  # noqa: PLC0415

        runner = model_runner(wrapper, method)
        method.asked = set() if "ATTENTION" in method.needed_hooks else None
        method.attention = AttentionLayers(wrapper.vllm_config, runner)
        method.worker_started()
        setattr(runner, METHOD, method)
        layers = id(wrapper.vllm_config.compilation_config.static_forward_context)
        _by_layers[layers] = ref(method, lambda _: _by_layers.pop(layers, None))
        _works_sparsely = True

    _started(wrapper.vllm_config, Role.WORKER, getattr(wrapper.worker, "model_runner", None), start)


def worker_method(vllm_config: Any) -> SparseMethod | None:
    """The method of the worker with this configuration; for UCM's own connector, which exports what it counts."""
    if not _works_sparsely:
        return None
    found = _by_layers.get(id(vllm_config.compilation_config.static_forward_context))
    return None if found is None else found()


def update_states(runner: Any, scheduler_output: Any) -> None:
    """V1: a step has arrived."""
    method = getattr(runner, METHOD, None) if _works_sparsely else None
    if method is not None:
        _step_arrived(method, scheduler_output)
        method.update_states(runner, scheduler_output)


def worker_requests_finished(runner: Any, request_ids: Iterable[str]) -> None:
    """V1: the requests that ended since the last step; called in every step, mostly with none."""
    method = getattr(runner, METHOD, None) if _works_sparsely else None
    if method is not None and request_ids:
        method.requests_finished(runner, request_ids)


def blocks_updated(runner: Any, request_id: str, request_index: int, scheduler_output: Any) -> None:
    """V1: the new blocks of a request that was in the step before, too, are in its row."""
    method = getattr(runner, METHOD, None) if _works_sparsely else None
    if method is not None:
        method.blocks_updated(runner, request_id, request_index, scheduler_output)


def execute_begin(runner: Any, scheduler_output: Any) -> None:
    """V1: the model is about to run."""
    method = getattr(runner, METHOD, None) if _works_sparsely else None
    if method is not None:
        _check_arrived(method, scheduler_output)
        method.execute_begin(runner, scheduler_output, runner.input_batch)


def execute_finished(runner: Any, scheduler_output: Any, model_output: Any) -> None:
    """V1: the model has run."""
    method = getattr(runner, METHOD, None) if _works_sparsely else None
    if method is not None:
        _check_asked(method, runner)
        method.execute_finished(runner, scheduler_output, model_output)


def v2_requests_finished(runner: Any, scheduler_output: Any) -> None:
    """V2: a step has arrived; its finished requests, without the preempted ones that V2 counts among them."""
    method = getattr(runner, METHOD, None) if _works_sparsely else None
    if method is not None:
        # The one object of a runner that a hook gets without the runner; made anew whenever the KV cache is.
        tables = getattr(runner, "block_tables", None)
        if tables is not None:
            setattr(tables, METHOD, method)
        _step_arrived(method, scheduler_output)
        method.update_states(runner, scheduler_output)
        if scheduler_output.finished_req_ids:
            method.requests_finished(runner, scheduler_output.finished_req_ids)


def v2_requests_added(runner: Any, scheduler_output: Any) -> None:
    """V2: the step's new and resumed requests are about to be added."""
    method = getattr(runner, METHOD, None) if _works_sparsely else None
    if method is not None:
        method.requests_added(runner, scheduler_output)


def v2_requests_updated(runner: Any, scheduler_output: Any) -> None:
    """V2: the running requests' new blocks are in the block tables."""
    method = getattr(runner, METHOD, None) if _works_sparsely else None
    if method is not None:
        method.requests_updated(runner, scheduler_output)


def v2_append_block_ids(
    block_tables: Any, request_index: int, block_ids: tuple[list[int], ...], overwrite: bool
) -> tuple[tuple[list[int], ...], bool]:
    """V2: blocks are about to be written to a row."""
    method: SparseMethod | None = getattr(block_tables, METHOD, None) if _works_sparsely else None
    if method is None:
        return block_ids, overwrite
    return method.append_block_ids(block_tables, request_index, block_ids, overwrite)


def v2_execute_begin(runner: Any, scheduler_output: Any, input_batch: Any, dummy_run: bool) -> None:
    """V2: the model is about to run, or its graph to be replayed; not called on for warm-up steps."""
    method = getattr(runner, METHOD, None) if _works_sparsely else None
    if method is not None and not dummy_run:
        _check_arrived(method, scheduler_output)
        method.execute_begin(runner, scheduler_output, input_batch)


def v2_execute_finished(runner: Any, scheduler_output: Any, dummy_run: bool) -> None:
    """V2: the model has run."""
    method = getattr(runner, METHOD, None) if _works_sparsely else None
    if method is not None and not dummy_run:
        _check_asked(method, runner)
        method.execute_finished(runner, scheduler_output, None)


def _step_arrived(method: SparseMethod, scheduler_output: Any) -> None:
    """A step arrives: the scheduler's side was told of it, unless it warms vLLM up, before the first one."""
    built = getattr(scheduler_output, "ucm_sparse_meta", None)
    if isinstance(built, str) and built == BUILT_NOTHING:
        scheduler_output.ucm_sparse_meta = None
    runs = scheduler_output.num_scheduled_tokens
    if built is None and method.decided and runs and "SCHEDULER" in method.needed_hooks:
        from ucm.integration.vllm.sparse.requirements import hook_lost  # noqa: PLC0415 - as in `worker_init`

        raise hook_lost(type(method).__name__, "scheduler_output_built", f"a step of {len(runs)} requests", "scheduler")
    method.decided |= built is not None
    method.awaits_begin = bool(runs)


def _check_arrived(method: SparseMethod, scheduler_output: Any) -> None:
    """A step begins: its method was told when it arrived."""
    told = method.awaits_begin or not scheduler_output.num_scheduled_tokens
    if not told and "MODEL_RUNNER" in method.needed_hooks:
        from ucm.integration.vllm.sparse.requirements import hook_lost  # noqa: PLC0415 - as in `worker_init`

        raise hook_lost(type(method).__name__, "update_states", "the model")
    method.awaits_begin = False


def _check_asked(method: SparseMethod, runner: Any) -> None:
    """After a worker's first step: every layer that holds a KV cache has asked, or the engine ends here.

    A model may compute attention past vLLM's operators, in some of its layers or in all: these would read what the
    method has given back, and nothing else would tell.
    """
    if method.asked is not None:
        from ucm.integration.vllm.sparse.requirements import require_asked  # noqa: PLC0415 - as in `worker_init`

        layers = method.vllm_config.compilation_config.static_forward_context
        require_asked(type(method).__name__, runner.kv_cache_config, layers, method.asked)
        method.asked = None


# Inside the model. A step without attention metadata is vLLM measuring its memory: there is nothing to act on.


def _running_layers() -> int:
    """The identity of the layers of the engine whose forward runs: of an object that its configuration owns."""
    from vllm.forward_context import get_forward_context  # noqa: PLC0415 - vLLM may be importing this module

    return id(get_forward_context().no_compile_layers)


#: A compiler that traces a layer takes the answer as it is and does not look inside; the mark of
#: ``torch.compiler.assume_constant_result``, without the import.
_running_layers._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - see above


def _in_forward() -> SparseMethod | None:
    """The method of the engine whose forward runs.

    vLLM sets the forward context for each forward, those included that measure memory, and takes it back when one
    fails: there is nothing of ours that could be left behind.
    """
    method = _by_layers.get(_running_layers())
    return None if method is None else method()


def kv_write_begin(layer_name: str, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> Any:
    """A layer's new keys and values are about to be written."""
    method = _in_forward() if _works_sparsely else None
    if method is None:
        return slot_mapping
    return method.kv_write_begin(layer_name, key, value, kv_cache, slot_mapping)


def kv_write_finished(layer_name: str, kv_cache: Any, slot_mapping: Any) -> None:
    """A layer's new keys and values are written."""
    method = _in_forward() if _works_sparsely else None
    if method is not None:
        method.kv_write_finished(layer_name, kv_cache, slot_mapping)


def attention_begin(
    layer_name: str, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any
) -> tuple[Any, Any, Any, Any]:
    """A layer's attention is about to run."""
    method = _in_forward() if _works_sparsely else None
    if method is None:
        return query, key, value, attn_metadata
    if attn_metadata is None:
        method.layer_seen(layer_name)
        return query, key, value, attn_metadata
    if method.awaits_begin:
        from ucm.integration.vllm.sparse.requirements import hook_lost  # noqa: PLC0415 - as in `worker_init`

        raise hook_lost(type(method).__name__, "execute_begin", f"layer {layer_name}")
    if method.asked is not None:
        method.asked.add(layer_name)
    return method.attention_begin(layer_name, query, key, value, kv_cache, attn_metadata)


def attention_finished(layer_name: str, query: Any, kv_cache: Any, attn_metadata: Any, output: Any) -> None:
    """A layer's attention has run."""
    method = _in_forward() if _works_sparsely else None
    if method is not None and attn_metadata is not None:
        method.attention_finished(layer_name, query, kv_cache, attn_metadata, output)


def mla_begin(layer: Any, phase: str, query: Any, kv_cache: Any, attn_metadata: Any) -> Any:
    """One half of an MLA layer's attention is about to run."""
    method = _in_forward() if _works_sparsely else None
    if method is None:
        return attn_metadata
    return method.mla_begin(layer, phase, query, kv_cache, attn_metadata)


def mla_finished(layer: Any, phase: str, output: Any) -> None:
    """One half of an MLA layer's attention has run."""
    method = _in_forward() if _works_sparsely else None
    if method is not None:
        method.mla_finished(layer, phase, output)


def layer_begin(layer: Any, positions: Any, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
    """A decoder layer is about to run."""
    method = _in_forward() if _works_sparsely else None
    if method is None:
        return hidden_states, residual
    return method.layer_begin(layer, positions, hidden_states, residual)


def layer_finished(layer: Any, positions: Any, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
    """A decoder layer has run."""
    method = _in_forward() if _works_sparsely else None
    if method is None:
        return hidden_states, residual
    return method.layer_finished(layer, positions, hidden_states, residual)


def ffn_begin(layer: Any, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
    """A decoder layer's feed-forward block is about to run."""
    method = _in_forward() if _works_sparsely else None
    if method is None:
        return hidden_states, residual
    return method.ffn_begin(layer, hidden_states, residual)


def ffn_finished(layer: Any, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
    """A decoder layer's feed-forward block has run."""
    method = _in_forward() if _works_sparsely else None
    if method is None:
        return hidden_states, residual
    return method.ffn_finished(layer, hidden_states, residual)
