"""`.ci/run` with stand-ins for the programs that it starts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
#: Checks the system, `python3 -m tests.system`, or makes the environment, `python3 -m venv .venv`.
PYTHON = """#!/usr/bin/env bash
case "$2" in
tests.system) echo "system checked"; [ ! -e lacking ] ;;
venv)
    mkdir -p .venv/bin
    printf '#!/bin/sh\\n' >.venv/bin/pip
    cp bin/nox .venv/bin/nox
    chmod +x .venv/bin/pip .venv/bin/nox ;;
esac
"""


def run(root: Path, sessions: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the script in a directory where each session of nox is some lines of shell."""
    programs = root / "bin"
    programs.mkdir()
    (root / ".ci").mkdir()
    shutil.copy(SCRIPT, root / ".ci" / "run")
    cases = "\n".join(f"{name})\n{lines}\n;;" for name, lines in sessions.items())
    texts = {
        "git": "#!/bin/sh\n",
        "python3": PYTHON,
        "nox": f'#!/usr/bin/env bash\necho "session $2"\ncase "$2" in\n{cases}\nesac\n',
    }
    for name, text in texts.items():
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    return again(root)


def again(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the script in a directory that `run` has made."""
    environment = {**os.environ, "PATH": f"{root / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", str(root / ".ci" / "run")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_sessions_run_one_after_the_other_and_the_site_beside_the_first(tmp_path: Path) -> None:
    done = run(tmp_path, {"docs": "echo built"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [
        "system checked",
        "session lint",
        "session docs",
        "built",
        "session tests",
        "session e2e",
        "",
    ]


def test_the_system_is_checked_once_and_what_it_lacks_in_ci_ends_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, {"tests": 'echo "packages: $UCM_SYSTEM_PACKAGES"'})
    assert "packages: no\n" in done.stdout
    (tmp_path / "lacking").touch()
    done = again(tmp_path)
    assert (done.returncode, done.stdout) == (1, "system checked\n")


def test_a_site_that_cannot_be_built_ends_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, {"docs": "echo a dead link; exit 3"})
    assert done.returncode == 3
    assert "a dead link" in done.stdout
    assert "session tests" not in done.stdout


def test_a_failed_check_ends_the_build_of_the_site_and_shows_its_log(tmp_path: Path) -> None:
    """The build and its child hold a pipe open, which is at its end when both have ended."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as held:
        building = f"exec 3>{pipe}; echo building; echo up >&3; sleep 300 & wait"
        done = run(tmp_path, {"docs": building, "lint": f"read -r up <{pipe}; exit 2"})
        os.set_blocking(held.fileno(), True)
        assert held.read() == b""
    assert done.returncode == 2
    assert "building" in done.stdout
