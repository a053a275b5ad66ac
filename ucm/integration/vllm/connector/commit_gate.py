"""When dumped blocks may become visible.

A step that ran while a block of it had failed to load computed wrong KV behind that block, for the request itself and
for every other that shares the block. What it dumped must never be found. With one rank the worker knows of every
failure itself. With several, a rank cannot know what failed on another, so it waits until the scheduler has seen all
ranks' outcomes of the step.

With ``batches`` batches in flight, up to ``batches - 1`` further steps are scheduled before the scheduler learns of a
failure; they may be wrong as well.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucm.store.base import BlockKey


@dataclass(frozen=True, slots=True)
class Pending:
    """Blocks of one group that a step dumped."""

    step: int
    group: int
    keys: list[BlockKey]


class CommitGate:
    """Holds back what was dumped until the step is known to be right.

    Args:
        ranks: Workers of the engine.
        batches: Batches that may be in flight at once.
    """

    def __init__(self, ranks: int, batches: int) -> None:
        self._alone = ranks == 1
        self._batches = batches
        self._pending: deque[Pending] = deque()
        self._wrong: set[int] = set()

    def failed(self, step: int) -> None:
        """A block failed to load on this rank in this step."""
        self._wrong = {known for known in self._wrong if known > step - self._batches}
        self._wrong.update(range(step, step + self._batches))

    def is_wrong(self, step: int) -> bool:
        """Whether a step's results may be wrong, as far as this rank knows; asked of steps that are not settled."""
        return step in self._wrong

    def add(self, pending: Pending) -> None:
        """Blocks whose dump was started."""
        self._pending.append(pending)

    def open(self, settled: int, void: int) -> tuple[list[Pending], list[Pending]]:
        """What may be committed now, and what must be dropped.

        Args:
            settled: All outcomes up to this step are known to the scheduler.
            void: The last step that had been planned when the scheduler learned of a failure. It and those that could
                be in flight with it may be wrong; what was planned before them had been seen to be right.
        """
        commit: list[Pending] = []
        drop: list[Pending] = []
        kept: deque[Pending] = deque()
        for pending in self._pending:
            if void - self._batches < pending.step <= void or self.is_wrong(pending.step):
                drop.append(pending)
            elif self._alone or pending.step <= settled:
                commit.append(pending)
            else:
                kept.append(pending)
        self._pending = kept
        return commit, drop
