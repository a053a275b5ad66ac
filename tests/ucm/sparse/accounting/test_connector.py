"""UCM's connector with `SinkWindow`, on vLLM's own scheduler: stored blocks, loaded blocks and output are correct."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; tests/e2e/test_inside.py runs these beside it")

from tests.clock import SimulatedClock
from tests.ucm.integration.vllm.connector.simulation.setting import Setting
from tests.ucm.integration.vllm.connector.simulation.vllm_engine import VllmEngine, Work
from tests.ucm.sparse.beside_connector import ENGINES, check_engines, prompts, truth_of
from ucm.sparse.blocks import SinksAndWindow

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = {"sink_tokens": 3, "window_tokens": 10}


class WindowedEngine(VllmEngine):
    """The connector's engine with the method; it counts the released blocks of the scheduled requests."""

    def _configuration(self, model: Path) -> Any:
        config = super()._configuration(model)
        extra = config.kv_transfer_config.kv_connector_extra_config
        extra["ucm_sparse_config"] = {"tests.ucm.sparse.accounting.device:SmallTiles": OPTIONS}
        return config

    def _work(self, output: Any) -> list[Work]:
        found = super()._work(output)
        self.happened["released"] += sum(work.block_ids[0].count(0) for work in found)
        return found


@pytest.mark.parametrize("name", ENGINES)
def test_engines(name: str, tmp_path: Path) -> None:
    check_engines(WindowedEngine, name, 72, tmp_path)


def test_releasing_too_much_shows(tmp_path: Path) -> None:
    chance = random.Random(0)  # noqa: S311
    setting = Setting(caching=False)
    engine = WindowedEngine(setting, tmp_path, chance, truth_of(setting), SimulatedClock(0))
    engine.scheduler._ucm_sparse_method._blocks._window = SinksAndWindow(3, 2, tile=1)
    for prompt in prompts(chance):
        engine.submit(prompt, 20)
    with pytest.raises(AssertionError, match="a wrong token was served"):
        engine.drain()
    engine._patched.close()
