"""What the connector has to know of the engine that it runs in, read where each release of vLLM keeps it."""

from __future__ import annotations

from typing import Any

from ucm.integration.vllm.connector.errors import UnsupportedModelError


def batches_in_flight(vllm_config: Any) -> int:
    """How many steps may be scheduled before the outcome of the first of them is known."""
    known = getattr(vllm_config, "max_concurrent_batches", None)
    pipeline = int(vllm_config.parallel_config.pipeline_parallel_size)
    asynchronous = bool(getattr(vllm_config.scheduler_config, "async_scheduling", False))
    return max(int(known or 1), pipeline + int(asynchronous))


def ranks(vllm_config: Any) -> int:
    """Workers that run one step together."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)


def recovers_from_load_failures(connector_base: type, num_groups: int) -> bool:
    """Whether vLLM computes the tokens of blocks that a synchronous load failed to bring.

    It does from 0.11.1 on, for models with one KV-cache group: ids of failed blocks of several groups cannot be told
    apart.
    """
    return num_groups == 1 and hasattr(connector_base, "get_block_ids_with_load_errors")


def refuse_what_cannot_work(vllm_config: Any) -> None:
    """Refuse settings under which blocks cannot be found again, or must not be.

    Raises:
        UnsupportedModelError: Naming the setting.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name, 1) or 1) > 1:
            raise UnsupportedModelError(
                "the tokens of a block are spread over ranks, and UCM's connectors store whole blocks",
                where=f"parallel_config.{name} = {getattr(parallel, name)}",
                fix="run without context parallelism, or without a UCM connector",
            )
