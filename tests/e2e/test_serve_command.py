"""The command that serves a model in the demo runs what is installed, wherever it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.environment import Environment
from tests.e2e.real.chat import serve_command

#: A server that prints where it and a process that it starts as vLLM does import a module from.
SERVER = """
import subprocess, sys, told
print(told.__file__)
subprocess.run([sys.executable, "-m", "told"], check=True)
"""


def test_no_process_of_the_server_imports_from_its_working_directory(tmp_path: Path) -> None:
    installed, here = tmp_path / "installed", tmp_path / "here"
    cli = installed / "vllm" / "entrypoints" / "cli"
    cli.mkdir(parents=True)
    (cli / "main.py").write_text(SERVER, encoding="utf-8")
    for place in (installed, here):
        place.mkdir(exist_ok=True)
        (place / "told.py").write_text("if __name__ == '__main__':\n    print(__file__)\n", encoding="utf-8")
    environment = Environment("0.32.0", Path(sys.prefix), installed)
    command = serve_command(environment, tmp_path / "model", None, 8000)
    variables = {**os.environ, "PYTHONPATH": str(installed)}
    told = subprocess.check_output(["bash", "-c", command], cwd=here, env=variables, text=True)  # noqa: S607
    assert told.split() == [str(installed / "told.py")] * 2
