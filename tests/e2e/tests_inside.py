"""Runs tests of ours with another environment's interpreter, where vLLM is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Warnings of torch and vLLM are no concern of ours, and conftest.py needs packages that are not there.
OPTIONS = ("--noconftest", "-p", "no:cacheprovider", "-o", "filterwarnings=default", "-q")


def check_inside(python: Path, file: str | Path, **variables: str) -> None:
    """Assert that all tests of a file pass there.

    Args:
        python: The interpreter.
        file: The file, from the root of the project on.
        variables: What its environment has beside ours.
    """
    done = subprocess.run(
        [python, "-P", "-m", "pytest", *OPTIONS, file],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
