"""Evaluate block selectors by the answers of small models that read only the selected blocks."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tests.e2e.judges.measuring import ASKED, SELECTORS, Plan, measure

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.judges", description=__doc__)
    names = [recipe.name for recipe in ASKED]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--tasks", nargs="+", help="default: all that a model learned")
    parser.add_argument("--selectors", nargs="+", choices=SELECTORS, default=SELECTORS)
    parser.add_argument("--blocks", type=int, nargs="+", default=Plan().blocks, help="tokens in a block")
    parser.add_argument("--budgets", type=float, nargs="+", default=Plan().budgets, help="shares of the context")
    parser.add_argument("--length", type=int, default=Plan().length, help="tokens of a prompt")
    parser.add_argument("--count", type=int, default=Plan().count, help="questions of each task")
    parser.add_argument("--release", default="0.32.0")
    chosen = parser.parse_args(arguments)
    asked = {
        recipe: [task for task in tasks if chosen.tasks is None or task in chosen.tasks]
        for recipe, tasks in ASKED.items()
        if recipe.name in chosen.models
    }
    plan = Plan(asked, chosen.blocks, chosen.budgets, chosen.length, chosen.count, chosen.selectors)
    measure(chosen.release, plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
