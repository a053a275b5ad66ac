"""Run our tests with the interpreter of an environment with vLLM."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _pytest.mark import ParameterSet

ROOT = Path(__file__).parents[2]
CONNECTOR = "tests/ucm/integration/vllm/connector"
LAYERS = "tests/ucm/integration/vllm/sparse"
SPARSE = "tests/ucm/sparse"
#: Ignores warnings of torch and vLLM; conftest.py and the usual options need packages that are not installed there.
OPTIONS = ("--noconftest", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-q")
#: Files that take more than five seconds, on a core of their own; `nox -s tests` runs the others, all in half a minute.
SLOW = {
    "tests/campaign/test_groups.py",
    "tests/ucm/hashing/test_with_vllm.py",
    "tests/ucm/integration/vllm/blend/test_vllm_scheduler.py",
    f"{CONNECTOR}/test_staged_simulation.py",
    f"{CONNECTOR}/test_vllm_scheduler.py",
    f"{LAYERS}/test_block_topk_schedules.py",
    f"{LAYERS}/test_rerope_on_a_layer.py",
    f"{LAYERS}/test_rerope_schedules.py",
    f"{SPARSE}/accounting/test_accounting.py",
    f"{SPARSE}/accounting/test_connector.py",
    f"{SPARSE}/esa/test_esa_connector.py",
    f"{SPARSE}/esa/test_esa_steps.py",
    f"{SPARSE}/esa/test_offload_store.py",
    f"{SPARSE}/test_window_kernel.py",
}
WRONG = {"failure", "error", "skipped"}
USUAL = ("-o", "addopts=--import-mode=importlib", "-o", "junit_family=xunit1")


def each(files: Sequence[str]) -> list[ParameterSet]:
    """Return files as parameters of a test; those that are not slow belong to the core."""
    return [pytest.param(file, marks=() if file in SLOW else pytest.mark.core) for file in files]


def run_inside(python: Path, files: Sequence[str], only: str = "", **variables: str) -> dict[str, str]:
    """Run the tests of some files in one interpreter.

    Args:
        python: The interpreter.
        files: The files, relative to the project's root.
        only: Which of their tests, as pytest's ``-k`` has it; default: all.
        **variables: Variables of its environment.

    Returns:
        The problem of each file that did not fully pass: a failure, a skipped test, or no tests.
    """
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        done = subprocess.run(
            [python, "-P", "-m", "pytest", *OPTIONS, *USUAL, f"--junitxml={report}", "-k", only, *files],
            cwd=ROOT,
            # Tensors are small, and waiting threads spin; and a simulation must not go by the order of vLLM's sets.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            return dict.fromkeys(files, done.stdout + done.stderr)
        cases = ET.parse(report).iter("testcase")  # noqa: S314 - pytest's
    found: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        file = (
            case.get("file") or f"{case.get('name', '').replace('.', '/')}.py"
        )  # for a file that could not be imported
        wrong = [f"{case.get('name')}: {of.tag}: {of.get('message')}\n{of.text}" for of in case if of.tag in WRONG]
        found[file] += wrong
    told = {file: "\n".join(found[file]) if file in found else "no tests were run" for file in files}
    if done.returncode and not any(told.values()):
        return dict.fromkeys(files, done.stdout + done.stderr)
    return {file: wrong for file, wrong in told.items() if wrong}


def check_inside(python: Path, file: str | Path) -> None:
    """Assert that all tests of a file pass there; see `run_inside`."""
    wrong = run_inside(python, [str(file)])
    assert not wrong, wrong[str(file)]
