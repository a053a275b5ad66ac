"""Sparse drafts: how many are accepted, and what steps cost: `python -m tests.e2e.bench.drafts`.

Drafts of random weights are accepted by chance only, and a trained model of this size has little attention in a step.
So acceptance is measured on the trained model, times on one with random weights in which attention dominates, and what
a request gains is computed from both. Times are minima of the steps, as other programs only add to them.
"""

from __future__ import annotations

import argparse
import os
import shutil
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


@dataclass(frozen=True)
class Measured:
    """What was measured of a request.

    Attributes:
        length: The tokens of its prompt.
        budget: The tokens that a draft reads; 0 for a dense request.
        drafts: The drafts of a step.
        steps: As ``draft_steps.py`` tells them.
    """

    length: int
    budget: int
    drafts: int
    steps: Sequence[dict[str, Any]]

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


def figures(
    release: str, real: Sequence[int] = REAL, timed: Sequence[int] = TIMED, shares: Sequence[float] = SHARES
) -> Iterator[Figure]:
    """Measure, print the tables, yield the figures."""
    python = with_overlay(release).python
    accepted = [of for length in real for of in _accepted(release, python, length, shares)]
    console = Console(width=160)
    console.print(_acceptance(accepted))
    times = [of for length in timed for of in _timed(release, python, length, shares)]
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


def _accepted(release: str, python: Path, length: int, shares: Sequence[float]) -> list[Measured]:
    """Return what a trained model accepts: all prompts of a context together, by budget; and a dense request."""
    model, block = real_model(), 32
    texts = [
        HANDBOOK.read_text(encoding="utf-8"),
        *(path.read_text("utf-8") for path in sorted(ROOT.glob("docs/*.md"))),
    ]
    head, tail, *bodies = encode(python, model, [HEAD, TAIL.format(question=TASK), *texts])
    body = [token for each in bodies for token in each]
    room = length - len(head) - len(tail)
    prompts = [[*head, *body[number * room : (number + 1) * room], *tail] for number in range(PROMPTS)]
    engine = {"model": str(model), "block_size": block, "max_num_batched_tokens": 512, "dtype": "bfloat16"}
    dense = {"prompt": prompts[0], "count": ANSWER, "asked": False, "drafts": 0}
    drafted = [
        {
            "prompt": prompt,
            "count": ANSWER,
            "asked": {"token_budget": _budget(length, share, block)},
            "drafts": max(DRAFTS),
        }
        for share in shares
        for prompt in prompts
    ]
    found = _run(release, engine, length, PROMPTS, [dense, *drafted], skips_prompts=False)
    return [
        Measured(length, budget, drafts, [step for of in found if of.budget == budget for step in of.steps])
        for budget, drafts in dict.fromkeys((of.budget, of.drafts) for of in found)
    ]


def _timed(release: str, python: Path, length: int, shares: Sequence[float]) -> list[Measured]:
    """Return what steps cost in a model in which attention dominates; the first request warms it up."""
    sparse_model.write_model(python)
    block, prompt = sparse_model.block_size(length), sparse_model.prompt(length)
    engine = {**sparse_model.engine(length), "enable_prefix_caching": True}
    dense = {"prompt": prompt, "count": STEPS, "asked": False, "drafts": 0}
    drafted = [
        {"prompt": prompt, "count": STEPS, "asked": {"token_budget": _budget(length, share, block)}, "drafts": drafts}
        for share in shares
        for drafts in DRAFTS
    ]
    return _run(release, engine, length, 1, [dense, dense, *drafted], skips_prompts=True)[1:]


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
    longest = length + 2 * ANSWER
    blocks = prompts * -(-longest // engine["block_size"]) + 64
    options = {"min_context": 0, "dense_layers": 0 if skips_prompts else 2, "drafting": "always"}
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
        Measured(length, of["asked"]["token_budget"] if of["asked"] else 0, of["drafts"], of["steps"]) for of in found
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


def main() -> None:
    """Measure a part."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench.drafts", description=__doc__)
    parser.add_argument("--release", default=RELEASE)
    parser.add_argument("--real", type=int, nargs="*", default=REAL, metavar="TOKENS", help="contexts of real text")
    parser.add_argument("--timed", type=int, nargs="*", default=TIMED, metavar="TOKENS", help="contexts of timed steps")
    options = parser.parse_args()
    for figure in figures(options.release, options.real, options.timed):
        print(f"{figure.name}: {figure.value:.3f}")


if __name__ == "__main__":
    main()
