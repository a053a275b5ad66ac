"""What an engine is like, whatever its worker is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineSetting:
    """An engine.

    Args:
        asynchronous: Whether a step is scheduled before the tokens of the one before are known.
        caching: Whether the engine finds prefixes in its own KV cache.
        blocks: Blocks of the KV cache, the null block among them.
        budget: Tokens per step.
        chunk: Most tokens of one request in a step; 0 for no limit of its own.
        running: Requests that run at once.
        policy: Which request has to go when blocks run out: the latest, or the least important.
    """

    asynchronous: bool = False
    caching: bool = True
    blocks: int = 60
    budget: int = 24
    chunk: int = 0
    running: int = 6
    policy: str = "fcfs"
