"""Environments with a real vLLM, with and without our wheels: `python -m tests.e2e.environment RELEASE`.

An environment with our wheels is a venv that contains them and dependencies that vLLM does not have, and
reads everything else from the plain one. So all run the same files of vLLM, torch and their dependencies, and a new
one takes seconds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.install_vllm import ENVIRONMENTS, install, name_vllm
from tests.system import NotJudgedError
from transforms.pipeline.build import make_overlay
from transforms.pipeline.lock import check_reviewed
from transforms.pipeline.package import build_package, build_runtime
from transforms.pipeline.product import UCM
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transforms.pipeline.lock import Lock
    from transforms.pipeline.rewrite import Overlay

#: The directory of wheels for these tests, apart from those that an operator builds.
WHEELS = BUILD / "e2e"
STAMP = "wheels.json"
#: The Triton that is known to work with the newest CPU release, whose torch requires none.
TRITON = "triton==3.9.0"
#: vLLM's transport between engines; its wheel needs no CUDA to be imported.
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
BACK_END = Path(__file__).parent / "inside" / "interpreted"
SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"


@dataclass(frozen=True)
class Environment:
    """One venv.

    Attributes:
        release: The vLLM in it.
        directory: The venv.
        site: Its site-packages directory.
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
        """The directory of the overlay's package, if installed."""
        return self.site / UCM.module


def plain(release: str) -> Environment:
    """Return a real vLLM without the overlay; the first call installs it, which takes minutes."""
    python = install(release)
    return Environment(release, python.parents[1], _site(python))


def with_all_hooks(release: str) -> Environment:
    """Return the same vLLM with an overlay that also has the opt-in hooks."""
    directory = ENVIRONMENTS / f"vllm-{release}-all-hooks"
    return beside(release, directory, build_wheels(release, all_hooks=True))


def with_overlay(release: str, directory: Path | None = None, wheels: list[Path] | None = None) -> Environment:
    """Return the same vLLM with the overlay and its runtime, recreated when one of the two wheels has changed.

    Args:
        release: A reviewed release with a CPU build.
        directory: Where to put the venv; beside the plain one by default.
        wheels: The wheels of the overlay and the runtime; default: built from this checkout.
    """
    return beside(release, directory or ENVIRONMENTS / f"vllm-{release}-overlay", wheels or build_wheels(release))


def with_runtime(release: str, directory: Path | None = None, wheels: list[Path] | None = None) -> Environment:
    """Return the same vLLM with the runtime and without an overlay.

    Args:
        release: A release with a CPU build.
        directory: Where to put the venv; beside the plain one by default.
        wheels: The runtime's wheel; default: built from this checkout.
    """
    wheels = wheels or [build_runtime(WHEELS / release)]
    return beside(release, directory or ENVIRONMENTS / f"vllm-{release}-runtime-only", wheels)


def with_triton(release: str) -> Environment:
    """Return the same vLLM with Triton, interpreted on the CPU, which the V2 model runner needs.

    It is separate from the plain environment because vLLM behaves differently if Triton is installed.
    """
    state = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(BACK_END.glob("*.py")))).hexdigest()
    return with_packages(release, "triton", [TRITON], state, _install_back_end)


def with_nixl(release: str, directory: Path | None = None) -> Environment:
    """Return the same vLLM with the runtime and NIXL; `vllm serve` runs in it.

    Args:
        release: A release with a CPU build.
        directory: Where to put the venv; beside the plain one by default.

    Raises:
        NotJudgedError: NIXL cannot be installed.
    """
    try:
        below = with_packages(release, "nixl", NIXL)
    except subprocess.CalledProcessError as error:
        raise NotJudgedError("NIXL beside UCM", f"pip cannot install {' '.join(NIXL)}: {error}") from error
    directory = directory or ENVIRONMENTS / f"vllm-{release}-nixl-runtime"
    environment = beside(release, directory, [build_runtime(WHEELS / release)], below)
    name_vllm(environment.site, release)
    return environment


