"""What vLLM's releases differ in, read and named in one place."""

from __future__ import annotations

import inspect
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The variable that selects the attention backend in releases without the option.
BACKEND_VARIABLE = "VLLM_ATTENTION_BACKEND"
#: The runner's variable, from 0.12.0 on.
V2_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
V2_PACKAGE = "vllm.v1.worker.gpu."
#: The Triton backend's name where V0 had one of the same name.
V1_TRITON = "TRITON_ATTN_VLLM_V1"


def block_ids_by_group(blocks: Any) -> list[list[int]]:
    """Return the block ids of a ``KVCacheBlocks``, one list per group.

    Releases give a list of ids (0.9.0, one group), a list of lists or a tuple of lists.
    """
    ids = blocks.get_block_ids()
    if ids and isinstance(ids[0], int):
        return [list(ids)]
    return [list(group) for group in ids]


def admitted_requests(scheduler_output: Any) -> Iterator[tuple[str, list[list[int]], int]]:
    """Yield requests that a step starts or resumes: id, all block ids per group, tokens computed or loaded before."""
    for data in scheduler_output.scheduled_new_reqs:
        yield data.req_id, _by_group(data.block_ids), data.num_computed_tokens
    cached = scheduler_output.scheduled_cached_reqs
    if isinstance(cached, list):
        for data in cached:
            if data.resumed_from_preemption:
                yield data.req_id, _by_group(data.new_block_ids), data.num_computed_tokens
        return
    resumed = _resumed(cached)
    for request_id, new_ids, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if request_id in resumed:
            yield request_id, _by_group(new_ids), computed


def grown_requests(scheduler_output: Any) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield running requests that got further blocks, with the new ids per group.

    Requests that resume after a preemption are excluded: like new ones, they get all their blocks at admission.
    """
    cached = scheduler_output.scheduled_cached_reqs
    if isinstance(cached, list):  # until 0.9.1 one object per request
        for data in cached:
            if not data.resumed_from_preemption and data.new_block_ids:
                yield data.req_id, _by_group(data.new_block_ids)
        return
    resumed = _resumed(cached)
    for request_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if new_ids and request_id not in resumed:
            yield request_id, _by_group(new_ids)


def _resumed(cached: Any) -> set[str]:
    resumed: set[str] | None = getattr(cached, "resumed_req_ids", None)
    if resumed is None:  # until 0.11.0 a list of flags
        return {i for i, flag in zip(cached.req_ids, cached.resumed_from_preemption, strict=True) if flag}
    return resumed


def _by_group(new_ids: Any) -> list[list[int]]:
    if new_ids and isinstance(new_ids[0], int):
        return [list(new_ids)]
    return [list(group) for group in new_ids]


def ranks(vllm_config: Any) -> int:
    """Return the number of workers that run one step together."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)


class LoadPolicy(NamedTuple):
    """When loads run.

    Args:
        between_steps: Requests wait for their loads between steps, in vLLM's state for remote KV; vLLM then computes
            the tokens of blocks that failed to load. If False, blocks are loaded within the step that needs them, and
            loads must not fail.
        background: A step may end before the loads that it started.
        reloads_preempted: A preempted request may load again.
    """

    between_steps: bool
    background: bool = False
    reloads_preempted: bool = True


def load_policy(connector_base: type, num_groups: int, kind: str) -> LoadPolicy:
    """Choose a load policy that vLLM's load-failure recovery supports.

    Recovery came with 0.11.1, for models with one KV-cache group. It is sound for requests that wait between steps,
    except for preempted ones before 0.19.1.

    Args:
        connector_base: vLLM's connector class.
        num_groups: The model's number of KV-cache groups.
        kind: The connector type; ``layerwise`` needs loads within a step.
    """
    if not hasattr(connector_base, "get_block_ids_with_load_errors") or num_groups > 1 or kind == "layerwise":
        return LoadPolicy(between_steps=False)
    # From 0.17.1 at the latest, vLLM keeps the blocks of an aborted request until its load has ended.
    background = hasattr(connector_base, "requires_piecewise_for_cudagraph")
    reaches_pool = hasattr(connector_base, "bind_gpu_block_pool")
    return LoadPolicy(between_steps=True, background=background, reloads_preempted=reaches_pool)


def asks_again(connector_base: type) -> bool:
    """Return whether a lookup's outcome may be reported as not yet known, as from vLLM 0.10.2 on."""
    return hasattr(connector_base, "shutdown")  # added in the same release


def outer_transfer(vllm_config: Any) -> Any:
    """Return the engine's ``KVTransferConfig`` if this is one of several connectors (``MultiConnector``); else None.

    Such a connector is created with its own configuration, so vLLM's is read from the frame of the creator.
    """
    mine = vllm_config.kv_transfer_config.kv_connector
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        found = getattr(frame.f_locals.get("vllm_config"), "kv_transfer_config", None)
        if found is not None and found.kv_connector != mine:
            return found
    return None


