"""Shared results are computed once, and a failure is raised in all processes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.e2e.shared import Shared

if TYPE_CHECKING:
    from pathlib import Path


def test_whoever_comes_second_waits_for_the_first(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> list[int]:
        made.append(len(made))
        time.sleep(0.05)
        return [1, 2]

    processes = [Shared(tmp_path / "shared") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda shared: shared.get("an engine", make), processes))
    assert found == [[1, 2]] * 4
    assert made == [0]
    assert processes[0].get("an engine", make) == [1, 2]
    assert processes[0].get("another", make) == [1, 2]
    assert made == [0, 1]


def test_a_failure_is_everybodys(tmp_path: Path) -> None:
    def fail() -> None:
        made.append(True)
        raise ValueError("the engine ended")

    made: list[bool] = []
    for shared in (Shared(tmp_path / "shared"), Shared(tmp_path / "shared")):
        for _ in range(2):
            with pytest.raises(ValueError, match="the engine ended"):
                shared.get("engine", fail)
    assert len(made) == 1
