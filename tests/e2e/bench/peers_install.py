"""Environments beside the plain vLLM one, each with what one side of the comparison needs on top of it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.e2e.environment import make_venv, plain, with_runtime
from tests.e2e.install_vllm import ENVIRONMENTS
from transforms.pipeline.package import BUILD, build_runtime

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


def runtime_python(release: str) -> Path:
    """The interpreter of a vLLM with our runtime, built from this checkout, and without an overlay.

    Not the environment of the tests: a test that builds it anew must not pull it from under a running engine.
    """
    wheel = build_runtime(BUILD / "bench" / "wheels")
    return with_runtime(release, ENVIRONMENTS / f"vllm-{release}-bench", [wheel]).python


def lmcache_python(release: str) -> Path:
    """The interpreter of a vLLM with LMCache, which reads all else from the plain environment."""
    directory = ENVIRONMENTS / f"vllm-{release}-lmcache"
    python, stamp, wanted = directory / "bin" / "python", directory / "lmcache.json", json.dumps([LMCACHE, *NEEDS])
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        below = plain(release)
        make_venv(below.python, directory, [])
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
        # `--no-deps`: some of what it names has no build without CUDA.
        subprocess.run([*pip, "--quiet", "--no-deps", LMCACHE, *NEEDS], check=True)
        site = directory / below.site.relative_to(below.directory)
        (site / "plain_vllm.pth").write_text(f"import site; site.addsitedir({str(below.site)!r})\n", "utf-8")
        stamp.write_text(wanted, encoding="utf-8")
    return python
