"""ESA that offloads from the first block on and keeps nothing of it: every block that is read comes back.

With a budget for the whole context, ESA itself would offload nothing.
"""

from __future__ import annotations

from typing import Any

from ucm.sparse.esa.method import ESA


class EagerESA(ESA):
    """Waits until the store has what a step has released, and takes everything from there."""

    tile = 1

    def scheduler_started(self, scheduler: Any) -> None:
        """As ESA; nothing is read in place."""
        super().scheduler_started(scheduler)
        self._blocks._in_place = 0

    def update_states(self, runner: Any, scheduler_output: Any) -> None:
        """As ESA; then nothing is left in host memory that the store has taken."""
        super().update_states(runner, scheduler_output)
        if self._store is not None:
            for saving in self._store._saving:
                saving.task.wait()
            self._store.settle()
