"""Miniature engines whose KV cache is on a device, with torch's CPU as the device."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.ucm.integration.vllm.connector.simulation.setting import Setting, any_setting
from tests.ucm.integration.vllm.connector.test_simulation import SLICED, across_sizes, run

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch", reason="torch is not installed; the end-to-end session runs these tests beside vLLM")


@pytest.mark.parametrize("seed", range(100, 112))
def test_any_engine(seed: int, tmp_path: Path) -> None:
    setting = replace(any_setting(random.Random(seed)), staged=True)  # noqa: S311 - no secret
    print(setting)
    assert run(setting, tmp_path, seed)["finished"] > 0


@pytest.mark.parametrize(
    "setting",
    [
        Setting(staged=True, blocks=20, failing_loads=0.1, failing_saves=0.1),
        Setting(staged=True, blocks=20, stored_tokens=8, failing_loads=0.1, failing_saves=0.1),
        Setting(staged=True, blocks=20, stored_tokens=12, loads="direct", failing_loads=0.1),
        Setting(staged=True, blocks=20, loads="within", layerwise=True, failing_loads=0.1),
        Setting(staged=True, blocks=20, loads="direct", failing_loads=0.1),
    ],
    ids=["staged", "chunks", "chunks, direct", "layer by layer", "direct"],
)
def test_blocks_are_loaded(setting: Setting, tmp_path: Path) -> None:
    happened = run(setting, tmp_path, seed=1)
    print(dict(happened))
    assert all(happened[what] for what in ("loads", "stored", "injected", "preempted"))


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", SLICED)
def test_slices_of_heads_are_shared_between_sizes(name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    """The heads of a token are together, so that a slice is in as many pieces as there are tokens."""
    across_sizes(replace(SLICED[name], staged=True), tmp_path, sizes)
