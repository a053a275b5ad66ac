"""Time to first token of a trained model for prompts of real text, ours beside peers: `python -m tests.e2e.bench.real`.

The prompts are a handbook and what follows it; each begins with a line of its own, so none is a prefix of another. The
engines run in float32, and the answers of all sides are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
from itertools import product
from typing import TYPE_CHECKING

from tests.e2e.bench.peers import EXAMPLE, NO_CONNECTOR, OFFLOADING_FS, OURS, OURS_CHUNKS
from tests.e2e.bench.ttft import RELEASE, compared
from tests.e2e.bench.ttft_model import BLOCK, COMPUTED, Workload
from tests.e2e.bench.ttft_quiet import ALL
from tests.e2e.bench.ttft_results import Results
from tests.e2e.bench.ttft_stages import RESTART, SHORT
from tests.e2e.environment import plain
from tests.e2e.real.chat import HANDBOOK
from tests.e2e.real.model import real_model
from tests.e2e.real.text import HEAD, encode
from transforms.place import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.e2e.bench.figure import Figure

LENGTHS = (512, 2048, 3968, 4992)
ROUNDS = 3
GROUP = (NO_CONNECTOR, OURS, EXAMPLE, OFFLOADING_FS)
#: Blocks alone beside chunks of them.
CHUNKS = (NO_CONNECTOR, OURS, OURS_CHUNKS)
#: Tokens of each answer.
ANSWER = 16
#: Keys and values of a token: 30 layers of 3 heads of 64 values in float32.
TOKEN_BYTES = 2 * 4 * 30 * 3 * 64
#: Room for one prompt of each length, and for the one that is asked.
TOKENS = sum(LENGTHS) + max(LENGTHS) + 16 * BLOCK
LONGEST = max(LENGTHS) + 2 * BLOCK


def figures(
    release: str,
    rounds: int = ROUNDS,
    lengths: Sequence[int] = LENGTHS,
    patience: float = ALL,
    group: Sequence[str] = GROUP,
    block: int = BLOCK,
) -> Iterator[Figure]:
    """Measure all sides, print the tables, yield the figures that have a goal."""
    results = Results(list(lengths), workload(release, rounds, lengths, block))
    for figure in compared(results, release, rounds, [group], (RESTART,), patience):
        yield dataclasses.replace(figure, name=f"real text: {figure.name}")


def workload(release: str, rounds: int, lengths: Sequence[int], block: int = BLOCK) -> Workload:
    """Return the model and its prompts, all of which are encoded here."""
    model, python = real_model(), plain(release).python
    text = HANDBOOK.read_text(encoding="utf-8") + (ROOT / "LICENSE").read_text(encoding="utf-8")
    names = [("short", SHORT), *product(map(str, range(rounds + 1)), lengths)]
    body, *firsts = encode(python, model, [text, *(f"{HEAD}Copy {name} of {length}.\n\n" for name, length in names)])
    if len(body) < max(lengths):
        raise ValueError(f"the text has {len(body)} tokens, fewer than the longest prompt of {max(lengths)}")
    prompts = {
        (length, name): [*first, *body][: length + COMPUTED]
        for (name, length), first in zip(names, firsts, strict=True)
    }
    engine = {
        "model": str(model),
        "dtype": "float32",
        "block_size": block,
        "num_gpu_blocks_override": TOKENS // block,
        "kv_cache_memory_bytes": TOKENS * TOKEN_BYTES,
        "max_model_len": LONGEST,
        "max_num_batched_tokens": LONGEST,
    }
    return Workload("real", engine, TOKEN_BYTES * block, lambda length, name: prompts[length, name], ANSWER, block)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a part."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench.real", description=__doc__)
    parser.add_argument("--release", default=RELEASE)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, choices=LENGTHS, metavar="TOKENS")
    parser.add_argument("--patience", type=float, default=ALL, help="seconds of waiting for a quiet machine, in all")
    parser.add_argument("--block-size", type=int, default=BLOCK, help=f"tokens of a block, default {BLOCK}")
    parser.add_argument("--chunks", action="store_true", help="measure ours with chunks in place of the peers")
    options = parser.parse_args(arguments)
    # A bench that is stopped ends its engines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen = (options.lengths, options.patience, CHUNKS if options.chunks else GROUP, options.block_size)
    for figure in figures(options.release, options.rounds, *chosen):
        met = {True: "met", False: "missed", None: ""}[figure.met]
        print(f"{figure.name}: {figure.value:.3f}, goal {figure.goal}: {met}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
