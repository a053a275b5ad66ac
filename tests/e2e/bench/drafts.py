"""Sparse drafts: how many are accepted, and what steps cost: `python -m tests.e2e.bench.drafts`.

Drafts of random weights are accepted by chance only, and a trained model of this size has little attention in a step.
So acceptance is measured on the trained model, times on one with random weights in which attention dominates, and what
a request gains is computed from both. Times are minima of the steps, as other programs only add to them.

Then whole answers are timed, dense and drafted ones in turns: of a model with random weights whose attention adds so
little to the hidden states that drafts are accepted about as often as by the trained model; and of the trained one,
where drafts do not pay.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.e2e.bench import sparse_model
from tests.e2e.bench.figure import Figure
from tests.e2e.environment import with_overlay
from tests.e2e.real.chat import HANDBOOK
from tests.e2e.real.model import real_model
from tests.e2e.real.text import HEAD, TAIL, encode
from tests.e2e.sparse_runs import run_script
from transforms.place import BUILD, ROOT
from ucm.sparse.topk.drafts import CUSTOM, DRAFTER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

RELEASE = "0.32.0"
#: Contexts and shares of them that a draft reads; drafts per step.
REAL, TIMED, SHARES, DRAFTS = (2_048, 7_900), (16_384, 32_768), (0.05, 0.1), (2, 4, 8)
#: Tokens of an answer, prompts of a context, and tokens generated to time steps.
ANSWER, PROMPTS, STEPS = 64, 2, 40
TASK = "Summarise the text above in several paragraphs."
#: Whole answers: contexts of either model, tokens of an answer, turns, the share that a draft reads, and drafts.
WHOLE, SHORT, WHOLE_ANSWER, ROUNDS, WHOLE_SHARE, WHOLE_DRAFTS = (16_384, 32_768), (2_048, 7_900), 128, 3, 0.1, 4
#: What attention adds in the model of whole answers, as a multiple of what it adds in the model of steps.
ATTENTION = 0.03
#: An answer whose drafts are made as they pay may take this many times as long as a dense one.
SLOWEST = 1 / 0.97
DENSE, UP_TO = "dense", "up to "


@dataclass(frozen=True)
class Measured:
    """What was measured of a request.

    Attributes:
        length: The tokens of its prompt.
        budget: The tokens that a draft reads; 0 for a dense request.
        drafts: The most drafts of a step.
        measured: Whether only those are made that pay.
        steps: As ``draft_steps.py`` tells them.
    """

    length: int
    budget: int
    drafts: int
    measured: bool
    steps: Sequence[dict[str, Any]]

    @property
    def way(self) -> str:
        """How the answer was made."""
        return f"{UP_TO * self.measured}{self.drafts} drafts" if self.budget else DENSE

    def tokens(self, drafts: int) -> float:
        """The mean of the tokens that a step generates if it verifies so many of its drafts."""
        found = [min(int(step["tokens"]), drafts + 1) for step in self.steps if step["drafts"] == self.drafts]
        return sum(found) / len(found)

    @property
    def step(self) -> float:
        """The seconds of a step that verifies all drafts, without those in which drafts are made."""
        return float(min(step["step"] for step in self.steps if step["drafts"] == self.drafts))

    @property
    def making(self) -> float:
        """The seconds in which the drafts of a step are made."""
        return float(min(step["making"] for step in self.steps if step["making"]))

    @property
    def seconds(self) -> float:
        """The seconds of each token after the first one."""
        return float(sum(step["step"] + step["making"] for step in self.steps) / self._generated)

    @property
    def busy(self) -> float:
        """The same in seconds of the processor, to which other programs add little."""
        return float(sum(step["busy"] for step in self.steps) / self._generated)

    @property
    def _generated(self) -> int:
        return sum(int(step["tokens"]) for step in self.steps)


def figures(
    release: str,
    real: Sequence[int] = REAL,
    timed: Sequence[int] = TIMED,
    whole: Sequence[int] = WHOLE,
    short: Sequence[int] = SHORT,
    attention: float = ATTENTION,
) -> Iterator[Figure]:
    """Measure, print the tables, yield the figures."""
    python = with_overlay(release).python
    accepted = [of for length in real for of in _accepted(release, python, length)]
    console = Console(width=160)
    console.print(_acceptance(accepted))
    times = [of for length in timed for of in _timed(release, python, length)]
    chances = {(of.length, of.budget / of.length): of for of in accepted if of.budget}
    table = Table("tokens", "share", "drafts", "dense ms", "verify", "a draft", "tokens per step", "gain")
    for of in times:
        dense = next(one.step for one in times if one.length == of.length and not one.budget)
        if not of.budget:
            continue
        like = min(chances, key=lambda key: (abs(key[1] - of.budget / of.length), -key[0]))
        tokens = chances[like].tokens(of.drafts)
        gain = tokens * dense / (of.step + of.making)
        share = of.budget / of.length
        numbers = f"{of.step / dense:.2f}", f"{of.making / of.drafts / dense:.2f}", f"{tokens:.2f}", f"{gain:.2f}"
        table.add_row(f"{of.length:,}", f"{share:.0%}", str(of.drafts), f"{1000 * dense:.1f}", *numbers)
        name = f"{of.length} tokens, {share:.0%}, {of.drafts} drafts: dense decoding to drafts"
        yield Figure(name, 1 / gain, "", None, {"dense": dense, "verify": of.step, "making": of.making})
    console.print(table)
    for model, answers in (
        ("random weights", [_whole(release, sparse_model.write_model(python, attention), of) for of in whole]),
        ("trained", [_whole_of_real(release, python, of) for of in short]),
    ):
        console.print(_wholes(model, answers))
        for told in answers:
            for way, turns in by_way(told).items():
                ratio = statistics.median(of.seconds / dense.seconds for dense, of in turns)
                name = f"{model}, {told[0].length} tokens, {way}: time of a whole answer to that of a dense one"
                goal = SLOWEST if way.startswith(UP_TO) else None
                yield Figure(name, ratio, "", goal, {"by processor": _by_processor(turns)})


def by_way(answers: Sequence[Measured]) -> dict[str, list[tuple[Measured, Measured]]]:
    """Return by way, of each turn, the dense answer and the drafted one."""
    found: dict[str, list[Measured]] = {}
    for of in answers:
        found.setdefault(of.way, []).append(of)
    dense = found.pop(DENSE)
    return {way: list(zip(dense, of, strict=True)) for way, of in found.items()}


def _by_processor(turns: Sequence[tuple[Measured, Measured]]) -> float:
    return statistics.median(of.busy / dense.busy for dense, of in turns)


def _accepted(release: str, python: Path, length: int) -> list[Measured]:
    """Return what a trained model accepts: all prompts of a context together, by budget; and a dense request."""
    prompts, budgets = _real_prompts(python, length, PROMPTS), [_budget(length, share, 32) for share in SHARES]
    drafted = [_request(prompt, ANSWER, budget, max(DRAFTS)) for budget in budgets for prompt in prompts]
    requests = [_request(prompts[0], ANSWER), *drafted]
    found = _run(release, _real_engine(), length, PROMPTS, requests, skips_prompts=False)
    steps: dict[int, list[dict[str, Any]]] = {}
    for of in found:
        steps.setdefault(of.budget, []).extend(of.steps)
    return [Measured(length, budget, max(DRAFTS), False, of) for budget, of in steps.items()]


def _timed(release: str, python: Path, length: int) -> list[Measured]:
    """Return what steps cost in a model in which attention dominates; the first request warms it up."""
    sparse_model.write_model(python)
    block, prompt = sparse_model.block_size(length), sparse_model.prompt(length)
    dense = _request(prompt, STEPS)
    budgets = [_budget(length, share, block) for share in SHARES]
    drafted = [_request(prompt, STEPS, budget, drafts) for budget in budgets for drafts in DRAFTS]
    found = _run(release, sparse_model.engine(length), length, 1, [dense, dense, *drafted], skips_prompts=True)
    return found[1:]


def _whole(release: str, model: Path, length: int) -> list[Measured]:
    """Return answers of a model with random weights in turns: dense, with drafts, and with drafts as they pay."""
    budget, prompt = _budget(length, WHOLE_SHARE, sparse_model.block_size(length)), sparse_model.prompt(length)
    ways = [
        _request(prompt, WHOLE_ANSWER),
        _request(prompt, WHOLE_ANSWER, budget, WHOLE_DRAFTS),
        _request(prompt, WHOLE_ANSWER, budget, max(DRAFTS), measured=True),
    ]
    engine = {**sparse_model.engine(length), "model": str(model)}
    return _run(release, engine, length, 1, _in_turns(ways), skips_prompts=True)[1:]


def _whole_of_real(release: str, python: Path, length: int) -> list[Measured]:
    """Return answers of the trained model in turns: dense, and with drafts as they pay."""
    [prompt] = _real_prompts(python, length, 1)
    budget = _budget(length, WHOLE_SHARE, 32)
    ways = [_request(prompt, WHOLE_ANSWER), _request(prompt, WHOLE_ANSWER, budget, max(DRAFTS), measured=True)]
    return _run(release, _real_engine(), length, 1, _in_turns(ways), skips_prompts=False)[1:]


def _in_turns(ways: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a request that warms up, and each one once per round, in alternating order."""
    rounds = [ways[:: 1 if number % 2 else -1] for number in range(ROUNDS)]
    return [{**ways[0], "count": STEPS}, *(way for each in rounds for way in each)]


