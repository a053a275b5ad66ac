"""`.ci/run` with stand-ins for the programs that it starts."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
INSTALLED = ("chromium", "redis-server", "apt-get", "git")
#: Makes the environment: `python3 -m venv .venv`.
PYTHON = """#!/usr/bin/env bash
mkdir -p "$3/bin"
printf '#!/bin/sh\\n' >"$3/bin/pip"
cp bin/nox "$3/bin/nox"
chmod +x "$3/bin/pip" "$3/bin/nox"
"""


def run(root: Path, sessions: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the script in a directory where each session of nox is some lines of shell."""
    programs = root / "bin"
    programs.mkdir()
    (root / ".ci").mkdir()
    shutil.copy(SCRIPT, root / ".ci" / "run")
    cases = "\n".join(f"{name})\n{lines}\n;;" for name, lines in sessions.items())
    texts = {
        **dict.fromkeys(INSTALLED, "#!/bin/sh\n"),
        "python3": PYTHON,
        "nox": f'#!/usr/bin/env bash\necho "session $2"\ncase "$2" in\n{cases}\nesac\n',
    }
    for name, text in texts.items():
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    command = ["bash", str(root / ".ci" / "run")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_sessions_run_one_after_the_other_and_the_site_beside_the_first(tmp_path: Path) -> None:
    done = run(tmp_path, {"docs": "sleep 0.2; echo built"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["session lint", "session docs", "built", "session tests", "session e2e", ""]


def test_a_site_that_cannot_be_built_ends_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, {"docs": "echo a dead link; exit 3"})
    assert done.returncode == 3
    assert "a dead link" in done.stdout
    assert "session tests" not in done.stdout


def test_a_failed_check_ends_the_build_of_the_site_and_shows_its_log(tmp_path: Path) -> None:
    building = "sleep 300 & echo $! >docs.pid; echo building; wait"
    waits = "until [ -e docs.pid ]; do sleep 0.05; done"
    begin = time.monotonic()
    done = run(tmp_path, {"docs": building, "lint": f"{waits}; exit 2"})
    assert done.returncode == 2
    assert "building" in done.stdout
    pid = int((tmp_path / "docs.pid").read_text(encoding="ascii"))
    while is_running(pid):
        assert time.monotonic() < begin + 30, "the build goes on"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """A process that has ended has no arguments, or is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False
