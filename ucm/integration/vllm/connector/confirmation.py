"""What a step has dumped becomes visible once it is known that no rank's weights had changed by then.

Each rank looks at its own weights alone, and a change need not show there: later layers of a pipeline may keep theirs,
and a sample may miss it. But the KV of all ranks is that of the changed model. So where there are several ranks, each
tells the scheduler of its looks, and the scheduler tells all of them up to which step nobody has seen a change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from ucm.integration.vllm.connector.metadata import StepPlan

T = TypeVar("T")


@dataclass(slots=True)
class _Waiting(Generic[T]):
    item: T
    step: int
    epoch: int


class Unconfirmed(Generic[T]):
    """Keeps back what is dumped and not confirmed.

    Args:
        commit: Makes it visible.
        discard: Forgets it.
    """

    def __init__(self, commit: Callable[[T], None], discard: Callable[[T], None]) -> None:
        self._commit = commit
        self._discard = discard
        self._waiting: list[_Waiting[T]] = []
        self._confirmed: int | None = None
        self._epoch = 0

    def begin(self, plan: StepPlan) -> None:
        """A step begins; its plan says what is confirmed. What an earlier epoch left unconfirmed never will be."""
        self._confirmed, self._epoch = plan.confirmed, plan.epoch
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if one.epoch < plan.epoch:
                self._discard(one.item)
            else:
                self._commit_or_keep(one)

    def add(self, item: T, step: int) -> None:
        """Something was dumped whose KV was computed until a step."""
        self._commit_or_keep(_Waiting(item, step, self._epoch))

    def close(self) -> None:
        """No further step will confirm anything."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._discard(one.item)

    def _commit_or_keep(self, one: _Waiting[T]) -> None:
        if self._confirmed is None or one.step <= self._confirmed:
            self._commit(one.item)
        else:
            self._waiting.append(one)
