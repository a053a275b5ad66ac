"""Commit the saves of a step once it is confirmed that no rank's weights had changed by then.

Each rank checks only its own weights, and a change need not show there: the later layers of a pipeline may be
unchanged, and a sample may miss the change. But the KV of all ranks belongs to the changed model. So with several
ranks, each reports its checks to the scheduler, and the scheduler tells all ranks up to which step none found a change.
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
    """Holds back saved items until their step is confirmed.

    Args:
        commit: Makes an item visible.
        discard: Drops an item.
    """

    def __init__(self, commit: Callable[[T], None], discard: Callable[[T], None]) -> None:
        self._commit = commit
        self._discard = discard
        self._waiting: list[_Waiting[T]] = []
        self._confirmed: int | None = None
        self._epoch = 0

    def begin(self, plan: StepPlan) -> None:
        """Begin a step: commit what its plan confirms, and discard unconfirmed items of earlier epochs."""
        self._confirmed, self._epoch = plan.confirmed, plan.epoch
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if one.epoch < plan.epoch:
                self._discard(one.item)
            else:
                self._commit_or_keep(one)

    def add(self, item: T, step: int) -> None:
        """Add a saved item whose KV was computed in steps up to ``step``."""
        self._commit_or_keep(_Waiting(item, step, self._epoch))

    def close(self) -> None:
        """Discard all unconfirmed items."""
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._discard(one.item)

    def _commit_or_keep(self, one: _Waiting[T]) -> None:
        if self._confirmed is None or one.step <= self._confirmed:
            self._commit(one.item)
        else:
            self._waiting.append(one)
