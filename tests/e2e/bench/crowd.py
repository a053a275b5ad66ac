"""Eight clients whose prompts share long prefixes, on an engine whose own cache is too small for them.

Requests per second, and the median and 99th percentile of the time to the first token, beside those of an engine
without a connector and with the connectors of others. The prompts belong to families; one shares 50, 70 or 90 % of its
tokens with the others of its family. All sides of a group get the same prompts in the same order, a part of them in
each turn; only one side works at a time. `python -m tests.e2e.bench.crowd`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.peers import GROUPS, NO_CONNECTOR, OURS, Place, make_setup
from tests.e2e.bench.ttft_engine import EngineFailedError
from tests.e2e.bench.ttft_model import BLOCK, BLOCK_BYTES, VOCABULARY, write_model
from tests.e2e.bench.ttft_quiet import Quiet
from tests.e2e.bench.ttft_side import Side
from tests.e2e.environment import plain
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CLIENTS, ANSWER = 8, 8
#: The groups of sides: each of the others, without variants.
OTHERS = GROUPS[:2]
#: Requests of each side in one turn, and turns.
REQUESTS, TURNS = CLIENTS, 8
#: Tokens of each prompt beside the few that are always computed, and families of prompts.
LENGTH, FAMILIES = 2_304, 8
SHARED = (0.5, 0.7, 0.9)
#: Room for the requests of all clients, and little more: the families alone have 144 blocks.
BLOCKS = CLIENTS * (LENGTH // BLOCK + 2)
#: Every prompt is one step's: ExampleConnector saves wrong blocks otherwise.
ENGINE: dict[str, Any] = {
    "num_gpu_blocks_override": BLOCKS,
    "kv_cache_memory_bytes": BLOCKS * BLOCK_BYTES,
    "max_model_len": LENGTH + BLOCK,
    "max_num_batched_tokens": CLIENTS * (LENGTH + BLOCK),
    "max_num_seqs": CLIENTS,
}
PATIENCE = 1_800.0
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - what some sides keep there is deleted at the end
PORTS = 5_900


@dataclass
class Served:
    """What one side did in all of its turns.

    Attributes:
        seconds: Of each turn.
        first: To the first token, of each request.
        cached: Tokens of all prompts that were not computed.
        tokens: The answers.
        others: The share of all processors that others used, 0 to 1, of each turn.
        load: The machine's load average after each turn.
    """

    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    cached: int = 0
    tokens: list[list[int]] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.first) / sum(self.seconds)

    @property
    def p99(self) -> float:
        """The 99th percentile of the seconds to the first token."""
        return statistics.quantiles(self.first, n=100, method="inclusive")[98]


def prompts(count: int) -> list[list[int]]:
    """Return prompts in the order in which they are sent; always the same for a count."""
    source = random.Random("crowd")  # noqa: S311 - prompts, no secrets
    families = [_tokens(source, LENGTH) for _ in range(FAMILIES)]
    found = []
    for _ in range(count):
        shared = int(LENGTH * source.choice(SHARED))
        found.append([*source.choice(families)[:shared], *_tokens(source, LENGTH - shared + 2)])
    return found


def stored_bytes(asked: Sequence[Sequence[int]]) -> int:
    """Return the bytes of all different blocks of some prompts."""
    return len({tuple(one[:end]) for one in asked for end in range(BLOCK, LENGTH + 1, BLOCK)}) * BLOCK_BYTES


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(3, VOCABULARY) for _ in range(count)]


def figures(release: str, turns: int = TURNS, groups: Sequence[Sequence[str]] = OTHERS) -> Iterator[Figure]:
    """Measure each group, print its table, and compare our side with each other one of its group."""
    write_model(plain(release).python)
    kept: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        failures: dict[str, str] = {}
        found = measure(release, number, group, turns, failures)
        kept.append({"served": {name: asdict(of) for name, of in found.items()}, "failures": failures})
        (BUILD / "bench" / "crowd.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
        show(found, failures)
        yield from compare(found)


def measure(release: str, number: int, group: Sequence[str], turns: int, failures: dict[str, str]) -> dict[str, Served]:
    """Serve all prompts by each side of a group, in turns; what fails is left out from there on."""
    root = BUILD / "bench" / "crowd" / str(number)
    shutil.rmtree(root, ignore_errors=True)
    asked = prompts(turns * REQUESTS)
    found: dict[str, Served] = {}
    with ExitStack() as cleanup:
        sides: dict[str, Side] = {}
        for index, name in enumerate(group):
            key = f"ucm-crowd-{os.getpid()}-{number}-{index}"
            scratch = root / str(index)
            place = Place(scratch / "store", SHARED_MEMORY / key, key, PORTS + 10 * index, stored_bytes(asked))
            try:
                side = Side(make_setup(name, release, place), place, scratch, Quiet())
                cleanup.callback(side.close)
                print(f"{name}: start", file=sys.stderr, flush=True)
                side.start(**ENGINE)
                side.engine.crowd(1, ANSWER, [asked[0][:BLOCK]], PATIENCE)  # what is compiled at the first request
            except (EngineFailedError, subprocess.CalledProcessError) as error:
                failures[name] = str(error)
            else:
                sides[name], found[name] = side, Served()
        for turn in range(turns):
            part = asked[turn * REQUESTS : (turn + 1) * REQUESTS]
            first = turn % len(group)
            for name in [*group[first:], *group[:first]]:
                if name in failures:
                    continue
                try:
                    _serve(sides[name], part, found[name])
                except EngineFailedError as error:
                    failures[name] = str(error)
                    sides[name].stop()
                    del found[name]
                else:
                    print(f"{turn} {name}: {found[name].seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    return found


def _serve(side: Side, part: list[list[int]], into: Served) -> None:
    others = side.others()
    answered = side.engine.crowd(CLIENTS, ANSWER, part, PATIENCE)
    share, _ = others.used()
    into.seconds.append(answered["seconds"])
    into.others.append(share)
    into.load.append(os.getloadavg()[0])
    for one in answered["answers"]:
        into.first.append(one["seconds"])
        into.tokens.append(one["tokens"])
        into.cached += one["cached"]


def compare(found: dict[str, Served]) -> Iterator[Figure]:
    """Yield our seconds and our 99th percentile over those of each other side of the group."""
    ours = found.get(OURS)
    for name, of in found.items():
        if ours is not None and name != OURS:
            each = [one / other for one, other in zip(ours.seconds, of.seconds, strict=True)]
            seconds = sum(ours.seconds) / sum(of.seconds)
            yield Figure(f"crowd: seconds, to {name}", seconds, "", 1.0, {"each turn": each})
            yield Figure(f"crowd: p99 to the first token, to {name}", ours.p99 / of.p99, "", 1.0)


def show(found: dict[str, Served], failures: dict[str, str]) -> None:
    """Print a row for each side; in bfloat16, tokens may differ where batches differ."""
    table = Table(
        "side", "requests/s", "p50 s", "p99 s", "tokens not computed", "first tokens as without", "others' CPU", "load"
    )
    wanted = found[NO_CONNECTOR].tokens if NO_CONNECTOR in found else []
    for name, of in found.items():
        same = sum(a[0] == b[0] for a, b in zip(of.tokens, wanted, strict=bool(wanted)))
        cells = (f"{of.rate:.3f}", f"{statistics.median(of.first):.2f}", f"{of.p99:.2f}")
        share = of.cached / (len(of.first) * (LENGTH + 2))
        meanwhile = (f"{statistics.mean(of.others):.0%}", f"{min(of.load):.1f} to {max(of.load):.1f}")
        table.add_row(name, *cells, f"{share:.0%}", f"{same} of {len(of.tokens)}", *meanwhile)
    console = Console(width=150)
    console.print(table)
    for name, why in failures.items():
        console.print(f"{name} failed: {why.strip().splitlines()[-1]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure some sides."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench.crowd", description=__doc__)
    parser.add_argument("--release", default="0.32.0")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of {REQUESTS} requests of each side")
    parser.add_argument("--groups", type=int, nargs="+", default=range(len(OTHERS)), help="by number, from 0")
    options = parser.parse_args(arguments)
    for figure in figures(options.release, options.turns, [GROUPS[number] for number in options.groups]):
        print(f"{figure.name}: {figure.value:.3f}, goal {figure.goal}: {'met' if figure.met else 'missed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
