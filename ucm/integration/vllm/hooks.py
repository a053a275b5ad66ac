"""The only names that rewritten vLLM modules call.

Without a configured sparse method each of them is one test and returns its arguments. A method is created where
its side of the engine starts: `scheduler_init` in EngineCore, `worker_init` in each worker; before the first request
`engine_core_started` compares the two. One process may have several engines, with or without a method, so the
scheduler's instance is an attribute of its scheduler and the worker's of its model runner. Inside the model, where an
operator only has a layer's name, vLLM's forward context identifies the running engine.

vLLM's modules import this one while vLLM itself is being imported, so it imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from ucm.compat import clear_row, optional, replace_block_hash
from ucm.errors import SparseMethodError
from ucm.sparse.base import Role, SparseMethod, require_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "attention_begin",
    "attention_finished",
    "before_allocation",
    "block_hash_function",
    "blocks_updated",
    "clear_row",
    "engine_core_started",
    "execute_begin",
    "execute_finished",
    "ffn_begin",
    "ffn_finished",
    "kv_cache_memory",
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

#: The attribute of a step of which the scheduler's side was told; the metadata may be None.
TOLD = "ucm_sparse_told"
#: The attribute of a scheduler, a KV-cache manager and a model runner with its method.
METHOD = "_ucm_sparse_method"
#: Whether any worker of this process ever had a method; if not, hooks within a forward return at once.
_works_sparsely = False
#: The workers' methods by the id of their engine's layers, while their model runners exist. A method keeps
#: its engine's configuration alive, and with it the layers, so an id is not reused while its method exists.
_by_layers: dict[int, ref[SparseMethod]] = {}


def method_of(holder: Any) -> SparseMethod | None:
    """Return the method of a scheduler, a KV-cache manager, a model runner or V2's block tables; None without one."""
    return getattr(holder, METHOD, None)


def _started(vllm_config: Any, role: Role, owner: Any, start: Callable[[SparseMethod], None]) -> SparseMethod | None:
    """Create and start the configured method's instance for one side; import method modules only if one is configured.

    Raises:
        UcmError: If it cannot start; also logged in one record, because vLLM prints it among its tracebacks.
    """
    from ucm.integration.vllm.connector.failures import refusals_logged  # noqa: PLC0415
    from ucm.integration.vllm.sparse.config import KEY, sparse_method_config  # noqa: PLC0415

    with refusals_logged("UCM.Sparse"):
        configured = sparse_method_config(vllm_config)
        if configured is None:
            return None
        from ucm.integration.vllm.handshake import require_built_hooks, require_hooked  # noqa: PLC0415
        from ucm.integration.vllm.sparse.sharing import needed_groups  # noqa: PLC0415
        from ucm.sparse.factory import method_class  # noqa: PLC0415

        name, options = configured
        method = method_class(name)(vllm_config, role, options)
        require_built_hooks(type(method))
        groups = needed_groups(type(method), vllm_config)
        require_hooks(name, groups)
        require_hooked(name, groups, owner)
        if isinstance(optional(vllm_config, "additional_config"), dict):
            # vLLM's compile cache keys on this dictionary and not on the connector's settings: without the
            # method in it, a graph compiled without the method's layer calls would be loaded for a run with them.
            vllm_config.additional_config.setdefault(KEY, {name: options})
        start(method)
    from ucm.logger import get_logger  # noqa: PLC0415

    get_logger(__name__).info("[UCM.Sparse] %s is active on the %s side", name, role.value)
    return method


# Scheduler side.


def scheduler_init(scheduler: Any) -> None:
    """A scheduler exists: create the method's instance for it, if one is configured."""

    def start(method: SparseMethod) -> None:
        from ucm.integration.vllm.handshake import require_seeding  # noqa: PLC0415 - as in `_started`
        from ucm.integration.vllm.sparse.sharing import require_connectors, seeded  # noqa: PLC0415

        require_connectors(method, optional(scheduler, "connector"))
        require_seeding(method)
        replace_block_hash(scheduler, lambda hash_function: seeded(scheduler.vllm_config, hash_function))
        setattr(scheduler, METHOD, method)
        setattr(scheduler.kv_cache_manager, METHOD, method)
        method.scheduler_started(scheduler)

    _started(scheduler.vllm_config, Role.SCHEDULER, scheduler, start)


