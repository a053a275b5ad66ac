"""A session of nox installs all packages that the program which it runs imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[1]
GROUPS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
#: What a distribution is imported as, where its name does not say.
IMPORTED = {"pyyaml": "yaml", "mooncake-transfer-engine-non-cuda": "mooncake", "cyclonedx-python-lib": "cyclonedx"}


def packages(group: str) -> set[str]:
    """Return the names under which the packages of a dependency group are imported."""
    found: set[str] = set()
    for need in GROUPS[group]:
        if isinstance(need, dict):
            found |= packages(need["include-group"])
        else:
            name = re.split(r"[<>=;\[ ]", need)[0].lower()
            found.add(IMPORTED.get(name, name.replace("-", "_")))
    return found


@pytest.mark.parametrize(("group", "module"), [("demo", "tests.e2e.demo"), ("build", "tests.e2e.parity")])
def test_a_program_imports_only_what_its_session_installs(group: str, module: str) -> None:
    lacking = sorted(packages("test") - packages(group) - {"numpy", "tqdm", "yaml"})  # gguf needs these
    assert {"obstore", "redis", "pytest"} <= set(lacking)
    code = f"import sys; sys.modules.update(dict.fromkeys({lacking!r})); import {module}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
