"""Move blocks layer by layer, so that loading and saving overlap with the forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucm.integration.vllm.connector.worker import TransferWorker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.integration.vllm.connector.metadata import BlockMoves, StepPlan
    from ucm.store.base import Task

#: Layers are loaded in this many portions.
PORTIONS = 4


class LayerWiseWorker(TransferWorker):
    """Loads and saves blocks in portions of layers.

    All portions are requested at once, first layers first, and copied in that order, so that the next portion is in
    flight while the layers of the current one compute.
    """

    #: Whether Python is certain to run between the layers of a step that loads. If not, the forward waits for all.
    overlaps = True
    _plan: StepPlan | None = None

    def begin(self, plan: StepPlan) -> None:
        """Begin a step, before anything of it is written."""
        super().begin(plan)
        if self._plan is not plan:
            self._plan = plan
            self._portions_loading: dict[tuple[int, int], list[tuple[BlockMoves, Task]]] = {}
            self._saved: dict[int, set[int]] = {}

    def load(self, plan: StepPlan) -> None:
        """Start the loads of a plan."""
        for portion in range(PORTIONS):
            for moves in plan.loads:
                layers = self._portion(moves.group, portion)
                if layers:
                    task = self.start_load(moves, layers)
                    self._portions_loading.setdefault((moves.group, portion), []).append((moves, task))
        if not self.overlaps:
            self._finish_all()

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks that failed to load; vLLM may call this before ``save``."""
        self._finish_all()
        return super().take_failed_blocks()

    def wait_for_layer(self, layer_name: str) -> None:
        """Wait for the portion that contains the layer."""
        if self._plan is None or not self._portions_loading:
            return
        for group, index in self._where(layer_name):
            portion = next(p for p in range(PORTIONS) if index in self._portion(group, p))
            self._finish((group, portion))

    def layer_computed(self, layer_name: str) -> None:
        """Start to save a computed layer of the blocks that the step fills."""
        if self._plan is None or not self._plan.saves:
            return
        for group, index in self._where(layer_name):
            wanted = [moves for moves in self.own(self._plan.saves) if moves.group == group]
            if wanted and index not in self._saved.setdefault(group, set()):
                self._saved[group].add(index)
                whole = len(self._saved[group]) == len(self.all_layers(group))
                for moves in wanted:
                    self.start_save(moves, range(index, index + 1), whole=whole)

    def save(self, plan: StepPlan) -> None:
        """Save the layers that were not reported one by one, after the forward, and commit."""
        self._throttle(active=False)
        self._finish_all()
        for moves in self.own(plan.saves):
            done = self._saved.get(moves.group, set())
            missing = [index for index in self.all_layers(moves.group) if index not in done]
            for index in missing:
                self.start_save(moves, range(index, index + 1), whole=index == missing[-1])
            self.commit(moves)

    def _finish_all(self) -> None:
        for place in list(self._portions_loading):
            self._finish(place)

    def _finish(self, place: tuple[int, int]) -> None:
        group, portion = place
        whole = portion == max(p for p in range(PORTIONS) if self._portion(group, p))
        for moves, task in self._portions_loading.pop(place, ()):
            self.finish_load(moves, task, whole=whole)

    def _portion(self, group: int, portion: int) -> range:
        count = len(self.groups[group].layer_names)
        return range(count * portion // PORTIONS, count * (portion + 1) // PORTIONS)

    def _where(self, layer_name: str) -> Iterator[tuple[int, int]]:
        """Yield a layer's group and its index there; nothing for a layer that shares another one's KV cache."""
        for group, transfer in self.groups.items():
            if layer_name in transfer.layer_names:
                yield group, transfer.layer_names.index(layer_name)
