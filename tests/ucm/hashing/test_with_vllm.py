"""The same questions asked of a real vLLM: `inside_vllm.py` runs with the interpreter that has it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[3]
RELEASE = os.environ.get("UCM_E2E_RELEASE")
#: Warnings of torch and vLLM are no concern of ours, and the plug-ins of our own environment are not there.
OPTIONS = ("--noconftest", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-q")


@pytest.mark.skipif(not RELEASE, reason="runs a real vLLM: `nox -s e2e`, or set UCM_E2E_RELEASE=0.32.0")
def test_with_real_objects() -> None:
    from tests.e2e.environment import plain  # noqa: PLC0415 - only engines need the build's packages

    done = subprocess.run(
        [plain(str(RELEASE)).python, "-m", "pytest", *OPTIONS, str(Path(__file__).with_name("inside_vllm.py"))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
