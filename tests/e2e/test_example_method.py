"""The example sparse-method package, built, installed, and found by its entry point in a real engine."""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.e2e.engine import run_engine
from tests.e2e.processes import IN_PROCESS
from transforms.pipeline.package import build_wheel
from transforms.place import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.scenarios import Runs

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]


def test_it_runs_by_its_name(runs: Runs, tmp_path: Path) -> None:
    package, run_directory = tmp_path / "package", tmp_path / "run"
    with zipfile.ZipFile(build_wheel(ROOT / "examples" / "sparse_method", tmp_path)) as wheel:
        wheel.extractall(package)
    run_directory.mkdir()
    run = run_engine(
        runs.environments.overlay,
        run_directory,
        engine={"additional_config": {"ucm_sparse_config": {"FirstAndRecent": {"recent_blocks": 1}}}},
        switches={**IN_PROCESS, "PYTHONPATH": os.pathsep.join((str(run_directory / "plugin"), str(package)))},
    )
    assert run.code == 0, run.log[-4000:]
    assert "[UCM.Sparse] FirstAndRecent is active on the worker side" in run.log
    dense = runs["plain"].tokens
    assert {name: len(tokens) for name, tokens in run.tokens.items()} == {n: len(t) for n, t in dense.items()}
    assert run.tokens != dense, "two blocks of each request give the tokens of all"
