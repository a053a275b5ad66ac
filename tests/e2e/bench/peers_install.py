"""Environments beside the plain vLLM one, each with what one side of the comparison needs on top of it."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from tests.e2e.environment import with_packages, with_runtime
from tests.e2e.install_vllm import ENVIRONMENTS
from transforms.pipeline.package import build_runtime
from transforms.place import BUILD

if TYPE_CHECKING:
    from pathlib import Path

LMCACHE = "lmcache==0.5.6"
#: What its multi-process server and vLLM's connector to it import, of all that it names as needed; vLLM has the rest.
NEEDS = (
    "aiofile",
    "aiofiles",
    "caio",
    "nvtx",
    "opentelemetry-exporter-prometheus",
    "redis",
    "sortedcontainers",
)
UC_MANAGER = "uc-manager-cuda-cu129==0.8.1"
#: It has wheels for this Python alone.
UC_MANAGER_PYTHON = "python3.12"


def runtime_python(release: str) -> Path:
    """The interpreter of a vLLM with our runtime, built from this checkout, and without an overlay.

    Not the environment of the tests: a test that builds it anew must not pull it from under a running engine.
    """
    wheel = build_runtime(BUILD / "bench" / "wheels")
    return with_runtime(release, ENVIRONMENTS / f"vllm-{release}-bench", [wheel]).python


def lmcache_python(release: str) -> Path:
    """The interpreter of a vLLM with LMCache, some of whose dependencies have no build without CUDA."""
    return with_packages(release, "lmcache", [LMCACHE, *NEEDS]).python


def uc_manager_python() -> Path:
    """The interpreter of an environment with uc-manager and what its file store imports.

    Raises:
        OSError: There is no Python 3.12.
        subprocess.CalledProcessError: The Python 3.12 cannot be run, or the packages cannot be installed.
    """
    directory = ENVIRONMENTS / "uc-manager"
    python, complete = directory / "bin" / "python", directory / UC_MANAGER
    if not complete.exists():
        shutil.rmtree(directory, ignore_errors=True)
        subprocess.run([UC_MANAGER_PYTHON, "-m", "venv", directory], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, "numpy", "wrapt==1.17.2"], check=True)
        subprocess.run([*pip, "--no-deps", UC_MANAGER], check=True)
        complete.touch()
    return python
