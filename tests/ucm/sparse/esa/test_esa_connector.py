"""UCM's connector with ESA's scheduler side, on vLLM's own scheduler: stored and loaded blocks and output are correct.

A worker writes to resident blocks while its layers run; here all of them are overwritten with garbage before and after
that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; tests/e2e/test_inside.py runs these beside it")

from tests.ucm.integration.vllm.connector.simulation.vllm_engine import VllmEngine, Work
from tests.ucm.sparse.beside_connector import ENGINES, check_engines

if TYPE_CHECKING:
    import random
    from pathlib import Path

    from tests.clock import SimulatedClock
    from tests.ucm.integration.vllm.connector.simulation.memory import KVMemory
    from tests.ucm.integration.vllm.connector.simulation.setting import Setting
    from tests.ucm.integration.vllm.connector.simulation.truth import Truth
    from ucm.sparse.esa.offloaded import OffloadedNews

OPTIONS = {"sink_tokens": 3, "window_tokens": 10, "token_budget": 12}
GARBAGE = 0xBAD


class RetrievingEngine(VllmEngine):
    """The connector's engine with the method."""

    def __init__(
        self, setting: Setting, directory: Path, chance: random.Random, truth: Truth, clock: SimulatedClock
    ) -> None:
        self.resident: dict[int, list[int]] = {}
        super().__init__(setting, directory, chance, truth, clock)

    def _configuration(self, model: Path) -> Any:
        config = super()._configuration(model)
        extra = config.kv_transfer_config.kv_connector_extra_config
        extra["ucm_sparse_config"] = {"tests.e2e.inside.eager_esa:EagerESA": OPTIONS}
        return config

    def _execute(self, output: Any, work: list[Work]) -> None:
        news: OffloadedNews | None = output.ucm_sparse_meta
        if news is not None:
            for admission in news.dropped:
                self.resident.pop(admission, None)
            for released in news.released:
                self.resident.setdefault(released.admission, []).extend(released.resident)
                self.happened["released"] += len(released.block_ids)
        super()._execute(output, work)

    def _begin(self, worker: Any, memory: KVMemory, *rest: Any) -> tuple[Any, Any]:
        found = super()._begin(worker, memory, *rest)
        if worker is self.workers[-1]:
            self._scribble()
        return found

    def _end(self, manager: Any, output: Any) -> Any:
        self._scribble()
        return super()._end(manager, output)

    def _scribble(self) -> None:
        for memory in self.memories:
            for cells in memory._cells:
                for blocks in self.resident.values():
                    cells[blocks] = GARBAGE


@pytest.mark.parametrize("name", ENGINES)
def test_engines(name: str, tmp_path: Path) -> None:
    check_engines(RetrievingEngine, name, 84, tmp_path)
