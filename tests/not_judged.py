"""A plugin of pytest: tests that need what the system lacks are skipped, or fail in CI, and one line says what it was.

`--not-judged FILE` also writes that line to a file, where `nox -s tests` reads it. With `--until TIME` the tests that
would begin later are skipped as well, and counted in that line.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.system import NotJudgedError, in_ci

if TYPE_CHECKING:
    from collections.abc import Generator

#: The name of the property by which a test's report tells what it did not judge, also from xdist's workers.
NOT_JUDGED = "not judged"
#: What is said of tests that would have begun after the time of `--until`.
TIME_WAS_UP = "what the time did not suffice for"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--not-judged", metavar="FILE", help="write what could not be judged on this system to a file")
    parser.addoption("--until", metavar="TIME", type=float, help="skip tests that would begin later (Unix time)")


def _skip(item: pytest.Item, lacking: NotJudgedError) -> None:
    """Skip the test, or fail it in CI, where the skipped tests of a whole server would go unnoticed."""
    if in_ci():
        pytest.fail(f"{lacking} (CI=true: nothing is skipped)", pytrace=False)
    item.user_properties.append((NOT_JUDGED, lacking.name))
    pytest.skip(str(lacking))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip a test for which there is no time, or of which a fixture needs what is not installed."""
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        item.user_properties.append((NOT_JUDGED, TIME_WAS_UP))
        pytest.skip("the time of this session was up")
    try:
        return (yield)
    except NotJudgedError as lacking:
        return _skip(item, lacking)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip a test that itself needs what is not installed."""
    try:
        return (yield)
    except NotJudgedError as lacking:
        return _skip(item, lacking)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say in one line what was not judged."""
    reports = [report for kind in ("passed", "failed", "skipped") for report in terminalreporter.stats.get(kind, [])]
    of_tests = [report for report in reports if isinstance(report, pytest.TestReport)]  # modules are skipped as well
    counts = Counter(name for report in of_tests for key, name in report.user_properties if key == NOT_JUDGED)
    line = ", ".join(f"{name} ({count} tests)" for name, count in sorted(counts.items()))
    if line:
        terminalreporter.write_line(f"not judged here: {line}", yellow=True)
    if file := config.getoption("--not-judged"):
        Path(file).write_text(line, encoding="utf-8")