def _request(
    prompt: list[int], count: int, budget: int = 0, drafts: int = 0, *, measured: bool = False
) -> dict[str, Any]:
    """Return a request of `draft_steps.py`; a dense one without a budget."""
    asked = {"token_budget": budget} if budget else False
    return {"prompt": prompt, "count": count, "asked": asked, "drafts": drafts, "measured": measured}


def _real_prompts(python: Path, length: int, count: int) -> list[list[int]]:
    texts = [
        HANDBOOK.read_text(encoding="utf-8"),
        *(path.read_text("utf-8") for path in sorted(ROOT.glob("docs/*.md"))),
    ]
    head, tail, *bodies = encode(python, real_model(), [HEAD, TAIL.format(question=TASK), *texts])
    body = [token for each in bodies for token in each]
    room = length - len(head) - len(tail)
    return [[*head, *body[number * room : (number + 1) * room], *tail] for number in range(count)]


def _real_engine() -> dict[str, Any]:
    return {"model": str(real_model()), "block_size": 32, "max_num_batched_tokens": 512, "dtype": "bfloat16"}


def _budget(length: int, share: float, block: int) -> int:
    """Tokens of a share, but room for sinks, recent blocks and one to choose."""
    return max(int(length * share), 5 * block)


def _run(
    release: str,
    engine: dict[str, Any],
    length: int,
    prompts: int,
    requests: list[dict[str, Any]],
    *,
    skips_prompts: bool,
) -> list[Measured]:
    longest = length + max(request["count"] for request in requests) + 2 * max(DRAFTS)
    blocks = prompts * -(-longest // engine["block_size"]) + 64
    options = {"min_context": 0, "dense_layers": 0 if skips_prompts else 2}
    settings = {
        "max_model_len": longest,
        "num_gpu_blocks_override": blocks,
        "max_num_seqs": 1,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "seed": 0,
        "additional_config": {"ucm_sparse_config": {"SparseDrafts": options}},
        "speculative_config": {"method": CUSTOM, "model": DRAFTER, "num_speculative_tokens": max(DRAFTS)},
    }
    directory = BUILD / "bench" / "drafts"
    shutil.rmtree(directory, ignore_errors=True)
    directory.parent.mkdir(parents=True, exist_ok=True)
    found = run_script(
        with_overlay(release),
        directory,
        "draft_steps.py",
        {"engine": {**engine, **settings}, "requests": requests, "skips_prompts": skips_prompts},
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1)),
    )
    return [
        Measured(length, of["asked"]["token_budget"] if of["asked"] else 0, of["drafts"], of["measured"], of["steps"])
        for of in found
    ]


