"""What the tests need of the operating system: `python3 -m tests.system` installs it with apt, as root.

`nox -s tests` and `.ci/run` call it before anything is installed, so it needs only the standard library. It installs
only what is missing. Whatever cannot be installed is said in one line each, and its tests are skipped; in CI, where
`CI=true`, that is an error. `UCM_SYSTEM_PACKAGES=no` forbids the installation.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: With this environment variable set to "no", nothing is installed.
SWITCH = "UCM_SYSTEM_PACKAGES"
#: A package manager that another program uses is waited for; an archive out of reach is given up soon.
APT_OPTIONS = (
    *("-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20"),
    *("-o", "Acquire::https::Timeout=20", "-o", "APT::Update::Error-Mode=any"),
)


class NotJudgedError(Exception):
    """A test needs something that this system does not give.

    Args:
        name: What is not judged without it.
        why: What is missing, and how to get it.
    """

    def __init__(self, name: str, why: str) -> None:
        super().__init__(name, why)
        self.name, self.why = name, why

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True)
class Need:
    """Something that comes with packages of the system.

    Attributes:
        name: What the tests judge with it.
        packages: The Debian packages that bring it.
        programs: The programs that must be in PATH.
        libraries: The shared libraries that must load.
        files: The files that must exist.
    """

    name: str
    packages: tuple[str, ...]
    programs: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command that installs it on Debian and its derivatives."""
        return f"apt-get update && apt-get install -y {' '.join(self.packages)}"

    def missing(self) -> list[str]:
        """Return its programs, libraries and files that are not there."""
        programs = [name for name in self.programs if shutil.which(name) is None]
        libraries = [name for name in self.libraries if not _loads(name)]
        return programs + libraries + [name for name in self.files if not Path(name).exists()]

    def require(self) -> str:
        """Return the path of its first program, or an empty string if it has none.

        Raises:
            NotJudgedError: Something is missing.
        """
        if missing := self.missing():
            raise NotJudgedError(self.name, f"{', '.join(missing)} not found; `{self.command}` installs it")
        return (shutil.which(self.programs[0]) or "") if self.programs else ""


def require_root(why: str) -> None:
    """Go on only as root.

    Args:
        why: What a test does that others may not.

    Raises:
        NotJudgedError: This is another user.
    """
    if os.geteuid() != 0:
        raise NotJudgedError("what only root can do", why)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


CHROMIUM = Need("pages in a browser", ("chromium",), programs=("chromium",))
REDIS = Need("Redis", ("redis-server",), programs=("redis-server",))
#: vLLM imports without the library of its extension, and fails when it calls an operation of it; torch compiles others.
VLLM = Need(
    "engines of vLLM",
    ("libnuma1", "g++", f"python{sys.version_info.major}.{sys.version_info.minor}-dev"),
    programs=("g++",),
    libraries=("libnuma.so.1",),
    files=(f"{sysconfig.get_path('include')}/Python.h",),
)
MOONCAKE = Need(
    "Mooncake",
    ("libcurl4", "libibverbs1", "libnuma1"),
    libraries=("libcurl.so.4", "libibverbs.so.1", "libnuma.so.1"),
)
PATCH = Need("diffs applied by patch", ("patch",), programs=("patch",))
NEEDS = (CHROMIUM, REDIS, VLLM, MOONCAKE, PATCH)


def in_ci() -> bool:
    """Whether this is a run that decides about a change, where everything must be judged."""
    return os.environ.get("CI", "").lower() in {"1", "true"}


def lacking(needs: Iterable[Need]) -> list[Need]:
    """Return the needs that are not met."""
    return [need for need in needs if need.missing()]


def obstacle() -> str:
    """Return why nothing can be installed, or an empty string."""
    if os.environ.get(SWITCH, "").lower() in {"no", "0", "false"}:
        return f"{SWITCH}={os.environ[SWITCH]} forbids it"
    if shutil.which("apt-get") is None:
        return "there is no apt-get"
    if os.geteuid() != 0:
        return f"only root can: `sudo {sys.executable} -m tests.system`"
    return ""


def install(needs: Sequence[Need]) -> str:
    """Install the packages of some needs, each by itself, so that one that fails does not stop the others.

    Returns:
        Why not all could be installed, or an empty string.
    """
    problems = []
    if problem := _apt("update"):
        return f"apt-get update failed: {problem}"
    for need in needs:
        print(f"{need.name}: installing {' '.join(need.packages)} ({SWITCH}=no forbids it)", flush=True)
        if problem := _apt("install", "-y", "--no-install-recommends", *need.packages):
            problems.append(f"apt-get install {' '.join(need.packages)} failed: {problem}")
    return "; ".join(problems)


def _apt(*words: str) -> str:
    """Run apt-get; return its first error if it fails."""
    command = ["apt-get", "-qq", *APT_OPTIONS, *words]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("E:")]
    return errors[0] if errors else f"it ended with {done.returncode}"


def main(needs: Sequence[Need] = NEEDS) -> int:
    """Install what is missing where that is possible, and say what is not.

    Returns:
        The exit code: 1 if something is still missing in CI.
    """
    missing = lacking(needs)
    why = obstacle() if missing else ""
    if missing and not why:
        why = install(missing)
        missing = lacking(missing)
    for need in missing:
        print(f"{need.name}: {', '.join(need.missing())} not found; `{need.command}` installs it")
    if missing:
        print(f"not installed here: {why or 'the packages do not bring it'}")
        if in_ci():
            print("CI=true: everything must be judged")
    return int(bool(missing) and in_ci())


if __name__ == "__main__":
    sys.exit(main())
