"""How far vLLM's scheduler runs ahead, read from its configuration; the connector asks here, too."""

from __future__ import annotations

from typing import Any


def batches_in_flight(vllm_config: Any) -> int:
    """How many steps may be scheduled before the outcome of the first of them is known."""
    known = getattr(vllm_config, "max_concurrent_batches", None)
    pipeline = int(vllm_config.parallel_config.pipeline_parallel_size)
    asynchronous = bool(getattr(vllm_config.scheduler_config, "async_scheduling", False))
    return max(int(known or 1), pipeline + int(asynchronous))
