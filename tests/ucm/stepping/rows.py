"""A worker's state of its requests, as in vLLM's model runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Rows:
    """The rows of the block table with their tokens; running requests only gain blocks."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        #: The hit tokens of the requests that the last step admits.
        self.admitted: dict[str, int] = {}

    def update(self, output: Any, resumed: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Apply a step.

        Args:
            output: vLLM's ``SchedulerOutput``.
            resumed: The tokens of the requests resumed after a preemption.

        Returns:
            The position of the step's first token, by request.
        """
        starts = {}
        self.admitted.clear()
        for data in output.scheduled_new_reqs:
            self.blocks[data.req_id] = list(data.block_ids[0])
            self.prompts[data.req_id] = len(data.prompt_token_ids)
            self.tokens[data.req_id] = list(data.prompt_token_ids)
            starts[data.req_id] = self.admitted[data.req_id] = data.num_computed_tokens
        for request_id, new, computed in _cached(output):
            starts[request_id] = computed
            if request_id in output.scheduled_cached_reqs.resumed_req_ids:
                self.blocks[request_id] = list(new)
                self.tokens[request_id] = list(resumed[request_id])
                self.admitted[request_id] = computed
            else:
                self.blocks[request_id] += new
        return starts

    def table(self, ids: Sequence[str]) -> torch.Tensor:
        """Return the block table of a batch, int32 ``[num_requests, max_blocks]``."""
        table = torch.zeros(len(ids), max(len(self.blocks[i]) for i in ids), dtype=torch.int32)
        for row, request_id in enumerate(ids):
            table[row, : len(self.blocks[request_id])] = torch.tensor(self.blocks[request_id], dtype=torch.int32)
        return table


def fresh(output: Any, block_size: int) -> list[int]:
    """Return the blocks that a step allocates to its requests, without those of a hit."""
    found = []
    for data in output.scheduled_new_reqs:
        found += data.block_ids[0][data.num_computed_tokens // block_size :]
    for request_id, new, computed in _cached(output):
        resumed = request_id in output.scheduled_cached_reqs.resumed_req_ids
        found += new[computed // block_size :] if resumed else new
    return found


def _cached(output: Any) -> list[tuple[str, list[int], int]]:
    """Return, for each request that vLLM's runner knows, the id, the new blocks and the number of computed tokens."""
    cached = output.scheduled_cached_reqs
    news = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
    return [(request_id, new[0] if new else [], computed) for request_id, new, computed in news]