def runs_micro_batches(vllm_config: Any) -> bool:
    """Return whether the worker may split a batch, so that layers run several times per step, in several threads."""
    parallel = vllm_config.parallel_config
    return bool(getattr(parallel, "enable_dbo", False)) or int(getattr(parallel, "ubatch_size", 0) or 0) > 1


def weights_move(vllm_config: Any) -> bool:
    """Return whether a rank's weights move without a change of the model, so that checking them is meaningless.

    Experts may move between ranks, and offloaded layers may take turns in one buffer on the device.
    """
    offload = getattr(vllm_config, "offload_config", None)
    turns = int(getattr(getattr(offload, "prefetch", None), "offload_group_size", 0) or 0) > 0
    return turns or bool(getattr(vllm_config.parallel_config, "enable_eplb", False))


def drafts_look_ahead(vllm_config: Any) -> bool:
    """Return whether a draft model reads the target's hidden states, shifted by one token (EAGLE, MTP and similar)."""
    draft = getattr(vllm_config, "speculative_config", None)
    return draft is not None and bool(draft.use_eagle())


def device_type(vllm_config: Any) -> str:
    """Return the type of the device that the engine runs on, such as ``cuda``; empty if the release does not say."""
    device = getattr(vllm_config, "device_config", None)
    return str(getattr(device, "device_type", None) or getattr(device, "device", None) or "")


def saves_after_drafts() -> bool:
    """Return whether connectors save after the draft model has run, as from vLLM 0.18.1 on."""
    try:
        from vllm.v1.worker.kv_connector_model_runner_mixin import (  # noqa: PLC0415 - ucm imports without vLLM
            KVConnectorModelRunnerMixin,
        )
    except ImportError:
        return False
    return hasattr(KVConnectorModelRunnerMixin, "finalize_kv_connector")


def choose_backend(*, tells_sums: bool = False) -> str:
    """Return how to select, on a GPU, an attention backend whose block table can be restricted.

    Args:
        tells_sums: Whether the backend must also return the log-sum-exp.
    """
    try:
        from vllm import envs  # noqa: PLC0415 - ucm imports without vLLM
        from vllm.platforms import interface  # noqa: PLC0415
    except ImportError:
        named, triton = False, "TRITON_ATTN"
    else:
        named = BACKEND_VARIABLE in envs.environment_variables
        triton = V1_TRITON if hasattr(getattr(interface, "_Backend", None), V1_TRITON) else "TRITON_ATTN"
    option = f"{BACKEND_VARIABLE}=" if named else "--attention-backend "
    others = "" if tells_sums else f" or {option}{triton}"
    return f"choose another backend, on a GPU: {option}FLASH_ATTN{others}"


def leave_out(config: Any, *fields: str) -> tuple[str, str]:
    """Return which of some fields of a configuration are set, and how to start without them.

    Args:
        config: The part of vLLM's configuration with the fields.
        fields: Their names, which are also the options' names.

    Returns:
        The fields, and the options, each list in words.
    """
    set_here = [field for field in fields if getattr(config, field, None)]
    return ", ".join(set_here), " and ".join(f"--{field.replace('_', '-')}" for field in set_here)


def no_whole_graphs(compilation_config: Any) -> str:
    """Return how to start vLLM without full CUDA graphs: up to 0.10.0 a flag, then a mode."""
    has_mode = getattr(compilation_config, "cudagraph_mode", None) is not None
    setting = '{"cudagraph_mode": "PIECEWISE"}' if has_mode else '{"full_cuda_graph": false}'
    return f"start vLLM with --compilation-config '{setting}' or with --enforce-eager"


def v1_runner(runner: object) -> str:
    """Return how to select vLLM's V1 model runner; empty if the release has no choice."""
    return f" ({V2_RUNNER_VARIABLE}=0)" if type(runner).__module__.startswith(V2_PACKAGE) else ""


def clear_row(table: Any, row_idx: int) -> None:
    """Clear a row, like `BlockTable.clear_row` of vLLM 0.19.0 and later.

    Args:
        table: A ``BlockTable`` or ``MultiGroupBlockTable``.
        row_idx: The request's row.
    """
    groups = getattr(table, "block_tables", None)
    if groups is not None:
        for group in groups:
            clear_row(group, row_idx)
        return
    num_blocks = table.num_blocks_per_row[row_idx]
    if num_blocks > 0:
        rows = getattr(table, "block_table_np", None)  # up to 0.10.2; later the table is a CpuGpuBuffer
        if rows is None:
            rows = table.block_table.np
        rows[row_idx, :num_blocks] = 0
    table.num_blocks_per_row[row_idx] = 0