def block_hash_function(vllm_config: Any, hash_function: Any) -> Any:
    """The engine has chosen how to hash blocks: hash what a method makes their KV depend on as well."""
    from ucm.integration.vllm.sparse.config import sparse_method_config  # noqa: PLC0415 - as in `_started`

    if sparse_method_config(vllm_config) is None:
        return hash_function
    from ucm.integration.vllm.sparse.sharing import seeded  # noqa: PLC0415 - as in `_started`

    return seeded(vllm_config, hash_function)


def kv_cache_memory(vllm_config: Any, kv_cache_specs: list[Any], available: list[int]) -> list[int]:
    """The memory for KV caches is known, in bytes by worker: take from it what a method needs beside the caches."""
    from ucm.integration.vllm.sparse.config import sparse_method_config  # noqa: PLC0415 - as in `_started`

    if sparse_method_config(vllm_config) is None:
        return available
    from ucm.integration.vllm.sparse.memory import left_for_kv_caches  # noqa: PLC0415

    return left_for_kv_caches(vllm_config, kv_cache_specs, available)


def engine_core_started(engine_core: Any) -> None:
    """The model is loaded, and there are no requests yet: ask every worker what it runs.

    Raises:
        SparseMethodError: If one does not answer, or runs something other than this process.
    """
    from ucm.integration.vllm.sparse.config import sparse_method_config  # noqa: PLC0415 - as in `_started`

    if sparse_method_config(engine_core.vllm_config) is not None:
        from ucm.integration.vllm.handshake import require_same_in_workers  # noqa: PLC0415

        require_same_in_workers(engine_core)


def request_added(scheduler: Any, request: Any) -> None:
    """A new request has entered the queue."""
    if (method := method_of(scheduler)) is not None:
        method.request_added(request)


