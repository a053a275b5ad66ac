"""What a trained model still knows beyond its trained length: `python -m tests.e2e.judges.beyond`.

One text of up to 16,000 tokens is computed by each way to see distances: its next tokens' loss, and the codes of things
that the text named, asked for at several lengths. `inside/real_beyond.py` says how. Two rows show the least that one
may ask for: the text's newest 4,000 to 8,000 tokens alone, and the codes that these hold at best. The ideal is the
model within its trained length.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tests.e2e.environment import with_overlay
from tests.e2e.judges.real import DIRECTORY, DOORS, MORE, code, paragraphs_of, run_judge
from tests.e2e.real.chat import HANDBOOK
from tests.e2e.real.model import real_model
from tests.e2e.real.text import HEAD, TAIL, encode
from transforms.place import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

TRAINED = 8_192
#: Where the loss of a part of the text ends, and where codes are asked for; the first part has no loss of its own.
PLACES = (4_000, 8_000, 12_000, 16_000)
HEAD_SIZE = 64
#: How many times longer contexts get than the trained length; NTK-aware scaling turns the slowest pair no further.
LONGER = 2.0
NTK = {"base": 100_000.0 * LONGER ** (HEAD_SIZE / (HEAD_SIZE - 2))}
YARN = {"yarn": LONGER, "trained": TRAINED}
WAYS: dict[str, dict[str, Any]] = {
    "RoPE": {},
    "ReRoPE, window 2,048": {"window": 2_048},
    "NTK": NTK,
    "ReRoPE, window 4,096": {"window": 4_096},
    "YaRN": YARN,
    "ReRoPE, window 2,048, log-n": {"window": 2_048, "trained": TRAINED},
}
NEWEST = "the newest 4,000 to 8,000 tokens alone"
AT_BEST = "codes in the newest 8,192 tokens"
#: Still more real text.
FURTHER = (*MORE, "docs/prefix_cache.md", "docs/store.md", "docs/blend.md")
THINGS = [f"{color} {thing}" for thing in ("door", "gate") for color in DOORS]


def asked_text(
    python: Path, model: Path, places: Sequence[int]
) -> tuple[list[int], dict[int, list[dict[str, Any]]], set[int], list[int]]:
    """Return a text in which codes are hidden at even depths.

    Args:
        python: The interpreter of an environment with vLLM.
        model: The model.
        places: The first of `PLACES`; the text ends at the last one.

    Returns:
        Its tokens; by place, the questions for all codes before it; the positions of hidden tokens; and the positions
        where the codes end.
    """
    chance = random.Random("beyond")  # noqa: S311 - no secret
    codes = {thing: code(chance) for thing in chance.sample(THINGS, len(THINGS))}
    paragraphs = paragraphs_of(HANDBOOK, *(ROOT / name for name in FURTHER))
    said = [f"The code of the {thing} is {of}.\n\n" for thing, of in codes.items()]
    questions = [TAIL.format(question=f"What is the code of the {thing}?") for thing in codes]
    begins = [f"The code of the {thing} is " for thing in codes]
    texts = encode(python, model, [HEAD, *paragraphs, *said, *questions, *begins, *codes.values()])
    head, rest = texts[0], texts[1 + len(paragraphs) :]
    parts = [rest[place : place + len(codes)] for place in range(0, len(rest), len(codes))]
    tokens, hidden, ends = list(head), set[int](), list[int]()
    for paragraph in texts[1 : 1 + len(paragraphs)]:
        if len(ends) < len(codes) and len(tokens) >= (len(ends) + 0.5) / len(codes) * places[-1]:
            sentence = parts[0][len(ends)]
            hidden.update(range(len(tokens), len(tokens) + len(sentence)))
            tokens += sentence
            ends.append(len(tokens))
        tokens += paragraph
    if len(tokens) < places[-1]:
        raise ValueError(f"the text has only {len(tokens)} tokens")
    asked = {
        place: [
            {"tail": tail, "answer": [*begin, *of], "begin": len(begin)}
            for tail, begin, of, end in zip(*parts[1:], ends, strict=True)
            if end <= place
        ]
        for place in places[1:]
    }
    return tokens[: places[-1]], asked, hidden, ends


def measure(python: Path, ways: Mapping[str, Mapping[str, Any]], places: Sequence[int] = PLACES) -> list[str]:
    """Return the lines of a table, and keep the numbers.

    Args:
        python: The interpreter of an environment with vLLM and the runtime.
        ways: Some of `WAYS`.
        places: The first of `PLACES`, at least three.
    """
    model = real_model()
    tokens, asked, hidden, ends = asked_text(python, model, places)
    runs: list[dict[str, Any]] = [
        {"name": name, "way": way, "begin": 0, "end": places[-1], "asked": asked} for name, way in ways.items()
    ]
    runs += [{"name": NEWEST, "way": {}, "begin": place - places[0], "end": end} for place, end in pairwise(places[1:])]
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    found = told(python, tokens, runs, DIRECTORY / "beyond.jsonl")
    return table(found, hidden, ends, places)


def told(python: Path, tokens: Sequence[int], runs: Sequence[Mapping[str, Any]], results: Path) -> list[dict[str, Any]]:
    """Return what `inside/real_beyond.py` says of some runs.

    Args:
        python: The interpreter of an environment with vLLM and the runtime.
        tokens: The text.
        runs: ``name``, ``way`` (see `WAYS`), ``begin`` and ``end`` in the text; and ``asked``, if anything is.
        results: A file, which has the results of each run as soon as it has ended.
    """
    results.unlink(missing_ok=True)
    return run_judge(python, "real_beyond.py", {"tokens": list(tokens), "runs": list(runs)}, results)


def table(
    found: Sequence[Mapping[str, Any]], hidden: set[int], ends: Sequence[int], places: Sequence[int] = PLACES
) -> list[str]:
    """Return the lines of a table of the docs: the loss of each part of the text, then the codes found at each place.

    Args:
        found: What `inside/real_beyond.py` says of each run.
        hidden: The positions of tokens whose loss does not count.
        ends: Where the codes end.
        places: As of `measure`.
    """
    parts = list(pairwise(places))
    heads = [f"loss, {begin:,} to {end:,}" for begin, end in parts]
    heads += [f"codes at {place:,}, of {sum(end <= place for end in ends)}" for place in places[1:]]
    rows: dict[str, list[str]] = {NEWEST: [""] * len(heads)}
    at_best = [str(sum(place - TRAINED < end <= place for end in ends)) for place in places[1:]]
    rows[AT_BEST] = [*[""] * len(parts), *at_best]
    for one in found:
        cells = rows.setdefault(one["name"], [""] * len(heads))
        losses = {at: loss for at, loss in enumerate(one["losses"], one["begin"] + 1) if at not in hidden}
        for column, (begin, end) in enumerate(parts):
            own = [loss for at, loss in losses.items() if begin <= at < end]
            if own and begin >= one["begin"] + places[0]:
                cells[column] = f"{statistics.mean(own):.3f}"
        for column, place in enumerate(places[1:], len(parts)):
            if one.get("right"):
                cells[column] = str(sum(one["right"][str(place)]))
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    return [*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.judges.beyond", description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--length", type=int, choices=PLACES[2:], default=PLACES[-1], help="tokens of the text")
    parser.add_argument("--release", default="0.32.0")
    chosen = parser.parse_args(arguments)
    ways, places = {name: WAYS[name] for name in chosen.ways}, PLACES[: PLACES.index(chosen.length) + 1]
    print(*measure(with_overlay(chosen.release).python, ways, places), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
