"""A pytest plugin that appends each test's outcome to the file that ``UCM_E2E_OUTCOMES`` names, as it becomes known."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

#: Seconds after which a test is interrupted: some wait for a device that is not there.
LIMIT = 120
_WORST = {"passed": 0, "skipped": 1, "failed": 2}
_outcomes: dict[str, str] = {}


def pytest_runtest_logstart() -> None:
    """Give the test its time."""
    signal.signal(signal.SIGALRM, _interrupt)
    signal.alarm(LIMIT)


def pytest_runtest_logfinish() -> None:
    """It has ended."""
    signal.alarm(0)


def pytest_runtest_logreport(report: Any) -> None:
    """Keep the worst outcome of a test's set-up, call and tear-down; the last phase tells it."""
    known = _outcomes.get(report.nodeid, "passed")
    _outcomes[report.nodeid] = max(known, report.outcome, key=_WORST.__getitem__)
    if report.when == "teardown":
        _tell(report.nodeid, _outcomes[report.nodeid])


def pytest_collectreport(report: Any) -> None:
    """A module that cannot be collected, or skips itself, is told as one."""
    if report.outcome != "passed":
        _tell(report.nodeid, f"{report.outcome} at collection")


def _interrupt(*_: object) -> None:
    raise TimeoutError(f"longer than {LIMIT} s")


def _tell(nodeid: str, outcome: str) -> None:
    with Path(os.environ["UCM_E2E_OUTCOMES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps([nodeid, outcome]) + "\n")
