"""A real vLLM with our wheels, beside the same vLLM without them: `python -m tests.e2e.environment RELEASE`.

An environment with our wheels is a venv of its own that holds them, and what they need and vLLM does not bring, and
reads everything else from the plain one. So all run the same files of vLLM, torch and all that they need, and a fresh
one costs seconds.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from tests.e2e.install_vllm import ENVIRONMENTS, install
from transforms.pipeline.build import build_overlay
from transforms.pipeline.package import BUILD, PACKAGE, build_runtime

#: Where wheels for these tests are built, apart from those that an operator asked for.
WHEELS = BUILD / "e2e"
STAMP = "wheels.json"
SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


@dataclass(frozen=True)
class Environment:
    """One venv.

    Attributes:
        release: The vLLM in it.
        directory: The venv.
        site: Its own site-packages directory.
    """

    release: str
    directory: Path
    site: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"

    @property
    def overlay(self) -> Path:
        """Where the overlay's package lies, if it is installed."""
        return self.site / PACKAGE


def plain(release: str) -> Environment:
    """A real vLLM without the overlay; installing it for the first time takes minutes."""
    python = install(release)
    return Environment(release, python.parents[1], _site(python))


def with_overlay(release: str, directory: Path | None = None, wheels: list[Path] | None = None) -> Environment:
    """The same vLLM with the overlay and its runtime, made anew when one of the two wheels has changed.

    Args:
        release: A reviewed release that has a CPU build.
        directory: Where to put the venv; beside the plain one by default.
        wheels: The overlay's wheel and the runtime's; built from this checkout by default.
    """
    return _beside(release, directory or ENVIRONMENTS / f"vllm-{release}-overlay", wheels or build_wheels(release))


def with_runtime(release: str, directory: Path | None = None, wheels: list[Path] | None = None) -> Environment:
    """The same vLLM with the runtime and without any overlay.

    Args:
        release: A release that has a CPU build.
        directory: Where to put the venv; beside the plain one by default.
        wheels: The runtime's wheel; built from this checkout by default.
    """
    wheels = wheels or [build_runtime(WHEELS / release)]
    return _beside(release, directory or ENVIRONMENTS / f"vllm-{release}-runtime-only", wheels)


def _beside(release: str, directory: Path, wheels: list[Path]) -> Environment:
    """A venv with some wheels on top of the plain one, made anew when one of them has changed."""
    python = directory / "bin" / "python"
    stamp = directory / STAMP
    state = json.dumps({wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}, indent=1)
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != state:
        below = plain(release)
        make_venv(below.python, directory, wheels)
        # addsitedir reads the plain environment's own .pth files as well.
        (_site(python) / "plain_vllm.pth").write_text(f"import site; site.addsitedir({str(below.site)!r})\n", "utf-8")
        missing = [need for wheel in wheels for need in third_party_needs(wheel)]
        subprocess.run([*_pip(python), "install", "--quiet", *missing], check=True)
        stamp.write_text(state, encoding="utf-8")
    return Environment(release, directory, _site(python))


def third_party_needs(wheel: Path) -> list[str]:
    """What a wheel declares to need without any extra."""
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        declared = Parser().parsestr(archive.read(about).decode()).get_all("Requires-Dist", [])
    return [need for need in declared if "extra ==" not in need]


def build_wheels(release: str) -> list[Path]:
    """The overlay's wheel and the runtime's, built from this checkout."""
    out = WHEELS / release
    return [build_overlay(release, out=out).wheel, build_runtime(out)]


def make_venv(python: Path, directory: Path, wheels: list[Path]) -> Path:
    """A venv of an interpreter's kind with nothing but some wheels, without what those depend on.

    Returns:
        Its interpreter.
    """
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([python, "-m", "venv", "--without-pip", directory], check=True)
    made = directory / "bin" / "python"
    if wheels:
        subprocess.run([*_pip(made), "install", "--quiet", "--no-index", "--no-deps", *map(str, wheels)], check=True)
    return made


def _pip(python: Path) -> list[str]:
    return [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]


def _site(python: Path) -> Path:
    return Path(subprocess.check_output([python, "-c", SITE_PACKAGES], text=True).strip())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(with_overlay(name).python)
