"""What ReRoPE costs of attention, on one real layer for the CPU: a decode step, and a chunk of a prompt."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.bench.figure import Figure
from tests.e2e.engine import variables
from tests.e2e.environment import with_overlay
from tests.e2e.processes import INSIDE

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
WINDOW, CHUNK, ROUNDS = 4096, 2048, 7
#: A context of so many windows, and the most that attention may take of dense attention's time.
TIMES = (1, 2, 4)
GOALS = {"decode": 1.3, "prefill": 2.0}


def figures(release: str) -> Iterator[Figure]:
    """For each context the processor time of a layer's attention, to that of dense attention."""
    cases = {
        (kind, times): (times * WINDOW - new, new)
        for kind, new in (("decode", 1), ("prefill", CHUNK))
        for times in TIMES
    }
    spec = {"window": WINDOW, "dtype": "bfloat16", "rounds": ROUNDS, "cases": list(cases.values())}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        told, result = directory / "spec.json", directory / "result.json"
        told.write_text(json.dumps(spec), encoding="utf-8")
        subprocess.run(
            [with_overlay(release).python, INSIDE / "rerope_cost.py", told, result],
            env={**variables(directory), "PYTHONPATH": str(ROOT)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found = json.loads(result.read_text(encoding="utf-8"))
    for (kind, times), seconds in zip(cases, found, strict=True):
        ratio = seconds["method"] / seconds["dense"]
        detail = {f"{side}_ms": 1000 * taken for side, taken in seconds.items()}
        yield Figure(f"ReRoPE {kind} at {times} x the window, to dense", ratio, "", GOALS[kind], detail)
