"""The seam: the logic of the three patches; `rules.py` inserts the calls."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")

#: Milliseconds after which a reader of shared memory checks again, even without a notification.
RECHECK_MS = 5000


def recheck(read_timeout: Any) -> None:
    """Make a reader of a message queue check again after `RECHECK_MS`: a notification may have been lost.

    Args:
        read_timeout: vLLM's ``MessageQueue.ReadTimeoutWithWarnings``, of one read.
    """
    wanted = read_timeout.timeout_ms

    def timeout_ms() -> int:
        left = wanted()
        return RECHECK_MS if left is None else min(int(left), RECHECK_MS)

    read_timeout.timeout_ms = timeout_ms


def external_blocks(local: int, computed: int, wanted: int) -> int:
    """Return the extra blocks that a mamba group needs for a hit loaded in the step that uses it: one or none.

    Args:
        local: Tokens found in the engine's own cache.
        computed: Tokens with KV before the step, in the engine's cache or elsewhere.
        wanted: Tokens with KV at the end of the step.
    """
    return int(local < computed < wanted)


def engine_core_started(engine_core: Any) -> None:
    """Let a scheduler that measures its chunks do so, now that the workers are up.

    Args:
        engine_core: vLLM's ``EngineCore``.
    """
    measure = getattr(engine_core.scheduler, "run_profiling_chunk_init", None)
    if measure is not None:
        logger.info("%s measures its chunks", type(engine_core.scheduler).__name__)
        measure(engine_core.model_executor)
