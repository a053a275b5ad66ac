"""What a step's tokens read under `ucm.sparse.esa.method`: resident blocks, and the offloaded ones they need.

What a token reads depends only on its request's content and its own position. All tokens of a prompt read everything,
and so does a generated one while the offloaded context before its tile fits into the budget. Beyond that, a generated
token reads the sinks, the window, and the offloaded blocks that it needs most. There is room for the blocks of one
token per request, so such tokens are computed one in each step, also after a preemption (the scheduler side ensures
this with `ucm.sparse.esa.method.ESA.limit_new_tokens`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ucm.errors import SparseMethodError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ucm.sparse.attention import StepBatch
    from ucm.sparse.blocks import SinksAndWindow
    from ucm.sparse.topk.codes import KeyCodes

#: Stands for the admission of a request without freed blocks.
NOT_ADMITTED = -1


def reading(
    batch: StepBatch, window: SinksAndWindow, budget: int, stored: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """Return the number of offloaded blocks that each row chooses from; 0 if it reads everything in place.

    Args:
        batch: The step.
        window: The sinks and the window.
        budget: The number of offloaded blocks that a token reads.
        stored: ``[num_reqs]``: the number of freed blocks of each request.
        block_size: Tokens in a block.

    Raises:
        SparseMethodError: Several tokens of a row would choose.
    """
    between = window.skipped(batch.seq_lens - 1, batch.num_prompt_tokens, block_size)
    choosing: NDArray[np.int64] = np.where((between > budget) | (stored > 0), between, 0)
    if ((choosing > 0) & (batch.num_new_tokens > 1)).any():
        raise SparseMethodError(
            "a step computes several tokens of an answer, but there is room for the selection of one only",
            where="the hook limit_new_tokens of the scheduler",
            fix="build the overlay anew, and install it in every environment of the engine",
        )
    return choosing


class ResidentLayer:
    """One layer's use of a request's resident blocks; each layer has different content in the same block."""

    def __init__(self) -> None:
        #: The resident block of each place whose content is in one, the oldest first.
        self._slots: dict[int, int] = {}

    def missing(self, chosen: Sequence[int]) -> list[int]:
        """Return the places that are in no resident block."""
        return [place for place in chosen if place not in self._slots]

    def assign(self, places: Sequence[int], chosen: Sequence[int], resident: int) -> list[int]:
        """Assign to missing places resident blocks whose content is not chosen.

        Args:
            places: The missing places.
            chosen: All places that the step reads.
            resident: The number of resident blocks, at least that of chosen places.

        Returns:
            The resident block of each place, counted from 0.
        """
        unused = sorted(set(range(resident)).difference(self._slots.values()))
        kept = set(chosen)
        old = iter([place for place in self._slots if place not in kept])
        given = [*unused, *(self._slots.pop(next(old)) for _ in places[len(unused) :])][: len(places)]
        self._slots.update(zip(places, given, strict=True))
        return given

    def clear(self, places: Sequence[int]) -> None:
        """Note that resident blocks do not hold what was assigned to them."""
        for place in places:
            del self._slots[place]

    def slots(self, chosen: Sequence[int]) -> list[int]:
        """Return the resident blocks of present places."""
        return [self._slots[place] for place in chosen]


@dataclass(slots=True)
class OffloadedContext:
    """A worker's state of a request's offloaded context.

    Attributes:
        admission: The request's admission; `NOT_ADMITTED` before any of it is freed.
        first: The place of its first block.
        stored: The number of its freed blocks; later ones are still in place.
        resident: The resident blocks.
        lost: The indices of its lost blocks.
        codes: The codes of its blocks, freed or in place, by layer; see `ucm.sparse.topk.codes`.
        layers: The content of the resident blocks, by layer.
    """

    admission: int
    first: int
    stored: int = 0
    resident: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    codes: dict[str, KeyCodes] = field(default_factory=dict)
    layers: dict[str, ResidentLayer] = field(default_factory=lambda: defaultdict(ResidentLayer))
