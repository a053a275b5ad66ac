"""Blocks that failed to load within a step and that several requests have.

vLLM takes back what these requests had computed behind such a block, has the first of them compute it anew, and lets
the others count it as computed. But the first may be aborted before it gets there, or be given fewer tokens per step
than the others need. So the block is reported again with each step for as long as a request counts it as computed that
did not compute it itself: then vLLM takes that request back as well, and none of its tokens come from the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.integration.vllm.connector.request_state import RequestState


class SharedFailures:
    """The requests that have blocks that failed, of a model with one KV-cache group.

    Args:
        block_size: Tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._first: dict[str, int] = {}
        self._reported: set[int] = set()

    def failed(self, block_ids: set[int], states: Mapping[str, RequestState | None]) -> set[int]:
        """Blocks were told as failed: for the first time, or because they were reported again.

        Args:
            block_ids: The blocks.
            states: The requests by their ids.

        Returns:
            Those that were told for the first time.
        """
        new = block_ids - self._reported
        for request_id, state in states.items():
            ids = [] if state is None else state.block_ids[0]
            first = next((place for place, block_id in enumerate(ids) if block_id in new), None)
            if first is not None:
                self._first[request_id] = min(first, self._first.get(request_id, first))
        return new

    def report(self, states: Mapping[str, RequestState | None]) -> set[int]:
        """The blocks to report again with the step that is being planned."""
        self._reported = set()
        for request_id, first in list(self._first.items()):
            state = states.get(request_id)
            if state is None or state.request.num_computed_tokens <= first * self._block_size:
                del self._first[request_id]  # it ended, or computes the block next
            else:
                self._reported.add(state.block_ids[0][first])
        return self._reported

    def __contains__(self, request_id: str) -> bool:
        """Whether a request counts a failed block as computed."""
        return request_id in self._first
