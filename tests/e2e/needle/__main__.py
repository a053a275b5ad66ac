"""Measure the accuracy that sparse methods lose on the needle task, against dense attention, by budget."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import TYPE_CHECKING

from tests.e2e.needle.measuring import BUDGETS, COUNT, LENGTHS, Plan, measure
from tests.e2e.needle.settings import BUDGET, known_methods, parse_options

if TYPE_CHECKING:
    from collections.abc import Sequence

RELEASE = "0.32.0"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 if an engine failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.needle", description=__doc__)
    parser.add_argument("--methods", nargs="*", default=known_methods(), help="default: all that come with UCM")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS, help="shares of the context, 0 to 1")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt")
    parser.add_argument("--count", type=int, default=COUNT, help="questions for each method, length and budget")
    parser.add_argument("--dtype", default="float32", help="of the model and its KV cache")
    parser.add_argument("--release", default=RELEASE)
    parser.add_argument(
        "--options",
        nargs="*",
        default=[],
        metavar="METHOD={…}",
        help=f'instead of a method\'s usual options; "{BUDGET}" is the budget in tokens, "{BUDGET}-32" 32 less',
    )
    chosen = parser.parse_args(arguments)
    try:
        options = parse_options(chosen.options)
    except ValueError as error:
        parser.error(str(error))
    # A measurement that is stopped ends its engines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    plan = Plan(chosen.methods, chosen.lengths, chosen.budgets, chosen.count, chosen.dtype, options)
    return int(any(result.error for result in measure(chosen.release, plan)))


if __name__ == "__main__":
    sys.exit(main())
