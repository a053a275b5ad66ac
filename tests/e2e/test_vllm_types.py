"""vLLM's own classes satisfy the protocols by which UCM's code is type-checked."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from transforms.place import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.scenarios import Environments

pytestmark = pytest.mark.e2e

#: The real class of each protocol in `ucm.vllm_types`.
REAL = {
    "KVCacheConfig": "vllm.v1.kv_cache_interface",
    "LoRARequest": "vllm.lora.request",
    "Request": "vllm.v1.request",
    "SchedulerOutput": "vllm.v1.core.sched.output",
    "VllmConfig": "vllm.config.vllm",
}
#: Only the modules of these classes are analysed: all of vLLM and torch would take minutes, and say no more about them.
SETTINGS = f"""
[mypy]
strict = true
follow_imports = skip
[mypy-ucm.*,{",".join(REAL.values())}]
follow_imports = normal
"""


def _checked(environments: Environments, tmp_path: Path, source: str) -> str:
    """Return what mypy says about a source, with the vLLM of the environment."""
    (tmp_path / "mypy.ini").write_text(SETTINGS, encoding="utf-8")
    (tmp_path / "source.py").write_text(source, encoding="utf-8")
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-incremental"),
            *("--python-executable", environments.plain.python, "source.py"),
        ],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout + answer.stderr


def test_the_real_classes_satisfy_the_protocols(environments: Environments, tmp_path: Path) -> None:
    imports = [f"from {module} import {name} as Real{name}" for name, module in REAL.items()]
    functions = [f"def f{name}(real: Real{name}) -> {name}:\n    return real" for name in REAL]
    lines = [f"from ucm.vllm_types import {', '.join(REAL)}", *imports, *functions, ""]
    assert "Success: no issues found in 1 source file" in _checked(environments, tmp_path, "\n".join(lines))


def test_a_missing_attribute_is_an_error(environments: Environments, tmp_path: Path) -> None:
    source = (
        "from typing import Protocol\n"
        "from vllm.v1.request import Request\n"
        "class Wanted(Protocol):\n"
        "    @property\n"
        "    def no_such_thing(self) -> int: ...\n"
        "def f(real: Request) -> Wanted:\n"
        "    return real\n"
    )
    assert 'got "Request", expected "Wanted"' in _checked(environments, tmp_path, source)
