"""Steps as a worker's method sees them; they need no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ucm.sparse.attention import StepBatch

if TYPE_CHECKING:
    from collections.abc import Sequence


def step(*rows: tuple[str, int, int, int], admitted: Sequence[str] = (), **asked: object) -> StepBatch:
    """Return a step from rows of id, computed tokens, tokens of the step and prompt tokens, and from options."""
    ids, computed, new, prompt = zip(*rows, strict=True)
    return StepBatch(
        list(ids),
        np.array(new, np.int64),
        np.array(computed, np.int64),
        np.array(prompt, np.int64),
        np.array([i in admitted for i in ids], np.bool_),
        asked,
    )
