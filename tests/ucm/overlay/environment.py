"""Virtual environments for tests: installing packages, and running programs in them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

#: The interpreter for the environments, for instance of another Python release.
PYTHON = os.environ.get("UCM_TEST_PYTHON", sys.executable)
SITE_DIRECTORY = "import sysconfig; print(sysconfig.get_path('purelib'))"


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip.

    Attributes:
        root: Its directory.
        python: Its interpreter.
        site: Its site-packages directory.
    """

    root: Path
    python: Path
    site: Path

    @classmethod
    def create(cls, root: Path) -> Environment:
        empty, site = _empty()
        shutil.copytree(empty.name, root, symlinks=True)
        return cls(root, root / "bin" / "python", root / site)

    def install(self, *wheels: Path, into: Path | None = None) -> None:
        """Install pure-Python wheels by unpacking them, as pip does."""
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into or self.site)

    def write(self, name: str, text: str) -> Path:
        """Write a file to site-packages."""
        path = self.site / name
        path.write_text(text, encoding="utf-8")
        return path

    def upstream_file(self, module: str) -> Path:
        """Return the path of vLLM's own file of a module."""
        return self.site / (module.replace(".", "/") + ".py")

    def overlay_file(self, module: str) -> Path:
        """Return the path of a module's rewritten file."""
        return self.site / "ucm_vllm_overlay" / "modules" / (module.replace(".", "/") + ".py")

    def start(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the interpreter with only these environment variables."""
        environ = {"PATH": os.environ["PATH"], "HOME": str(self.root), **variables}
        command = [str(self.python), *arguments]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, env=environ, cwd=self.root, timeout=240
        )

    def run(self, code: str, *flags: str, **variables: str) -> str:
        """Run a program that must succeed; return its output."""
        done = self.start(*flags, "-c", code, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def origin(self, module: str, *flags: str, **variables: str) -> Path:
        """Return the file from which a module is loaded."""
        return Path(self.run(f"import {module} as module; print(module.__file__)", *flags, **variables))

    def fail(self, code: str, *flags: str, **variables: str) -> str:
        """Run a program that must fail; return its error output."""
        done = self.start(*flags, "-c", code, **variables)
        assert done.returncode != 0, done.stdout
        return done.stderr


@functools.cache
def _empty() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """Return a virtual environment that is copied for each test, and its site-packages directory, relative to it.

    It holds no path of its own, apart from its shells' scripts.
    """
    directory = tempfile.TemporaryDirectory()
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", directory.name], check=True)
    python = Path(directory.name, "bin", "python")
    answer = subprocess.run([python, "-c", SITE_DIRECTORY], check=True, capture_output=True, text=True)
    return directory, Path(answer.stdout.strip()).relative_to(directory.name)
