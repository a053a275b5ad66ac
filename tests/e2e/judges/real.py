"""What sparse attention loses on a trained model: tasks in real text, their variants, and tables.

`nox -s bench -- sparse` runs it, and `python -m tests.e2e.judges.real` a part. `inside/real_judge.py` says how answers
are judged.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.e2e.bench.figure import Figure
from tests.e2e.engine import variables
from tests.e2e.environment import with_overlay
from tests.e2e.processes import INSIDE
from tests.e2e.real.chat import HANDBOOK
from tests.e2e.real.judge import QUESTIONS
from tests.e2e.real.model import real_model
from tests.e2e.real.text import HEAD, TAIL, encode
from transforms.place import BUILD, ROOT
from ucm.sparse.blocks import TILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

DIRECTORY = BUILD / "bench"
#: More real text, behind the handbook: what the longest prompts need.
MORE = ("LICENSE", "CONTRIBUTING.md", "README.md", "docs/configuration.md", "docs/sparse_design.md")
DOORS = ("red", "blue", "green", "yellow", "white", "black", "brown", "grey")
#: Tokens of decoded text of which the loss is measured.
CONTINUED = 64
#: The tasks, with the number of their prompts.
ONE, SEVERAL, CHAINED, DOCUMENT, TEXT = "one", "several", "chained", "document", "text"
TASKS = {ONE: 16, SEVERAL: 8, CHAINED: 8, DOCUMENT: 16, TEXT: 8}
DENSE, ORACLE, CODES, ESA = "dense", "oracle", "codes", "ESA"
SELECTORS = (ORACLE, CODES, "bounds", "mean", "random", "window")
ROWS = (DENSE, *SELECTORS, ESA)
BUDGETS = (0.5, 0.25, 0.14, 0.1, 0.05)
#: Tokens of the prompts, and of a block: the first is judged with all tasks and the others with fewer prompts.
LENGTHS, BLOCKS = (2_450, 4_000, 7_900), (32, 16, 128)
#: The window of ESA, in tokens.
WINDOW = 256
#: The goal: passkeys that may be missed at this budget.
GOAL_BUDGET, MOST_MISSED = 0.14, 1 / 16


@dataclass(frozen=True)
class Item:
    """A prompt and its answer, in tokens.

    Attributes:
        task: One of `TASKS`.
        prompt: The prompt.
        answer: What follows it.
        scored: The ranges of the answer that are judged: each is right if all of its tokens are.
    """

    task: str
    prompt: list[int]
    answer: list[int]
    scored: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Question:
    """A prompt and its answer as text.

    Attributes:
        task: One of `TASKS`.
        length: The most tokens of the prompt.
        number: Decides where in the text the prompt begins.
        hidden: Sentences, and where in the text they are, from 0 to 1.
        asked: The question.
        answer: The parts of the answer, and whether they are judged.
    """

    task: str
    length: int
    number: int
    hidden: list[tuple[float, str]]
    asked: str
    answer: list[tuple[str, bool]]

    @property
    def texts(self) -> list[str]:
        """Its texts: the beginning, the end, hidden sentences, parts of the answer."""
        return [HEAD, TAIL.format(question=self.asked), *(of for _, of in self.hidden), *(of for of, _ in self.answer)]

    def item(self, paragraphs: list[list[int]], texts: list[list[int]]) -> Item:
        """Return it in tokens.

        Args:
            paragraphs: The tokens of the text around the hidden sentences.
            texts: Those of `texts`.
        """
        head, tail, *others = texts
        sentences, parts = others[: len(self.hidden)], others[len(self.hidden) :]
        left = self.length - len(head) - len(tail) - sum(map(len, sentences))
        begin, text = 7 * self.number % len(paragraphs), []
        for paragraph in paragraphs[begin:] + paragraphs[:begin]:
            if len(paragraph) <= left and paragraph not in sentences:
                text.append(paragraph)
                left -= len(paragraph)
        ends = [0, *accumulate(map(len, text))]
        placed = sorted((at * ends[-1], of) for (at, _), of in zip(self.hidden, sentences, strict=True))
        body: list[int] = []
        for end, paragraph in zip(ends, [*text, []], strict=True):
            while placed and placed[0][0] <= end:
                body += placed.pop(0)[1]
            body += paragraph
        scored, place = [], 0
        for part, (_, wanted) in zip(parts, self.answer, strict=True):
            scored += [(place, place + len(part))] * wanted
            place += len(part)
        return Item(self.task, [*head, *body, *tail], [token for part in parts for token in part], tuple(scored))


def code(chance: random.Random) -> str:
    """Return five digits, each of which is a token."""
    return f"{chance.randrange(10_000, 100_000)}"


def one(length: int, number: int, count: int) -> Question:
    """Hide a code at one of as many depths as there are questions."""
    secret = code(random.Random(f"{ONE} {number}"))  # noqa: S311 - no secret
    said = f"The secret code of the station is {secret}. Remember it.\n\n"
    answer = [("The secret code of the station is ", False), (secret, True)]
    asked = "What is the secret code of the station?"
    return Question(ONE, length, number, [((number + 0.5) / count, said)], asked, answer)


def several(length: int, number: int, count: int) -> Question:
    """Ask for four codes that lie apart."""
    del count
    chance = random.Random(f"{SEVERAL} {number}")  # noqa: S311 - no secret
    codes = [(door, code(chance)) for door in chance.sample(DOORS, 4)]
    hidden = [
        ((place + chance.random()) / 4, f"The code of the {door} door is {of}.\n\n")
        for place, (door, of) in enumerate(codes)
    ]
    answer = []
    for door, of in chance.sample(codes, 4):
        answer += [(f" The code of the {door} door is ", False), (of, True), (".", False)]
    return Question(SEVERAL, length, number, hidden, "What are the codes of the doors?", answer)


def chained(length: int, number: int, count: int) -> Question:
    """Ask for a code that is found by way of another door; three more such chains lie in the text."""
    del count
    chance = random.Random(f"{CHAINED} {number}")  # noqa: S311 - no secret
    doors, hidden = chance.sample(DOORS, 8), []
    links = [(first, second, code(chance)) for first, second in zip(doors[:4], doors[4:], strict=True)]
    for first, second, of in links:
        hidden.append((chance.random(), f"The {first} door has the same code as the {second} door.\n\n"))
        hidden.append((chance.random(), f"The code of the {second} door is {of}.\n\n"))
    first, second, of = links[0]
    answer = [
        (f"The {first} door has the same code as the", False),
        (f" {second}", True),
        (f" door. The code of the {second} door is ", False),
        (of, True),
    ]
    return Question(CHAINED, length, number, hidden, f"What is the code of the {first} door?", answer)


def document(length: int, number: int, count: int) -> Question:
    """Ask for what the handbook says; the paragraph that says it lies at one of as many depths as there are questions.

    Neighbours among the questions are of neighbouring sections, so depths are dealt out in another order.
    """
    of = json.loads(QUESTIONS.read_text(encoding="utf-8"))["answered"][number]
    [said] = [paragraph for paragraph in paragraphs_of(HANDBOOK) if of["in"] in paragraph]
    answer = [(of["begins"], False), (of["answer"], True)]
    return Question(DOCUMENT, length, number, [((7 * number % count + 0.5) / count, said)], of["question"], answer)


ASKED: Mapping[str, Callable[[int, int, int], Question]] = {
    ONE: one,
    SEVERAL: several,
    CHAINED: chained,
    DOCUMENT: document,
}


def paragraphs_of(*files: Path) -> list[str]:
    """Return the paragraphs of texts, each with the empty line behind it."""
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    return [f"{each}\n\n" for each in re.split(r"\n\s*\n", text) if each.strip()]


def items(python: Path, model: Path, wanted: Mapping[tuple[str, int], int]) -> list[Item]:
    """Return prompts with their answers.

    Args:
        python: The interpreter of an environment with vLLM.
        model: The model's directory.
        wanted: By task and length, how many.
    """
    split = paragraphs_of(HANDBOOK, *(ROOT / of for of in MORE))
    questions = [
        ASKED[task](length, number, count)
        for (task, length), count in wanted.items()
        if task in ASKED
        for number in range(count)
    ]
    encoded = encode(python, model, [*split, *(of for question in questions for of in question.texts)])
    paragraphs, rest = encoded[: len(split)], iter(encoded[len(split) :])
    found = [question.item(paragraphs, [next(rest) for _ in question.texts]) for question in questions]
    whole = [token for paragraph in paragraphs for token in paragraph]
    for (task, length), count in wanted.items():
        for number in range(count if task == TEXT else 0):
            begin = (len(whole) - length - CONTINUED) * number // max(1, count - 1)
            end = begin + length
            found.append(Item(TEXT, whole[begin:end], whole[end : end + CONTINUED], ((0, CONTINUED),)))
    return found


def variants(length: int, block: int, budgets: Sequence[float], rows: Sequence[str]) -> list[dict[str, Any]]:
    """Return what is compared for a prompt: what decode steps read.

    Of the selectors, a budget is all that a step reads, sinks and recent tokens included, and the first two layers read
    everything, as with `BlockTopK`. Of ESA, it is what is read besides sinks and window, in all layers.
    """
    found: list[dict[str, Any]] = []
    if DENSE in rows:
        found.append({"name": DENSE, "selector": DENSE, "block": block, "tokens": length})
    for budget in budgets:
        about = {"block": block, "tokens": round(budget * length), "budget": budget}
        found += [{**about, "name": name, "selector": name} for name in SELECTORS if name in rows]
        esa = {**about, "selector": CODES, "recent": WINDOW, "tile": TILE, "dense_layers": 0}
        if ESA in rows:
            found.append({**esa, "name": ESA})
    return found


@dataclass(frozen=True)
class Plan:
    """What to judge; see the command's arguments."""

    tasks: Mapping[str, int] = field(default_factory=lambda: TASKS)
    lengths: Sequence[int] = LENGTHS
    blocks: Sequence[int] = BLOCKS
    budgets: Sequence[float] = BUDGETS
    rows: Sequence[str] = ROWS
    #: How many times fewer prompts other lengths and block sizes get than the first.
    fewer: int = 4


