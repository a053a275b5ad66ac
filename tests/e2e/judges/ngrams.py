"""What n-grams save on a trained model, dense and with `BlockTopK`: `python -m tests.e2e.judges.ngrams`.

The model is asked to write paragraphs of a text again, so that n-grams of the text are good drafts. An engine with
drafts and one without answer the same prompts in each way in turns. No draft may change an answer, nor may `BlockTopK`
with a budget of the whole context.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.environment import with_overlay
from tests.e2e.judges.engines import engine
from tests.e2e.judges.real import MORE, paragraphs_of
from tests.e2e.real.chat import HANDBOOK
from tests.e2e.real.model import real_model
from tests.e2e.real.text import HEAD, TAIL, encode
from tests.e2e.sparse_runs import run_script
from transforms.place import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHARE, ROUNDS, COUNT, LENGTH = 0.14, 3, 96, 4_000
#: How many paragraphs are to be written again; of each, the answer begins with so many tokens.
PROMPTS, BEGUN = 4, 12
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 5}
DENSE, ALL, SMALL = "dense", "BlockTopK, a budget of everything", f"BlockTopK, {SHARE:.0%}"


def prompts(python: Path, model: Path, length: int) -> list[list[int]]:
    """Return prompts of about a length, each of which ends within its answer."""
    paragraphs = paragraphs_of(HANDBOOK, *(ROOT / name for name in MORE))
    head, tail, *texts = encode(
        python,
        model,
        [HEAD, TAIL.format(question="Write one paragraph of the handbook again, word by word."), *paragraphs],
    )
    left = length - len(head) - len(tail) - BEGUN
    read = [of for of, end in zip(texts, accumulate(map(len, texts)), strict=True) if end <= left]
    text = list(chain.from_iterable(read))
    long = [of for of in read if len(of) > COUNT]
    return [[*head, *text, *tail, *of[:BEGUN]] for of in long[:: len(long) // PROMPTS][:PROMPTS]]


def measure(release: str, length: int, rounds: int, count: int) -> list[str]:
    """Return the lines of a table: tokens of a step, the share of drafts accepted, milliseconds per token."""
    environment, model = with_overlay(release), real_model()
    budget = round(SHARE * length)
    ways: dict[str, dict[str, Any]] = {
        DENSE: {"ucm_sparse": False},
        ALL: {"ucm_sparse": {"token_budget": 2 * length}},
        SMALL: {},
    }
    spec: dict[str, Any] = {
        "prompts": prompts(environment.python, model, length),
        "ways": ways,
        "rounds": rounds,
        "count": count,
        "engine": {
            **engine(length + count),
            "additional_config": {"ucm_sparse_config": {"BlockTopK": {"token_budget": budget, "min_context": 0}}},
        },
    }
    lines = ["| | tokens per step | drafts accepted | ms per token |", "|---|---|---|---|"]
    answers: dict[tuple[str, int], list[int]] = {}
    with tempfile.TemporaryDirectory() as name:
        for drafts in (None, NGRAM):
            given = {**spec, "engine": {**spec["engine"], "speculative_config": drafts}}
            told = run_script(
                environment,
                Path(name, "drafts" if drafts else "none"),
                "repeating.py",
                given,
                VLLM_ENABLE_V1_MULTIPROCESSING="1",
            )
            for way in ways:
                mine = [one for one in told if one["name"] == way]
                for one in mine:
                    key = DENSE if way == ALL else way, one["prompt"]
                    if answers.setdefault(key, one["tokens"]) != one["tokens"]:
                        raise ValueError(f"another answer: {way}, prompt {one['prompt']}, drafts: {drafts}")
                lines.append(f"| {way}{', drafts' if drafts else ''} | {_cells(mine)} |")
    return lines


def _cells(answers: Sequence[Mapping[str, Any]]) -> str:
    steps = sum(len(one["steps"]) for one in answers)
    tokens = sum(len(one["tokens"]) - 1 for one in answers)
    drafted, accepted = (sum(one[what] for one in answers) for what in ("drafted", "accepted"))
    share = f"{accepted / drafted:.0%}" if drafted else ""
    times = sorted(1e3 * sum(one["steps"]) / (len(one["tokens"]) - 1) for one in answers)
    return f"{tokens / steps:.2f} | {share} | {statistics.median(times):.1f} ({times[0]:.1f} to {times[-1]:.1f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.judges.ngrams", description=__doc__)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--count", type=int, default=COUNT, help="tokens of an answer")
    parser.add_argument("--release", default="0.32.0")
    chosen = parser.parse_args(arguments)
    print(*measure(chosen.release, chosen.length, chosen.rounds, chosen.count), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