def _acceptance(accepted: Sequence[Measured]) -> Table:
    """Return the tokens of a step by its drafts, and what steps with most of them cost beside dense ones."""
    counts = [f"{drafts} drafts" for drafts in DRAFTS]
    table = Table("tokens", "budget", *counts, "dense ms", "verify", "a draft", title="tokens per verifying step")
    for of in accepted:
        if of.budget:
            dense = next(one.step for one in accepted if one.length == of.length and not one.budget)
            times = f"{1000 * dense:.1f}", f"{of.step / dense:.2f}", f"{of.making / of.drafts / dense:.2f}"
            tokens = (f"{of.tokens(drafts):.2f}" for drafts in DRAFTS)
            table.add_row(f"{of.length:,}", f"{of.budget:,}", *tokens, *times)
    return table


def _wholes(model: str, answers: Sequence[Sequence[Measured]]) -> Table:
    """Return how long a token took, how much faster drafts were, and what their steps alone promised."""
    heads = "tokens", "way", "dense ms", "ms", "drafts per step", "accepted", "gain", "by processor", "computed"
    table = Table(*heads, title=f"whole answers: {model}")
    for told in answers:
        for way, turns in by_way(told).items():
            mine = [step for _, of in turns for step in of.steps]
            judged = [step for step in mine if step["drafts"]]
            drafted = sum(step["drafts"] for step in judged)
            share = f"{sum(step['tokens'] - 1 for step in judged) / drafted:.0%}" if drafted else ""
            gains = sorted(dense.seconds / of.seconds for dense, of in turns)
            gain = f"{statistics.median(gains):.2f}, {gains[0]:.2f} to {gains[-1]:.2f}"
            times = (f"{1000 * statistics.median(of.seconds for of in side):.1f}" for side in zip(*turns, strict=True))
            computed = "" if way.startswith(UP_TO) else f"{promised(told, way):.2f}"
            numbers = f"{drafted / len(mine):.1f}", share, gain, f"{1 / _by_processor(turns):.2f}", computed
            table.add_row(f"{told[0].length:,}", way, *times, *numbers)
    return table


