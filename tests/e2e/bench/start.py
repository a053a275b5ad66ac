"""What it costs to start: an interpreter with the overlay installed, and the content checks of one vLLM."""

from __future__ import annotations

import json
import statistics
import subprocess
from typing import TYPE_CHECKING

from tests.e2e.bench.figure import Figure, alternate, seconds_of
from tests.e2e.engine import INSIDE
from tests.e2e.environment import build_wheels, make_venv, plain
from transforms.pipeline.package import BUILD
from ucm.overlay.manifest import read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.engine import Run
    from tests.e2e.environment import Environment

PAIRS = 100
FRESH_PROCESSES = 15


def interpreter_start(release: str) -> Iterator[Figure]:
    """Two empty venvs, one with the two wheels."""
    base = plain(release).python
    pythons = [
        make_venv(base, BUILD / "bench" / name, wheels)
        for name, wheels in (("without", []), ("with", build_wheels(release)))
    ]
    sides = [lambda python=python: seconds_of([python, "-c", "pass"]) for python in pythons]
    alternate(sides, 5)
    without, with_ = alternate(sides, PAIRS)
    medians = [1000 * statistics.median(side) for side in (without, with_)]
    differences = [1000 * (b - a) for a, b in zip(without, with_, strict=True)]
    detail = {
        "pairs": PAIRS,
        "median_without_ms": medians[0],
        "median_with_ms": medians[1],
        "median_of_differences_ms": statistics.median(differences),
    }
    yield Figure("interpreter start, more with the overlay", medians[1] - medians[0], "ms", 1.0, detail)


def content_checks(environment: Environment, run: Run) -> Iterator[Figure]:
    """The checks of every process of one engine, and of one process that would load every shadowed module.

    Args:
        environment: The one with the overlay.
        run: An engine in it, which says what each process loaded.
    """
    names = list(read_manifest(environment.overlay).modules)
    loaded = {r["process"]: [name for name in names if name in r["modules"]] for r in run.reports}
    costs = {process: _checks_ms(environment, modules) for process, modules in loaded.items()}
    detail = {process: {"modules": len(loaded[process]), "ms": cost} for process, cost in costs.items()}
    yield Figure("content checks of one vLLM start, all processes", sum(costs.values()), "ms", 10.0, detail)
    yield Figure("content checks of all shadowed modules, one process", _checks_ms(environment, names), "ms", None)


def _checks_ms(environment: Environment, names: list[str]) -> float:
    """Median over fresh processes, after one that warms the page cache."""
    command = [str(environment.python), str(INSIDE / "content_checks.py"), str(environment.overlay), *names]
    found = [float(json.loads(subprocess.check_output(command))) for _ in range(FRESH_PROCESSES + 1)]
    return 1000 * statistics.median(found[1:])
