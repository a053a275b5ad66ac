"""What it costs to start: an interpreter with the overlay installed, and the content checks of one vLLM."""

from __future__ import annotations

import json
import statistics
import subprocess
from typing import TYPE_CHECKING, Any

from tests.e2e.bench.figure import Figure, alternate, seconds_of
from tests.e2e.environment import build_wheels, make_venv, plain
from tests.e2e.processes import INSIDE
from transforms.place import BUILD
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
    costs = {process: _costs_ms(environment, modules) for process, modules in loaded.items()}
    detail: dict[str, Any] = {p: {"modules": len(loaded[p]), **cost} for p, cost in costs.items()}
    total = sum(cost["checks"] for cost in costs.values())
    yield Figure("content checks of one vLLM start, all processes", total, "ms", 10.0, detail)
    every = _costs_ms(environment, names)
    yield Figure("content checks of all shadowed modules, one process", every["checks"], "ms", None)
    detail = {"compiled_ms": every["compiled"], "cached_ms": every["cached"]}
    more = every["compiled"] - every["cached"]
    yield Figure("loading all of them, compiled rather than from bytecode: more", more, "ms", None, detail)
    yield from hooked_checks(environment)


def hooked_checks(environment: Environment) -> Iterator[Figure]:
    """The look at every changed function, in a process that has all shadowed modules loaded."""
    command = [str(environment.python), str(INSIDE / "hooked_checks.py")]
    found = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    yield Figure("hooked functions are ours: when vLLM loads plug-ins", found["plugin"], "ms", None, found)
    yield Figure("hooked functions are ours: when a feature starts", found["feature"], "ms", 1.0, found)


def _costs_ms(environment: Environment, names: list[str]) -> dict[str, float]:
    """Medians over fresh processes, after one that warms the page cache."""
    command = [str(environment.python), str(INSIDE / "content_checks.py"), str(environment.overlay), *names]
    found = [json.loads(subprocess.check_output(command)) for _ in range(FRESH_PROCESSES + 1)][1:]
    return {name: 1000 * statistics.median(one[name] for one in found) for name in found[0]}
