"""What the scheduler's side tells the workers at each step; it travels by pickle between vLLM's own processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucm.store.base import BlockKey


@dataclass(slots=True)
class BlockMoves:
    """Blocks of one request in one KV-cache group, to be loaded or dumped.

    Args:
        request_id: vLLM's request id.
        group: The KV-cache group's index.
        keys: Each block's key in the store.
        block_ids: Each block's place in the KV cache, as many as keys.
        leases: Where the blocks were held ahead, what names the hold to each rank, in the ranks' order.
    """

    request_id: str
    group: int
    keys: list[BlockKey]
    block_ids: list[int]
    leases: tuple[str, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """One engine step.

    Args:
        step: Counts up by one with each step, from 1.
        namespace: Where the engine's blocks are kept.
        loads: To be loaded: before the step's forward, or while the requests wait between steps.
        dumps: To be dumped after the step's forward computed them.
        late_dumps: To be dumped at once: computed in earlier steps, and not written by this one.
        fresh_block_ids: Blocks that this step takes into use, and may write: what still reads them must finish first.
        failed_block_ids: Blocks that failed to load in an earlier step, to be reported with this one again.
        idle: Nothing is computed in this step.
        settled: The last step of which every rank's outcome is known; dumps up to it may become visible.
        void: The last step that may have computed with blocks that failed to load; dumps up to it are dropped.
    """

    step: int
    namespace: str = ""
    loads: list[BlockMoves] = field(default_factory=list)
    dumps: list[BlockMoves] = field(default_factory=list)
    late_dumps: list[BlockMoves] = field(default_factory=list)
    fresh_block_ids: set[int] = field(default_factory=set)
    failed_block_ids: set[int] = field(default_factory=set)
    idle: bool = False
    settled: int = 0
    void: int = 0
