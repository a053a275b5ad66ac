"""How answers beyond the trained length are counted; no engine runs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.needle import beyond, task
from tests.e2e.needle.model import MAX_LENGTH, SHORT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.e2e.needle.model import Recipe

RIGHT, WRONG = [[0.5, True]] * task.VALUE, [[0.5, True], [2.5, False], [0.5, True], [0.5, True]]


def test_each_way_is_asked_the_same_and_counted_by_length(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def run(
        environment: Environment, directory: Path, script: str, specification: Mapping[str, Any], **switches: str
    ) -> Any:
        asked.update(specification)
        return {name: [RIGHT, RIGHT, RIGHT, WRONG] for name in specification["engines"]}

    def write(python: Path, recipe: Recipe = SHORT) -> Path:
        assert recipe is SHORT
        return tmp_path

    monkeypatch.setattr(beyond, "run_script", run)
    monkeypatch.setattr(beyond, "write_model", write)
    environment: Any = SimpleNamespace(python=tmp_path)
    found = beyond.scores(environment, tmp_path, count=2, lengths=(504, 2048))
    assert [len(text) for text in asked["texts"]] == [508, 508, 2052, 2052]
    assert asked["engines"]["NTK"]["hf_overrides"]["rope_theta"] == pytest.approx(1e4 * 8 ** (64 / 62), rel=0.02)
    assert asked["engines"]["RoPE"] == {"hf_overrides": {"max_position_embeddings": MAX_LENGTH}}
    assert found["NTK"] == {504: beyond.Score(0.5, 1.0), 2048: beyond.Score(0.75, 0.5)}
    assert found["a guess"][2048].loss == pytest.approx(math.log(5 * 16))
    # Of two questions of 2,048 tokens, one in the first half and one in the second, the last 512 hold none.
    assert found["the last 512 tokens, at best"][504].right == 1
    assert found["the last 512 tokens, at best"][2048].right == 0
    lines = beyond.table(found).splitlines()
    assert lines[0] == "| tokens | 504 | 2,048 |"
    assert "| NTK | 0.50 (100%) | 0.75 (50%) |" in lines
    beyond.plot(found, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text(encoding="utf-8")
