"""A step as the model runners know it: `StepBatch` from a V1 or a V2 runner.

V1's runner keeps a persistent batch with all counts on the host. V2's batch is built per step and has them on the
device in some releases, so there they are taken from the scheduler's output, which has them in all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.integration.vllm.connector.scheduled import admitted_requests
from ucm.sparse.attention import StepBatch, asked_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def step_batch(runner: Any, scheduler_output: Any, input_batch: Any) -> StepBatch:
    """The requests of a step, in the order of the rows of its metadata.

    Args:
        runner: vLLM's model runner, V1 or V2.
        scheduler_output: vLLM's ``SchedulerOutput`` of the step.
        input_batch: The runner's persistent batch (V1), or the step's (V2).
    """
    request_ids = list(input_batch.req_ids)
    rows = hasattr(input_batch, "idx_mapping_np")  # V2: the batch's rows point to rows of the runner's states
    states = np.asarray(input_batch.idx_mapping_np[: len(request_ids)]) if rows else None
    if states is None:
        computed = input_batch.num_computed_tokens_cpu[: len(request_ids)]
        prompt = input_batch.num_prompt_tokens[: len(request_ids)]
    else:
        computed = _scheduled_computed(scheduler_output, request_ids)
        prompt = _prompt_lengths(runner)[states]
    admitted = {request_id for request_id, _, _ in admitted_requests(scheduler_output)}
    return StepBatch(
        request_ids,
        np.array([scheduler_output.num_scheduled_tokens[i] for i in request_ids], np.int64),
        np.array(computed, np.int64),
        np.array(prompt, np.int64),
        np.array([i in admitted for i in request_ids], np.bool_),
        {
            data.req_id: asked
            for data in scheduler_output.scheduled_new_reqs
            if (asked := asked_of(data.sampling_params)) is not None
        },
    )


def _scheduled_computed(scheduler_output: Any, request_ids: Sequence[str]) -> list[int]:
    """The tokens that each request has from before the step, as the scheduler counts them."""
    known = {data.req_id: data.num_computed_tokens for data in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    known.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [known[i] for i in request_ids]


def _prompt_lengths(runner: Any) -> NDArray[Any]:
    """V2: the prompts' lengths by row of the states; an array, from 0.17.1 on one that a device sees too."""
    lengths = runner.req_states.prompt_len
    found: NDArray[Any] = getattr(lengths, "np", lengths)
    return found
