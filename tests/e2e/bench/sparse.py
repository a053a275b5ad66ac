"""Answers and decode steps with sparse methods, beside dense attention: `python -m tests.e2e.bench.sparse`.

Arguments choose a part: lengths, budgets, methods, rounds. The section ``sparse`` of the whole bench runs all.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tests.e2e.bench import sparse_defaults
from tests.e2e.bench.sparse_model import block_size, write_model
from tests.e2e.bench.sparse_results import Group
from tests.e2e.bench.sparse_side import Choice, Side
from tests.e2e.bench.sparse_table import NO_METHOD, goals, show
from tests.e2e.bench.ttft_engine import EngineFailedError
from tests.e2e.bench.ttft_quiet import Quiet
from tests.e2e.environment import with_overlay
from tests.e2e.judges import real
from tests.e2e.needle.settings import DENSE, filled, known_methods, parse_options
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from tests.e2e.bench.figure import Figure

RELEASE = "0.32.0"
LENGTHS, BUDGETS, ROUNDS = (4_096, 16_384, 32_768), (0.25, 0.1, 0.05), 5
#: A method that does nothing, so that dense attention is timed as the others are.
NOTHING = "ucm.sparse.base:SparseMethod"
#: Where the cost of a method that leaves nothing out is measured.
FULL_LENGTH = 16_384
#: The budget, in tokens, at which blocks are counted at all lengths.
HELD_BUDGET = 2_048
#: The method that fetches what a step reads beyond the step before, and the budget at which both extremes are compared.
FETCHING, FETCHED_BUDGET = "ESA", 0.1
#: A token that is generated over and over.
TOKEN = 7
#: The part of `sparse_defaults`, which shares engines among its points.
DEFAULTS = "defaults"
#: The part of `tests.e2e.judges.real`: what is lost of a trained model's answers.
ANSWERS = "answers"


@dataclass(frozen=True)
class Plan:
    """What to measure; see the command's arguments."""

    parts: Sequence[str] = (ANSWERS, "decode", "fetch", "full", "held", DEFAULTS)
    lengths: Sequence[int] = LENGTHS
    budgets: Sequence[float] = BUDGETS
    methods: Sequence[str] = field(default_factory=known_methods)
    rounds: int = ROUNDS
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def config(self, method: str, length: int, tokens: int) -> dict[str, Any]:
        """The value of ``ucm_sparse_config`` for a prompt and a budget in tokens."""
        return filled(method, tokens, block_size(length), self.options)


def figures(release: str, plan: Plan | None = None) -> Iterator[Figure]:
    """Measure, print the tables, yield the figures that have a goal."""
    plan = plan or Plan()
    if ANSWERS in plan.parts:
        yield from real.figures(release)
    python = with_overlay(release).python
    write_model(python)
    bench = Bench(python)
    for part, measure in PARTS.items():
        if part in plan.parts:
            measure(bench, plan)
    show(bench.groups)
    yield from goals(bench.groups)
    if DEFAULTS in plan.parts:
        pairs = list(sparse_defaults.measured(python, BUILD / "bench" / "sparse-defaults", plan.rounds))
        Console(width=160).print(sparse_defaults.table(pairs))
        yield from sparse_defaults.figures(pairs)


class Bench:
    """Measures groups, and keeps what was measured until now in a file.

    Args:
        python: The interpreter of an environment with vLLM and the overlay.

    Attributes:
        groups: By part.
    """

    def __init__(self, python: Path) -> None:
        self.groups: dict[str, list[Group]] = {}
        self._python, self._quiet = python, Quiet()

    def measure(self, part: str, choices: Sequence[Choice], group: Group, rounds: int) -> None:
        """Measure some sides, every other round in the other order; one that fails is left out from there on."""
        self.groups.setdefault(part, []).append(group)
        root = BUILD / "bench" / "sparse"
        shutil.rmtree(root, ignore_errors=True)
        with ExitStack() as cleanup:
            sides = []
            for number, choice in enumerate(choices):
                sides.append(Side(self._python, choice, group.length, root / str(number), self._quiet))
                cleanup.callback(sides[-1].stop)
            _each(sides, group, _begin)
            for number in range(rounds):
                _each(sides if number % 2 == 0 else sides[::-1], group, partial(_sample, number))
            _each(sides, group, _end)
        kept = {name: [each.as_dict() for each in groups] for name, groups in self.groups.items()}
        (BUILD / "bench" / "sparse.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")


