"""The settings of a test engine, whatever its worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineSetting:
    """The settings of an engine.

    Args:
        asynchronous: Whether a step is scheduled before the tokens of the previous one are known.
        caching: Whether prefix caching is on.
        blocks: Blocks of the KV cache, including the null block.
        budget: Tokens per step.
        chunk: Maximum tokens of one request in a step; 0 for no separate limit.
        running: Maximum number of running requests.
        policy: Which request is preempted when blocks run out: the latest, or the one of lowest priority.
    """

    asynchronous: bool = False
    caching: bool = True
    blocks: int = 60
    budget: int = 24
    chunk: int = 0
    running: int = 6
    policy: str = "fcfs"
