"""Eight clients whose prompts share long prefixes, on an engine whose own cache is too small for them.

Each side answers the same prompts in the same order, alone on the machine: requests per second, and the 99th percentile
and the median of the time to the first token, beside those of an engine without a connector. The prompts belong to
families; one shares 50, 70 or 90 % of its tokens with the others of its family. `python -m tests.e2e.bench.crowd`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.peers import (
    EXAMPLE,
    LMCACHE_FS,
    LMCACHE_SHM,
    NO_CONNECTOR,
    OFFLOADING_DRAM,
    OFFLOADING_FS,
    OURS,
    OURS_CACHE,
    Place,
    make_setup,
)
from tests.e2e.bench.ttft_engine import EngineFailedError
from tests.e2e.bench.ttft_model import BLOCK, BLOCK_BYTES, VOCABULARY, kv_bytes, write_model
from tests.e2e.bench.ttft_quiet import Others, Quiet
from tests.e2e.bench.ttft_side import Side
from tests.e2e.environment import plain
from transforms.pipeline.package import BUILD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIDES = (NO_CONNECTOR, OURS, OURS_CACHE, EXAMPLE, OFFLOADING_DRAM, OFFLOADING_FS, LMCACHE_FS, LMCACHE_SHM)
CLIENTS, REQUESTS, ANSWER = 8, 64, 8
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


def prompts(count: int) -> list[list[int]]:
    """Return prompts in the order in which they are sent; always the same for a count."""
    source = random.Random("crowd")  # noqa: S311 - prompts, no secrets
    families = [_tokens(source, LENGTH) for _ in range(FAMILIES)]
    found = []
    for _ in range(count):
        shared = int(LENGTH * source.choice(SHARED))
        found.append([*source.choice(families)[:shared], *_tokens(source, LENGTH - shared + 2)])
    return found


def _tokens(source: random.Random, count: int) -> list[int]:
    return [source.randrange(3, VOCABULARY) for _ in range(count)]


def figures(release: str, sides: Sequence[str] = SIDES, count: int = REQUESTS) -> Iterator[Figure]:
    """Measure the sides one after the other, print a table, and compare ours with each peer."""
    write_model(plain(release).python)
    root = BUILD / "bench" / "crowd"
    shutil.rmtree(root, ignore_errors=True)
    found: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(sides):
        key = f"ucm-crowd-{os.getpid()}-{number}"
        place = Place(
            root / str(number) / "store", SHARED_MEMORY / key, key, PORTS + 10 * number, count * kv_bytes(LENGTH)
        )
        try:
            found[name] = _measure(release, name, place, root / str(number), prompts(count))
        except (EngineFailedError, subprocess.CalledProcessError) as error:
            print(f"{name}: {error}", file=sys.stderr)
    _show(found)
    ours = found.get(OURS)
    for name, of in found.items():
        if ours is not None and name not in {OURS, OURS_CACHE}:
            detail = {"ours": ours, "theirs": of}
            yield Figure(f"{OURS}: seconds, beside {name}", ours["seconds"] / of["seconds"], "", 1.0, detail)
            yield Figure(f"{OURS}: p99 to the first token, beside {name}", ours["p99"] / of["p99"], "", 1.0, detail)


def _measure(release: str, name: str, place: Place, scratch: Path, asked: list[list[int]]) -> dict[str, Any]:
    side = Side(make_setup(name, release, place), place, scratch, Quiet())
    try:
        side.start(**ENGINE)
        side.engine.crowd(1, ANSWER, [asked[0][:BLOCK]], PATIENCE)  # what is compiled at the first request
        side.quiet.wait()
        others = Others([side.engine.process.pid])
        answered = side.engine.crowd(CLIENTS, ANSWER, asked, PATIENCE)
        share, _ = others.used()
    finally:
        side.close()
    first = [one["seconds"] for one in answered["answers"]]
    cached = sum(one["cached"] for one in answered["answers"])
    return {
        "seconds": answered["seconds"],
        "p50": statistics.median(first),
        "p99": statistics.quantiles(first, n=100, method="inclusive")[98],
        "cached": cached / sum(map(len, asked)),
        "tokens": [one["tokens"] for one in answered["answers"]],
        "others": share,
    }


def _show(found: dict[str, dict[str, Any]]) -> None:
    """Print a row for each side; in bfloat16, tokens may differ where batches differ."""
    table = Table(
        "side", "requests/s", "p50 s", "p99 s", "tokens not computed", "first tokens as without", "others' CPU"
    )
    wanted = found.get(NO_CONNECTOR, {}).get("tokens", [])
    for name, of in found.items():
        same = sum(a[0] == b[0] for a, b in zip(of["tokens"], wanted, strict=bool(wanted)))
        rate = len(of["tokens"]) / of["seconds"]
        cells = (f"{rate:.2f}", f"{of['p50']:.2f}", f"{of['p99']:.2f}", f"{of['cached']:.0%}")
        table.add_row(name, *cells, f"{same} of {len(of['tokens'])}", f"{of['others']:.0%}")
    Console(width=140).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure some sides."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench.crowd", description=__doc__)
    parser.add_argument("--release", default="0.32.0")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--only", nargs="+", help="some of the sides")
    options = parser.parse_args(arguments)
    sides = [name for name in SIDES if not options.only or name in options.only]
    for figure in figures(options.release, sides, options.requests):
        print(f"{figure.name}: {figure.value:.3f}, goal {figure.goal}: {'met' if figure.met else 'missed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