def limit_new_tokens(scheduler: Any, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
    """The scheduler is about to compute tokens of a request: limit them; see `SparseMethod.limit_new_tokens`."""
    if (method := method_of(scheduler)) is not None:
        num_new_tokens = method.limit_new_tokens(request, num_computed_tokens, num_new_tokens)
    return num_new_tokens


def before_allocation(kv_cache_manager: Any, request: Any) -> bool:
    """Blocks are about to be allocated for a request: return whether to; see `SparseMethod.before_allocation`."""
    if (method := method_of(kv_cache_manager)) is None:
        return True
    name, computed = method.allocating or ("", 0)
    if name in ("", request.request_id):
        # A scheduler may allocate repeatedly within a step, but a request's computed tokens only grow after one.
        if name and request.num_computed_tokens > computed and "SCHEDULER" in method.needed_hooks:
            raise _hook_lost(method, "scheduler_output_built", f"another step of request {name}", "scheduler")
        method.allocating = (request.request_id, request.num_computed_tokens)
    return method.before_allocation(request)


def scheduler_output_built(scheduler: Any, scheduler_output: Any) -> None:
    """A step is decided: the method's metadata travels to the workers as ``ucm_sparse_meta``."""
    if (method := method_of(scheduler)) is not None:
        runs = scheduler_output.num_scheduled_tokens
        if runs and method.allocating is None and "KV_CACHE_MANAGER" in method.needed_hooks:  # each gets blocks first
            raise _hook_lost(method, "before_allocation", f"a step of {len(runs)} requests", "KV-cache manager")
        method.allocating = None
        scheduler_output.ucm_sparse_meta = method.build_metadata(scheduler_output)
        setattr(scheduler_output, TOLD, True)


def request_preempted(scheduler: Any, request: Any) -> None:
    """A running request has lost its blocks, and with them its place in this step."""
    if (method := method_of(scheduler)) is not None:
        method.request_preempted(request)


def request_freed(scheduler: Any, request: Any) -> None:
    """A request has ended."""
    if (method := method_of(scheduler)) is not None:
        if method.allocating is not None and method.allocating[0] == request.request_id:
            method.allocating = ("", 0)  # the next request that asks takes its place
        method.request_freed(request)


def _hook_lost(method: SparseMethod, hook: str, runs: str, place: str = "model runner") -> SparseMethodError:
    """Return the error for a step in which something runs although a hook of a part of vLLM did not fire before it.

    Hooks are checked when an engine starts. If one is removed later, the method would run incompletely: its scheduler
    side frees blocks that are not copied out, or that this step still reads; or no blocks are freed.
    """
    return SparseMethodError(
        f"{type(method).__name__} was not told of a step that runs: a hook of the {place} has been taken out",
        where=f"{runs} runs, and the hook {hook} did not fire before it",
        fix=f"remove the code that replaces functions of vLLM's {place} in a running engine, or serve without "
        "ucm_sparse_config",
    )


# Worker side.


def worker_init(wrapper: Any) -> None:
    """A worker has its device, parallel groups and model runner: create the runner's method, if configured."""

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

    _started(wrapper.vllm_config, Role.WORKER, optional(wrapper.worker, "model_runner"), start)


def worker_method(vllm_config: Any) -> SparseMethod | None:
    """Return the method of the worker with this configuration, for UCM's connector, which exports its counters."""
    if not _works_sparsely:
        return None
    found = _by_layers.get(id(vllm_config.compilation_config.static_forward_context))
    return None if found is None else found()


def update_states(runner: Any, scheduler_output: Any) -> None:
    """V1: a step has arrived."""
    if (method := method_of(runner)) is not None:
        _step_arrived(method, scheduler_output)
        method.update_states(runner, scheduler_output)


def worker_requests_finished(runner: Any, request_ids: Iterable[str]) -> None:
    """V1: the requests that ended since the last step; called in every step, mostly with none."""
    if (method := method_of(runner)) is not None and request_ids:
        method.requests_finished(runner, request_ids)


def blocks_updated(runner: Any, request_id: str, request_index: int, scheduler_output: Any) -> None:
    """V1: the new blocks of a request that was also in the previous step are in its row."""
    if (method := method_of(runner)) is not None:
        method.blocks_updated(runner, request_id, request_index, scheduler_output)


def execute_begin(runner: Any, scheduler_output: Any) -> None:
    """V1: the model is about to run."""
    if (method := method_of(runner)) is not None:
        _check_arrived(method, scheduler_output)
        method.execute_begin(runner, scheduler_output, runner.input_batch)


def execute_finished(runner: Any, scheduler_output: Any, model_output: Any) -> None:
    """V1: the model has run."""
    if (method := method_of(runner)) is not None:
        _check_asked(method, runner)
        method.execute_finished(runner, scheduler_output, model_output)


def v2_requests_finished(runner: Any, scheduler_output: Any) -> None:
    """V2: a step has arrived; report its finished requests, without the preempted ones that V2 includes."""
    if (method := method_of(runner)) is not None:
        # The only object of a runner that a hook gets without the runner; recreated with each KV cache.
        tables = optional(runner, "block_tables")
        if tables is not None:
            setattr(tables, METHOD, method)
        _step_arrived(method, scheduler_output)
        method.update_states(runner, scheduler_output)
        if scheduler_output.finished_req_ids:
            method.requests_finished(runner, scheduler_output.finished_req_ids)


def v2_requests_added(runner: Any, scheduler_output: Any) -> None:
    """V2: the step's new and resumed requests are about to be added."""
    if (method := method_of(runner)) is not None:
        method.requests_added(runner, scheduler_output)


def v2_requests_updated(runner: Any, scheduler_output: Any) -> None:
    """V2: the running requests' new blocks are in the block tables."""
    if (method := method_of(runner)) is not None:
        method.requests_updated(runner, scheduler_output)


def v2_append_block_ids(
    block_tables: Any, request_index: int, block_ids: tuple[list[int], ...], overwrite: bool
) -> tuple[tuple[list[int], ...], bool]:
    """V2: blocks are about to be written to a row."""
    if (method := method_of(block_tables)) is not None:
        return method.append_block_ids(block_tables, request_index, block_ids, overwrite)
    return block_ids, overwrite


def v2_execute_begin(runner: Any, scheduler_output: Any, input_batch: Any, dummy_run: bool) -> None:
    """V2: the model is about to run, or its graph to be replayed; ignored in warm-up steps."""
    if (method := method_of(runner)) is not None and not dummy_run:
        _check_arrived(method, scheduler_output)
        method.execute_begin(runner, scheduler_output, input_batch)


def v2_execute_finished(runner: Any, scheduler_output: Any, dummy_run: bool) -> None:
    """V2: the model has run."""
    if (method := method_of(runner)) is not None and not dummy_run:
        _check_asked(method, runner)
        method.execute_finished(runner, scheduler_output, None)


def _step_arrived(method: SparseMethod, scheduler_output: Any) -> None:
    """Check that the scheduler side's hooks ran for an arriving step, except for warm-up steps before the first one."""
    told = optional(scheduler_output, TOLD, False)
    runs = scheduler_output.num_scheduled_tokens
    if not told and method.decided and runs and "SCHEDULER" in method.needed_hooks:
        raise _hook_lost(method, "scheduler_output_built", f"a step of {len(runs)} requests", "scheduler")
    method.decided |= told
    method.awaits_begin = bool(runs)


def _check_arrived(method: SparseMethod, scheduler_output: Any) -> None:
    """Check that the method was notified when the starting step arrived."""
    told = method.awaits_begin or not scheduler_output.num_scheduled_tokens
    if not told and "MODEL_RUNNER" in method.needed_hooks:
        raise _hook_lost(method, "update_states", "the model")
    method.awaits_begin = False


def _check_asked(method: SparseMethod, runner: Any) -> None:
    """Check, after a worker's first step, that every layer with a KV cache has called the method.

    A model may compute attention without vLLM's operators in some or all layers, which would read blocks that the
    method has freed, without any other sign.
    """
    if method.asked is not None:
        from ucm.integration.vllm.sparse.requirements import require_asked  # noqa: PLC0415 - as in `worker_init`

        layers = method.vllm_config.compilation_config.static_forward_context
        require_asked(type(method).__name__, runner.kv_cache_config, layers, method.asked)
        method.asked = None


# Inside the model. A step without attention metadata is vLLM's memory profiling, and is ignored.


def _running_layers() -> int:
    """Return the id of the running engine's layers, an object that its configuration owns."""
    from vllm.forward_context import get_forward_context  # noqa: PLC0415 - vLLM may be importing this module

    return id(get_forward_context().no_compile_layers)


#: Makes torch.compile treat the result as a constant instead of tracing the function; the mark of
#: ``torch.compiler.assume_constant_result``, without the import.
_running_layers._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - see above


def _in_forward() -> SparseMethod | None:
    """Return the method of the engine whose forward is running.

    vLLM sets the forward context for each forward, including memory profiling, and resets it when one
    fails, so no state of ours can be left behind.
    """
    method = _by_layers.get(_running_layers())
    return None if method is None else method()


def kv_write_begin(layer_name: str, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> Any:
    """A layer's new keys and values are about to be written."""
    if _works_sparsely and (method := _in_forward()) is not None:
        return method.kv_write_begin(layer_name, key, value, kv_cache, slot_mapping)
    return slot_mapping


def kv_write_finished(layer_name: str, kv_cache: Any, slot_mapping: Any) -> None:
    """A layer's new keys and values have been written."""
    if _works_sparsely and (method := _in_forward()) is not None:
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
        raise _hook_lost(method, "execute_begin", f"layer {layer_name}")
    if method.asked is not None:
        method.asked.add(layer_name)
    return method.attention_begin(layer_name, query, key, value, kv_cache, attn_metadata)


def attention_finished(layer_name: str, query: Any, kv_cache: Any, attn_metadata: Any, output: Any) -> None:
    """A layer's attention has run."""
    if _works_sparsely and (method := _in_forward()) is not None and attn_metadata is not None:
        method.attention_finished(layer_name, query, kv_cache, attn_metadata, output)


def mla_begin(layer: Any, phase: str, query: Any, kv_cache: Any, attn_metadata: Any) -> Any:
    """One half of an MLA layer's attention is about to run."""
    if _works_sparsely and (method := _in_forward()) is not None:
        return method.mla_begin(layer, phase, query, kv_cache, attn_metadata)
    return attn_metadata


def mla_finished(layer: Any, phase: str, output: Any) -> None:
    """One half of an MLA layer's attention has run."""
    if _works_sparsely and (method := _in_forward()) is not None:
        method.mla_finished(layer, phase, output)


def layer_begin(layer: Any, positions: Any, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
    """A decoder layer is about to run."""
    if _works_sparsely and (method := _in_forward()) is not None:
        return method.layer_begin(layer, positions, hidden_states, residual)
    return hidden_states, residual


def layer_finished(layer: Any, positions: Any, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
    """A decoder layer has run."""
    if _works_sparsely and (method := _in_forward()) is not None:
        return method.layer_finished(layer, positions, hidden_states, residual)
    return hidden_states, residual


def ffn_begin(layer: Any, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
    """A decoder layer's feed-forward block is about to run."""
    if _works_sparsely and (method := _in_forward()) is not None:
        return method.ffn_begin(layer, hidden_states, residual)
    return hidden_states, residual


def ffn_finished(layer: Any, hidden_states: Any, residual: Any) -> tuple[Any, Any]:
    """A decoder layer's feed-forward block has run."""
    if _works_sparsely and (method := _in_forward()) is not None:
        return method.ffn_finished(layer, hidden_states, residual)
    return hidden_states, residual
