"""Blocks that may hold wrong KV after a load within a step has failed, in a model with one KV-cache group.

vLLM takes back what the requests with such a block had computed behind it, has the first of them compute it anew, and
lets the others count it as computed. But the first may be aborted before it gets there, or be given fewer tokens per
step than the others need. So a block is suspect until a request with nothing suspect before it has written it in a step
that went well, and until then it is reported with each step that reads it: vLLM discards what came of that, and takes
the next request back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ucm.integration.vllm.connector.request_state import RequestState


class SuspectBlocks:
    """Keeps account of them, where each step's outcome is known before the next one is planned.

    Args:
        block_size: Tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._suspect: set[int] = set()
        self._reported: set[int] = set()
        self._doubtful: set[str] = set()
        self._writing: dict[str, int] = {}

    def failed(self, block_ids: set[int], lists: Iterable[list[int]]) -> set[int]:
        """The last step's failures were told, those that were reported again among them.

        Args:
            block_ids: The blocks.
            lists: The blocks of each request that the step may have computed for.

        Returns:
            What has become suspect: the blocks that failed for the first time, and those behind them.
        """
        new = block_ids - self._reported
        found = set(new)
        for ids in lists:
            first = next((place for place, block_id in enumerate(ids) if block_id in new), len(ids))
            found.update(ids[first:])
        self._suspect |= found
        return found

    def begin(
        self, loaded: Iterable[int], scheduled: Iterable[str], states: Mapping[str, RequestState | None]
    ) -> set[int]:
        """A step is planned.

        Args:
            loaded: Blocks that it loads.
            scheduled: The requests that it computes.
            states: All requests, by their ids.

        Returns:
            The blocks to be reported with it.
        """
        self._reported, self._doubtful = set(), set()
        if self._suspect:
            self._clear_written(states)
            self._suspect.difference_update(loaded)
        self._writing = {}
        if self._suspect:
            for request_id in scheduled:
                state = states.get(request_id)
                if state is not None:
                    self._look_at(request_id, state)
        return self._reported

    def __contains__(self, request_id: str) -> bool:
        """Whether what the planned step computes for a request may be wrong."""
        return request_id in self._doubtful

    def _look_at(self, request_id: str, state: RequestState) -> None:
        computed = state.request.num_computed_tokens
        read = self._suspect.intersection(state.block_ids[0][: computed // self._block_size])
        if read:
            self._doubtful.add(request_id)
            self._reported |= read
        else:
            self._writing[request_id] = computed

    def _clear_written(self, states: Mapping[str, RequestState | None]) -> None:
        """What the last step computed and vLLM did not take back is right."""
        for request_id, begin in self._writing.items():
            state = states.get(request_id)
            if state is not None:
                end = state.request.num_computed_tokens
                written = state.block_ids[0][begin // self._block_size : end // self._block_size]
                self._suspect.difference_update(written)