def _each(sides: Sequence[Side], group: Group, act: Callable[[Group, Side], None]) -> None:
    """Do something with each side; one that fails is noted, and left out from there on."""
    for side in sides:
        if side.choice.name not in group.failures:
            try:
                act(group, side)
            except EngineFailedError as error:
                group.failures[side.choice.name] = str(error)


def _begin(group: Group, side: Side) -> None:
    side.started()
    told = side.prefill()
    group.most[side.choice.name], group.prefill_s[side.choice.name] = told["most"], told["seconds"]


def _sample(number: int, group: Group, side: Side) -> None:
    group.samples.append(side.sample(number))


def _end(group: Group, side: Side) -> None:
    group.held[side.choice.name] = side.held()
    group.tokens[side.choice.name] = side.tokens
    side.finish()
    group.bandwidth = max(group.bandwidth, side.bandwidth())


def _decode(bench: Bench, plan: Plan) -> None:
    """Steps of each method at each length and budget, beside those of dense attention."""
    for length in plan.lengths:
        for budget in plan.budgets:
            choices = [Choice(DENSE, {NOTHING: {}}, timed=True)]
            choices += [
                Choice(name, plan.config(name, length, round(budget * length)), timed=True) for name in plan.methods
            ]
            bench.measure("decode", choices, Group(length, budget), plan.rounds)


def _fetch(bench: Bench, plan: Plan) -> None:
    """Steps that have little in common with the step before, and steps of one token that have nearly all."""
    length = max(plan.lengths)
    for token in (None, TOKEN):
        choices = [Choice(DENSE, {NOTHING: {}}, timed=True, token=token)]
        config = plan.config(FETCHING, length, round(FETCHED_BUDGET * length))
        choices.append(Choice(FETCHING, config, timed=True, token=token))
        bench.measure("fetch", choices, Group(length, FETCHED_BUDGET, repeats=token is not None), plan.rounds)


def _full(bench: Bench, plan: Plan) -> None:
    """Steps with a method that leaves nothing out, beside those of an engine without any."""
    length = min(FULL_LENGTH, max(plan.lengths))
    choices = [Choice(NO_METHOD, None, timed=False)]
    choices += [Choice(name, plan.config(name, length, 2 * length), timed=False) for name in plan.methods]
    bench.measure("full", choices, Group(length, 1.0), 2 * plan.rounds)


def _held(bench: Bench, plan: Plan) -> None:
    """Blocks that a request holds with the same budget at each length."""
    for length in plan.lengths:
        choices = [Choice(name, plan.config(name, length, HELD_BUDGET), timed=False) for name in plan.methods]
        bench.measure("held", choices, Group(length, min(1.0, HELD_BUDGET / length)), 0)


PARTS: dict[str, Callable[[Bench, Plan], None]] = {"decode": _decode, "fetch": _fetch, "full": _full, "held": _held}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a part."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench.sparse", description=__doc__)
    parser.add_argument("--release", default=RELEASE)
    parser.add_argument("--parts", nargs="+", choices=Plan.parts, default=Plan.parts)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS, help="shares of the prompt, 0 to 1")
    parser.add_argument("--methods", nargs="+", default=known_methods())
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--options", nargs="*", default=[], metavar="METHOD={…}", help="as of tests.e2e.needle")
    chosen = parser.parse_args(arguments)
    try:
        options = parse_options(chosen.options)
    except ValueError as error:
        parser.error(str(error))
    # A bench that is stopped ends its engines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    plan = Plan(chosen.parts, chosen.lengths, chosen.budgets, chosen.methods, chosen.rounds, options)
    for figure in figures(chosen.release, plan):
        met = {True: "met", False: "missed", None: ""}[figure.met]
        print(f"{figure.name}: {figure.value:.3f}, goal {figure.goal}: {met}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
