"""How many files and functions of UCM one prompt passes through, saved and loaded, in a real engine."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.bench.figure import Figure
from tests.e2e.engine import MODEL, variables
from tests.e2e.environment import with_runtime
from tests.e2e.model import write_model
from tests.e2e.processes import IN_PROCESS, INSIDE
from tests.e2e.workload import ENGINE

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A reader follows a prompt through each of them.
MOST_FILES = 20


def figures(release: str) -> Iterator[Figure]:
    """Count for one saved and one loaded prompt, by `sys.setprofile` in all threads of the engine's one process."""
    write_model(MODEL)
    with tempfile.TemporaryDirectory() as directory:
        store, result = Path(directory) / "kv", Path(directory) / "result.json"
        store.mkdir()
        command = [with_runtime(release).python, INSIDE / "passes.py", MODEL, store, json.dumps(ENGINE), result]
        done = subprocess.run(
            [str(word) for word in command],
            env={**variables(Path(directory)), **IN_PROCESS, "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not result.exists():
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        found = json.loads(result.read_text(encoding="utf-8"))
    for name, passed in found.items():
        for kind, goal in (("files", MOST_FILES), ("functions", None)):
            yield Figure(f"{kind} of UCM that a {name} prompt passes through", len(passed[kind]), kind, goal, passed)