def promised(answers: Sequence[Measured], way: str) -> float:
    """Return the gain of a way whose steps verify as many drafts, by its fastest steps and what was accepted."""
    mine = [of for of in answers if of.way == way]
    steps = [step for of in mine for step in of.steps]
    of = Measured(mine[0].length, mine[0].budget, mine[0].drafts, measured=False, steps=steps)
    return of.tokens(of.drafts) * min(one.step for one in answers if one.way == DENSE) / (of.step + of.making)


def main() -> None:
    """Measure a part."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench.drafts", description=__doc__)
    parser.add_argument("--release", default=RELEASE)
    parser.add_argument("--real", type=int, nargs="*", default=REAL, metavar="TOKENS", help="contexts of real text")
    parser.add_argument("--timed", type=int, nargs="*", default=TIMED, metavar="TOKENS", help="contexts of timed steps")
    parser.add_argument(
        "--whole", type=int, nargs="*", default=WHOLE, metavar="TOKENS", help="contexts of whole answers"
    )
    parser.add_argument(
        "--short", type=int, nargs="*", default=SHORT, metavar="TOKENS", help="those of the trained model"
    )
    parser.add_argument("--attention", type=float, default=ATTENTION, help="what it adds in the model of whole answers")
    of = parser.parse_args()
    for figure in figures(of.release, of.real, of.timed, of.whole, of.short, of.attention):
        print(f"{figure.name}: {figure.value:.3f}")


if __name__ == "__main__":
    main()