@dataclass(frozen=True)
class Verdict:
    """What became of one answer.

    Attributes:
        task: One of `TASKS`.
        length: Tokens of the prompts, as planned.
        block: Tokens in a block.
        budget: A share of the prompt; 1 for `DENSE`.
        row: One of `ROWS`.
        right: The share of its judged parts that are right.
        loss: The mean loss of its judged tokens, in nats.
    """

    task: str
    length: int
    block: int
    budget: float
    row: str
    right: float
    loss: float


def judge(python: Path, plan: Plan) -> list[Verdict]:
    """Return the verdicts.

    Args:
        python: The interpreter of an environment with vLLM and the runtime.
        plan: What to judge.
    """
    model = real_model()
    many = {
        (task, length): count if length == plan.lengths[0] else max(1, count // plan.fewer)
        for length in plan.lengths
        for task, count in plan.tasks.items()
    }
    found, asked = [], []
    made = items(python, model, many)
    for block in plan.blocks:
        for place, item in enumerate(made):
            length = min(of for of in plan.lengths if of >= len(item.prompt))
            if block == plan.blocks[0] or place % plan.fewer == 0:
                asked.append((item, length, block))
    told = [(item, variants(len(item.prompt), block, plan.budgets, plan.rows)) for item, _, block in asked]
    for one_found in verdicts_of(python, told):
        item, length, block = asked[one_found["item"]]
        judged = [one_found["tokens"][begin:end] for begin, end in item.scored]
        losses = [loss for part in judged for loss, _ in part]
        right = [all(said for _, said in part) for part in judged]
        about = item.task, length, block, one_found["budget"], one_found["name"]
        found.append(Verdict(*about, sum(right) / len(right), sum(losses) / len(losses)))
    return found


def table(verdicts: Sequence[Verdict], length: int, block: int) -> Table:
    """Return the verdicts on prompts of a length and blocks of a size: answers right, and the loss of text."""
    mine = [of for of in verdicts if (of.length, of.block) == (length, block)]
    by_cell: dict[tuple[str, str, float], list[Verdict]] = defaultdict(list)
    for of in mine:
        by_cell[of.task, of.row, of.budget].append(of)
    budgets = sorted({of.budget for of in mine if of.row != DENSE}, reverse=True)
    made = Table("task", "row", title=f"prompts of {length} tokens, blocks of {block}: right, or loss of text in nats")
    for budget in (1.0, *budgets):
        made.add_column(f"{budget:.0%}", justify="right")
    for task, row in dict.fromkeys((of.task, of.row) for of in sorted(mine, key=lambda of: ROWS.index(of.row))):
        cells = (by_cell.get((task, row, budget), []) for budget in (1.0, *budgets))
        made.add_row(task, row, *(_cell(task, cell) for cell in cells))
    return made


def _cell(task: str, cell: Sequence[Verdict]) -> str:
    if not cell:
        return ""
    if task == TEXT:
        return f"{sum(of.loss for of in cell) / len(cell):.3f}"
    return f"{sum(of.right for of in cell) / len(cell):.2f}"


def measure(release: str, plan: Plan) -> list[Verdict]:
    """Judge, print the tables, and keep the numbers."""
    verdicts = judge(with_overlay(release).python, plan)
    for length, block in sorted({(of.length, of.block) for of in verdicts}):
        Console(width=110).print(table(verdicts, length, block))
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    (DIRECTORY / "answers.json").write_text(json.dumps([vars(of) for of in verdicts], indent=1), encoding="utf-8")
    return verdicts


def figures(release: str) -> Iterator[Figure]:
    """Yield which passkeys `BlockTopK` and ESA miss at the budget of the goal."""
    verdicts = measure(release, Plan())
    for row in (CODES, ESA):
        right = [
            of.right
            for of in verdicts
            if (of.task, of.row, of.budget, of.length, of.block) == (ONE, row, GOAL_BUDGET, LENGTHS[0], BLOCKS[0])
        ]
        yield Figure(
            f"real model, passkeys missed at {GOAL_BUDGET:.0%}, {row}", 1 - sum(right) / len(right), "", MOST_MISSED
        )


def verdicts_of(python: Path, asked: Sequence[tuple[Item, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return what `inside/real_judge.py` says of answers: ``item``, ``name``, ``budget``, ``tokens``.

    Args:
        python: The interpreter of an environment with vLLM and the runtime.
        asked: Items, and what is compared for each, as of `variants`.
    """
    made = [{"prompt": item.prompt, "answer": item.answer, "variants": of} for item, of in asked]
    with tempfile.TemporaryDirectory() as name:
        return run_judge(python, "real_judge.py", {"items": made}, Path(name, "results.json"))


def run_judge(python: Path, script: str, spec: Mapping[str, Any], results: Path) -> list[Any]:
    """Run a judge on the trained model in an environment with vLLM; return the lines of JSON that it has written.

    Args:
        python: The environment's interpreter.
        script: A file of `inside/`, which is told the specification and where to write.
        spec: What is judged.
        results: The file of the results.
    """
    with tempfile.TemporaryDirectory() as name:
        told = Path(name, "spec.json")
        told.write_text(json.dumps({"model": str(real_model()), **spec}), encoding="utf-8")
        subprocess.run(
            [python, INSIDE / script, told, results],
            env=variables(Path(name), {"PYTHONPATH": ""}),
            cwd=name,
            check=True,
        )
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.judges.real", description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--count", type=int, help="prompts of each task; default: as the bench")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt")
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, help="tokens in a block")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS, help="shares of the prompt, 0 to 1")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument(
        "--fewer", type=int, default=Plan().fewer, help="divides the prompts of further lengths, blocks"
    )
    parser.add_argument("--release", default="0.32.0")
    chosen = parser.parse_args(arguments)
    tasks = {task: chosen.count or TASKS[task] for task in chosen.tasks}
    measure(chosen.release, Plan(tasks, chosen.lengths, chosen.blocks, chosen.budgets, chosen.rows, chosen.fewer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
