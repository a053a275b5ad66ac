"""What the scheduler's side remembers of a request between steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ucm.integration.vllm.connector.holding import Hold


@dataclass(slots=True)
class PendingLoad:
    """Tokens that the scheduler has decided to load with its next step.

    Args:
        start: Computed tokens before the load.
        end: Computed tokens after it.
        block_ids: The blocks of each group that the request had been given by then.
    """

    start: int
    end: int
    block_ids: list[list[int]]


@dataclass(slots=True)
class RequestState:
    """A request that the scheduler knows.

    Args:
        request: vLLM's request.
        block_ids: The block ids of each group, in order; entries below a sliding window may be out of date.
        saved: For each group, the blocks from the start that need no dump any more.
        looked_up: The computed tokens that the last lookup was for, when it was made, and what it found.
        hold: What keeps the found blocks from being evicted until they are loaded.
        tried: A load was begun, and the request has not been started since.
    """

    request: Any
    block_ids: list[list[int]]
    saved: list[int]
    looked_up: tuple[int, float, int] | None = None
    hold: Hold = field(default_factory=Hold)
    tried: bool = False
