"""Asking, showing and keeping what came of it, as a command and as a section of the whole bench."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tests.e2e.bench.figure import Figure
from tests.e2e.environment import with_overlay
from tests.e2e.needle.asking import ask, settings_for
from tests.e2e.needle.report import plot, share_of_dense, table
from tests.e2e.needle.settings import DENSE, class_of, known_methods
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.e2e.needle.asking import Result

LENGTHS, BUDGETS, COUNT = (1024, 2048, 4096), (0.5, 0.25, 0.1, 0.05), 64
DIRECTORY = BUILD / "bench"
#: The goal: so much may be lost at this budget, by methods that find what is in the middle of a context.
MOST_LOST, BUDGET = 0.05, 0.1
FINDING = ("BlockTopK", "ESA")


@dataclass(frozen=True)
class Plan:
    """What to ask; see the command's arguments."""

    methods: Sequence[str] = field(default_factory=known_methods)
    lengths: Sequence[int] = LENGTHS
    budgets: Sequence[float] = BUDGETS
    count: int = COUNT
    dtype: str = "float32"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def measure(release: str, plan: Plan) -> list[Result]:
    """Ask, print a table, draw the plot and keep the numbers."""
    settings = settings_for(plan.methods, plan.lengths, plan.budgets)
    results = ask(with_overlay(release), settings, count=plan.count, dtype=plan.dtype, options=plan.options)
    Console(width=150).print(table(results))
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    plot(results, DIRECTORY / "needle.png")
    kept = [
        {
            "method": result.setting.method,
            "options": result.setting.config(plan.options),
            "length": result.setting.length,
            "budget": result.setting.budget,
            "accuracy": None if result.error else result.accuracy,
            "error": result.error,
        }
        for result in results
    ]
    (DIRECTORY / "needle.json").write_text(json.dumps({"dtype": plan.dtype, "results": kept}, indent=1), "utf-8")
    print(f"the plot is {DIRECTORY / 'needle.png'}")
    for result in results:
        if result.error:
            print(f"{result.setting} failed: {result.error}", file=sys.stderr)
    return results


def figures(release: str) -> Iterator[Figure]:
    """What each method loses at the longest prompts."""
    results = measure(release, Plan(lengths=LENGTHS[-1:]))
    for result in results:
        setting = result.setting
        if setting.method != DENSE and not result.error:
            goal = MOST_LOST if setting.budget == BUDGET and class_of(setting.method) in FINDING else None
            name = f"{setting.method}, {setting.length} tokens, {setting.budget:.0%}: answers lost, share of dense"
            yield Figure(name, 1 - share_of_dense(result, results), "", goal, {"accuracy": result.accuracy})
