"""Judging, showing and keeping what came of it, as a command and as a section of the whole bench."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.e2e.bench.figure import Figure
from tests.e2e.engine import variables
from tests.e2e.environment import with_overlay
from tests.e2e.judges.tasks import TASKS
from tests.e2e.needle.model import HELPED, PLAIN, SHIFTED, Recipe, write_model
from tests.e2e.processes import INSIDE
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.e2e.environment import Environment

DIRECTORY = BUILD / "bench"
DENSE, ORACLE = "dense", "oracle"
#: The rows of every table, in this order.
SELECTORS = (ORACLE, "hash", "bounds", "mean", "random")
#: The model that learned one task is asked that one alone.
ASKED: Mapping[Recipe, Sequence[str]] = {HELPED: ("needle",), PLAIN: tuple(TASKS), SHIFTED: tuple(TASKS)}
#: The goal: no more of the oracle's answers may be lost at this budget, by the selector that has it.
MOST_LOST, BUDGET, JUDGED = 0.05, 0.1, "hash"


@dataclass(frozen=True)
class Plan:
    """What to judge.

    Attributes:
        asked: The tasks of each model.
        blocks: Block sizes in tokens.
        budgets: Shares of the context, 0 to 1.
        length: Tokens of a prompt.
        count: Questions of each task.
        selectors: Of `SELECTORS`.
    """

    asked: Mapping[Recipe, Sequence[str]] = field(default_factory=lambda: ASKED)
    blocks: Sequence[int] = (16, 32, 128)
    budgets: Sequence[float] = (0.5, 0.25, 0.1, 0.05)
    length: int = 4_096
    count: int = 32
    selectors: Sequence[str] = SELECTORS


@dataclass(frozen=True)
class Verdict:
    """What one selector reached.

    Attributes:
        model: The recipe's name.
        task: One of `TASKS`.
        selector: One of `SELECTORS`, or `DENSE`.
        block: Tokens in a block; 0 for `DENSE`.
        budget: The share of the context that was read.
        score: How right the answers were, 0 to 1.
        recall: Of each layer, what its choice keeps of the attention outside the recent blocks, over what the oracle's
            keeps; empty where there was no oracle.
    """

    model: str
    task: str
    selector: str
    block: int
    budget: float
    score: float
    recall: tuple[float, ...]


def judge(environment: Environment, plan: Plan) -> list[Verdict]:
    """The verdicts on all models; trains those that are not there yet.

    Args:
        environment: A vLLM with the runtime, for its torch.
        plan: What to judge.
    """
    found = []
    for recipe, names in plan.asked.items():
        asked = {name: TASKS[name].questions(plan.length, plan.count) for name in names}
        tasks = [
            {
                "name": name,
                "prompts": [question.prompt for question in questions],
                "steps": 1 if TASKS[name].at_once else len(questions[0].answer),
                "best": len(questions[0].answer),
            }
            for name, questions in asked.items()
        ]
        spec = {
            "models": {recipe.name: str(write_model(environment.python, recipe))},
            "tasks": tasks,
            "blocks": list(plan.blocks),
            "budgets": list(plan.budgets),
            "selectors": list(plan.selectors),
        }
        for one in _run(environment.python, spec):
            score = TASKS[one["task"]].score(asked[one["task"]], one["said"], one["best"])
            about = (one["model"], one["task"], one["selector"], one["block"], one["budget"])
            found.append(Verdict(*about, score, tuple(one.get("recall") or ())))
    return found


def table(verdicts: Sequence[Verdict], block: int) -> Table:
    """Scores by task and selector for one block size; dense attention is a row of its own."""
    budgets = sorted({verdict.budget for verdict in verdicts if verdict.block == block}, reverse=True)
    made = Table("model", "task", "selector", title=f"answers right, blocks of {block}")
    for budget in budgets:
        made.add_column(f"{budget:.0%}", justify="right")
    made.add_column("attention kept, by layer", justify="right")
    for model, task, selector in dict.fromkeys((v.model, v.task, v.selector) for v in verdicts):
        mine = {v.budget: v for v in verdicts if (v.model, v.task, v.selector) == (model, task, selector)
                and v.block in (0, block)}  # fmt: skip
        if selector == DENSE:
            made.add_section()
            made.add_row(model, task, selector, f"{mine[1.0].score:.2f}", *[""] * len(budgets))
            continue
        scores = [f"{mine[budget].score:.2f}" for budget in budgets]
        least = mine[budgets[-1]]
        kept = " ".join(f"{share:.0%}" for share in least.recall)
        made.add_row(model, task, selector, *scores, f"{kept} at {least.budget:.0%}")
    return made


def measure(release: str, plan: Plan) -> list[Verdict]:
    """Judge, print a table for each block size and keep the numbers."""
    verdicts = judge(with_overlay(release), plan)
    for block in plan.blocks:
        Console(width=110).print(table(verdicts, block))
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    kept = [vars(verdict) for verdict in verdicts]
    (DIRECTORY / "judges.json").write_text(json.dumps({"length": plan.length, "verdicts": kept}, indent=1), "utf-8")
    return verdicts


def figures(release: str) -> Iterator[Figure]:
    """What each selector loses of the oracle's answers."""
    verdicts = measure(release, Plan())
    best = {(v.model, v.task, v.block, v.budget): v.score for v in verdicts if v.selector == ORACLE}
    for verdict in verdicts:
        if verdict.selector in (DENSE, ORACLE):
            continue
        most = best[verdict.model, verdict.task, verdict.block, verdict.budget]
        goal = MOST_LOST if verdict.selector == JUDGED and verdict.budget == BUDGET else None
        name = f"{verdict.model}, {verdict.task}, blocks of {verdict.block}, {verdict.budget:.0%}, {verdict.selector}"
        yield Figure(f"{name}: lost of the oracle's", 1 - verdict.score / most if most else 0.0, "", goal)


def _run(python: Path, spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        told, results = directory / "spec.json", directory / "results.json"
        told.write_text(json.dumps(spec), encoding="utf-8")
        subprocess.run(
            [python, INSIDE / "judge.py", told, results],
            env=variables(directory, {"PYTHONPATH": ""}),
            cwd=directory,
            check=True,
        )
        found: list[dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))
        return found