def with_packages(
    release: str,
    name: str,
    packages: Sequence[str],
    state: str = "",
    complete: Callable[[Path], None] = lambda _: None,
) -> Environment:
    """Return the same vLLM with packages on top, without their dependencies; recreated if one of them has changed.

    Args:
        release: A release with a CPU build.
        name: What the venv's name says besides the release.
        packages: The packages, with their versions.
        state: Changes with whatever else is installed.
        complete: Installs that, given the site-packages directory.

    Raises:
        CalledProcessError: The packages cannot be installed.
    """
    directory = ENVIRONMENTS / f"vllm-{release}-{name}"
    python, stamp, wanted = directory / "bin" / "python", directory / STAMP, json.dumps([*packages, state])
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        below = plain(release)
        make_venv(below.python, directory, [])
        site = _site(python)
        _read_from(site, below)
        subprocess.run([*_pip(python), "install", "--quiet", "--no-compile", "--no-deps", *packages], check=True)
        complete(site)
        stamp.write_text(wanted, encoding="utf-8")
    return Environment(release, directory, _site(python))


def with_triton_and_overlay(release: str, *, all_hooks: bool = False) -> Environment:
    """Return `with_triton` with the overlay and its runtime."""
    below = with_triton(release)
    directory = below.directory.with_name(f"{below.directory.name}-{'all-hooks' if all_hooks else 'overlay'}")
    return beside(release, directory, build_wheels(release, all_hooks=all_hooks), below)


def _install_back_end(site: Path) -> None:
    """Install the back end, which Triton finds by its entry point."""
    package, about = site / BACK_END.name, site / f"{BACK_END.name}-0.dist-info"
    shutil.copytree(BACK_END, package, ignore=shutil.ignore_patterns("__pycache__"))
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {BACK_END.name}\nVersion: 0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(f"[triton.backends]\ncpu = {BACK_END.name}\n", encoding="utf-8")


def _read_from(site: Path, below: Environment) -> None:
    """Make another environment's packages importable, including its ``.pth`` files (addsitedir)."""
    (site / "below.pth").write_text(f"import site; site.addsitedir({str(below.site)!r})\n", encoding="utf-8")


def beside(release: str, directory: Path, wheels: list[Path], below: Environment | None = None) -> Environment:
    """Return a venv with some wheels on top of another, by default the plain one; recreate it if a wheel changed."""
    python = directory / "bin" / "python"
    stamp = directory / STAMP
    state = json.dumps({wheel.name: hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}, indent=1)
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != state:
        below = below or plain(release)
        make_venv(below.python, directory, wheels)
        _read_from(_site(python), below)
        missing = [need for wheel in wheels for need in third_party_needs(wheel)]
        install_needs(Environment(release, directory, _site(python)), missing)
        stamp.write_text(state, encoding="utf-8")
    return Environment(release, directory, _site(python))


def install_needs(environment: Environment, needs: Sequence[str]) -> None:
    """Install packages and their dependencies from the index."""
    subprocess.run([*_pip(environment.python), "install", "--quiet", *needs], check=True)


def third_party_needs(wheel: Path) -> list[str]:
    """Return a wheel's dependencies without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        declared = Parser().parsestr(archive.read(about).decode()).get_all("Requires-Dist", [])
    return [need for need in declared if "extra ==" not in need]


def build_wheels(release: str, *, all_hooks: bool = False) -> list[Path]:
    """Build the wheels of the overlay and the runtime from this checkout."""
    out = WHEELS / release
    overlay, lock = _reviewed(release)
    return [build_package(overlay, lock, out, all_hooks=all_hooks).wheel, build_runtime(out)]


@functools.cache
def _reviewed(release: str) -> tuple[Overlay, Lock]:
    """Return the overlay and its lock; cached, because two wheels are built from the slow rewrite."""
    overlay = make_overlay(release)
    return overlay, check_reviewed(overlay)


def make_venv(python: Path, directory: Path, wheels: list[Path]) -> Path:
    """Create a venv with only some wheels, without their dependencies.

    Returns:
        The venv's interpreter.
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
