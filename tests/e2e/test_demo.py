"""The commands that `nox -s demo` prints work as they are: a server with UCM, and a request."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]


@pytest.mark.skipif(not shutil.which("curl"), reason="the command is one of curl, which is not installed")
def test_the_commands_that_it_prints_serve_and_ask(release: str, tmp_path: Path) -> None:
    from tests.e2e.demo import demo_environment, prepare, question  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.real.chat import Server, curl_command, serve_command  # noqa: PLC0415
    from tests.e2e.real.model import real_model  # noqa: PLC0415
    from tests.ports import free_port  # noqa: PLC0415

    directory, port, log = tmp_path / "a demo", free_port(), tmp_path / "log.txt"
    command = serve_command(demo_environment(release), real_model(), prepare(directory), port)
    ours = ("UCM_", "VLLM_", "PYTHON", "PYTEST_")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    with Server(command, port, log, variables):
        asked = curl_command(question(directory), port)
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False)  # noqa: S607
    assert not done.returncode, done.stderr
    answer = json.loads(done.stdout)
    assert answer["usage"]["prompt_tokens"] > 4000
    assert answer["choices"][0]["message"]["content"]
    assert "[UCM.Connector]" in log.read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in (directory / "store").rglob("*") if path.is_file()) > 100 << 20
