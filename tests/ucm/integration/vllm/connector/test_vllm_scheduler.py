"""vLLM's own scheduler with our whole connector, on a model in miniature whose every wrong byte shows."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.ucm.integration.vllm.connector.simulation.setting import Setting
from tests.ucm.integration.vllm.connector.simulation.vllm_runs import check_happened, serve
from tests.ucm.integration.vllm.connector.test_simulation import prompts

pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests beside it")

from tests.ucm.integration.vllm.connector.simulation.vllm_engine import VllmEngine

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = {
    "direct": Setting(),
    "direct, loads fail": Setting(ranks=2, failing_loads=0.3, failing_dumps=0.05, aborts=0.2),
    "direct, all loads fail": Setting(failing_loads=1.0),
    "direct, asynchronous": Setting(asynchronous=True, ranks=2, failing_loads=0.2, aborts=0.2),
    "direct, no prefix cache": Setting(caching=False, failing_loads=0.1),
    "layer by layer": Setting(layerwise=True, ranks=2),
    "layer by layer, loads fail": Setting(layerwise=True, failing_loads=0.3, aborts=0.3, budget=8, chunk=5),
    "layer by layer, asynchronous": Setting(layerwise=True, asynchronous=True, aborts=0.2),
    "a window beside full attention": Setting(groups=((4, None, 3), (4, 6, 3)), ranks=2, blocks=48, aborts=0.1),
    "a window, asynchronous": Setting(
        groups=((4, None, 2), (4, 9, 2), (4, 1, 2)), asynchronous=True, blocks=72, layerwise=True
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_engines(name: str, tmp_path: Path) -> None:
    setting = ENGINES[name]
    chance = random.Random(1)  # noqa: S311 - no secret
    happened = serve(VllmEngine, setting, tmp_path, chance, setting.truth(), prompts(chance), range(1, 13))
    print(name, dict(happened))
    check_happened(happened, setting)
