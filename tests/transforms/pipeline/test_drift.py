"""Drift: every rule is tried; the report shows what moved, what fails and the nearest candidates."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from tests.releases import REVIEWED
from tests.transforms.pipeline.memory import (
    OUTPUT,
    OUTPUT_SOURCE,
    SMALL,
    WORKER,
    WORKER_SOURCE,
    DictTree,
    dict_tree,
    small_overlay,
)
from transforms.engine.report import Status
from transforms.pipeline.changes import Change
from transforms.pipeline.cli import main
from transforms.pipeline.drift.machine import as_data
from transforms.pipeline.drift.model import Drift, measure, measure_tree
from transforms.pipeline.drift.page import write_drift
from transforms.pipeline.drift.terminal import print_matrix, print_release
from transforms.pipeline.lock import accept

if TYPE_CHECKING:
    from pathlib import Path

BROKEN = WORKER_SOURCE.replace("        self.worker.init_device()\n", "        self.worker.set_up_device()\n")


@pytest.fixture
def overlays(tmp_path: Path) -> Path:
    """The overlay of 0.31.0 is reviewed."""
    target = tmp_path / "overlays"
    accept(small_overlay(DictTree("0.31.0"), target))
    return target


def drift_of(overlays: Path, worker: str = WORKER_SOURCE, output: str = OUTPUT_SOURCE) -> Drift:
    return measure_tree(
        DictTree("0.32.0", {WORKER: worker, OUTPUT: output}), replace(SMALL, overlays=overlays), dict_tree
    )


def printed(drift: Drift) -> str:
    text = io.StringIO()
    print_release(drift, Console(file=text, width=100))
    return text.getvalue()


def test_what_stayed_is_unchanged(overlays: Path) -> None:
    drift = drift_of(overlays)
    assert drift.applies
    assert (drift.since, drift.reviewed) == ("0.31.0", False)
    assert {rule.change and rule.change.change for rule in drift.rules} == {Change.SAME}
    assert [change.upstream_changed for change in drift.modules.values()] == [False, False]


def test_what_moved_says_by_how_much(overlays: Path) -> None:
    drift = drift_of(overlays, worker=WORKER_SOURCE.replace("import os\n", "import os\n\nLIMIT = 1\n"))
    rule = next(rule for rule in drift.rules if rule.outcome.rule == "worker.init")
    assert rule.change is not None
    assert (rule.change.change, rule.change.notes) == (Change.SHIFTED, ("+2 lines",))
    assert rule.lines[0] - rule.change.lines_before[0] == 2
    assert drift.modules["worker"].upstream_changed
    assert "+2 lines" in printed(drift)


def test_a_failure_stops_nothing_and_names_the_nearest_place(overlays: Path) -> None:
    drift = drift_of(overlays, worker=BROKEN)
    assert not drift.applies
    assert [rule.outcome.rule for rule in drift.failures] == ["worker.init"]
    assert drift.counts[Status.APPLIED] == 2
    (candidate, *_) = drift.failures[0].outcome.candidates
    assert candidate.code == "self.worker.set_up_device()"
    assert BROKEN.splitlines()[candidate.line - 1].strip() == candidate.code
    assert f"line {candidate.line}: self.worker.set_up_device()" in printed(drift)


def test_an_absent_module_is_missing(overlays: Path) -> None:
    drift = measure_tree(DictTree("0.32.0", {OUTPUT: OUTPUT_SOURCE}), replace(SMALL, overlays=overlays))
    assert {rule.outcome.rule for rule in drift.failures} == {"worker.import", "worker.init"}


def test_the_checks_are_run_too(overlays: Path) -> None:
    drift = drift_of(overlays, worker=WORKER_SOURCE + "\nHERE = __file__\n")
    assert not drift.failures
    assert not drift.applies
    assert "__file__" in drift.problem
    assert "__file__" in printed(drift)


def test_sources_that_do_not_parse_are_told() -> None:
    drift = measure("0.32.0", "/nowhere")
    assert not drift.applies
    assert "no such file" in drift.problem


def test_machine_readable(overlays: Path) -> None:
    data = json.loads(json.dumps(as_data([drift_of(overlays, worker=BROKEN)])))
    assert (data["schema"], data["ok"]) == (1, False)
    rules = {rule["id"]: rule for rule in data["releases"][0]["rules"]}
    assert rules["worker.init"]["status"] == "missing"
    assert rules["worker.init"]["candidates"][0]["line"] == 13
    assert rules["worker.import"]["change"]["kind"] == "unchanged"
    assert rules["worker.import"]["lines"] == [5]


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_matrix_fits_its_terminal(overlays: Path, width: int) -> None:
    text = io.StringIO()
    good, bad = drift_of(overlays), drift_of(overlays, worker=BROKEN)
    drifts = [*([good] * 29), bad]
    print_matrix(drifts, Console(file=text, width=width))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    rows = [line for line in lines if line.startswith("worker.init ")]
    assert "".join(rows).count("●") + "".join(rows).count("✗") >= 30
    assert "29 of 30" in lines[-1]


def test_page(overlays: Path, tmp_path: Path) -> None:
    page = write_drift([drift_of(overlays), drift_of(overlays, worker=BROKEN)], tmp_path)
    text = page.read_text(encoding="utf-8")
    assert page == tmp_path / "drift" / "index.html"
    assert "worker.init in 0.32.0: missing" in text
    assert "self.worker.set_up_device" in text
    assert "http" not in text


def test_a_drift_travels_between_processes(overlays: Path) -> None:
    drift = drift_of(overlays, worker=BROKEN)
    assert pickle.loads(pickle.dumps(drift)) == drift  # noqa: S301 - our own bytes


def test_a_real_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drift", "0.9.0", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (release,) = data["releases"]
    statuses = {rule["status"] for rule in release["rules"]}
    assert statuses == {"applied", "not applicable"}
    assert all(rule["lines"] for rule in release["rules"] if rule["status"] == "applied")
    assert (release["since"], release["reviewed"]) == ("", REVIEWED[0] == "0.9.0")


def test_several_releases_of_one_source_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drift", "all", "--from", "installed"]) == 1
    assert "--from takes the sources of one release" in capsys.readouterr().err
