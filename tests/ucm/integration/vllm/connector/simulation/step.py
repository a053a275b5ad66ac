"""The scheduling decisions of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ucm.integration.vllm.connector.metadata import StepPlan


@dataclass
class Work:
    """The work of a step for one request.

    Args:
        request_id: The request.
        start: Tokens computed before; drafts count as accepted.
        count: Tokens to compute, including drafts.
        drafts: How many of them are drafts.
        known: The request's tokens if it is new or resumed for the worker; else None.
        block_ids: Its blocks, by group.
    """

    request_id: str
    start: int
    count: int
    drafts: int
    known: list[int] | None
    block_ids: list[list[int]]


@dataclass
class Step:
    """A scheduled step."""

    plan: StepPlan
    work: list[Work]
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)


@dataclass
class Round:
    """A step while it is being scheduled."""

    budget: int
    work: list[Work] = field(default_factory=list)
    grown: dict[str, list[list[int]]] = field(default_factory=dict)
    resumed: set[str] = field(default_factory=set)
    admitted: set[str] = field(default_factory=set)
    preempts: bool = False

    def take(self, work: Work) -> None:
        self.work.append(work)
        self.budget -= work.count


def output_of(step: Round) -> Any:
    """Return the part of vLLM's ``SchedulerOutput`` (since 0.11.1) that a connector reads."""
    new = [found for found in step.work if found.request_id in step.admitted]
    cached = [found for found in step.work if found.request_id not in step.admitted]
    return SimpleNamespace(
        num_scheduled_tokens={found.request_id: found.count for found in step.work},
        total_num_scheduled_tokens=sum(found.count for found in step.work),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=found.request_id, block_ids=tuple(found.block_ids), num_computed_tokens=found.start)
            for found in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[found.request_id for found in cached],
            new_block_ids=[_new_blocks(step, found) for found in cached],
            resumed_req_ids=step.resumed,
            num_computed_tokens=[found.start for found in cached],
        ),
    )


def _new_blocks(step: Round, work: Work) -> tuple[list[int], ...] | None:
    if work.request_id in step.resumed:
        return tuple(work.block_ids)
    grown = step.grown[work.request_id]
    return tuple(grown) if any(grown) else None
