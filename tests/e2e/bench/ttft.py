"""Time to first token with prefix-cache connectors, ours and peers, on a real vLLM: `python -m tests.e2e.bench.ttft`.

Arguments choose a part: lengths of prompts, rounds, groups of sides. The section ``ttft`` of the whole bench runs all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.bench.peers import GROUPS, NO_CONNECTOR, Place, make_setup
from tests.e2e.bench.ttft_model import RANDOM, write_model
from tests.e2e.bench.ttft_plain import PlainBytes
from tests.e2e.bench.ttft_quiet import ALL, Quiet
from tests.e2e.bench.ttft_results import Results, goals
from tests.e2e.bench.ttft_side import Side
from tests.e2e.bench.ttft_stages import RESTARTS, SHORT, Stages
from tests.e2e.bench.ttft_table import show
from tests.e2e.environment import plain
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.e2e.bench.figure import Figure

RELEASE = "0.32.0"
LENGTHS = (512, 2048, 4096)
ROUNDS = 3
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - what some sides keep there is deleted at the end
PORTS = 5700


def figures(
    release: str,
    lengths: Sequence[int] = LENGTHS,
    rounds: int = ROUNDS,
    groups: Sequence[Sequence[str]] = GROUPS,
    phases: Sequence[str] = RESTARTS,
    patience: float = ALL,
) -> Iterator[Figure]:
    """Measure every group, print the tables, yield the figures that have a goal."""
    write_model(plain(release).python)
    yield from compared(Results(list(lengths), RANDOM), release, rounds, groups, phases, patience)


def compared(
    results: Results,
    release: str,
    rounds: int,
    groups: Sequence[Sequence[str]],
    phases: Sequence[str],
    patience: float,
) -> Iterator[Figure]:
    """Measure every group with a workload, print the tables, yield the figures that have a goal."""
    quiet = Quiet(patience)
    for number, group in enumerate(groups):
        measure_group(results, quiet, release, (rounds, phases), (number, group))
        kept = BUILD / "bench" / f"{results.workload.name}.json"
        kept.write_text(json.dumps(results.as_dict(), indent=1), encoding="utf-8")
    show(results)
    yield from goals(results)


def measure_group(
    results: Results,
    quiet: Quiet,
    release: str,
    repeated: tuple[int, Sequence[str]],
    numbered: tuple[int, Sequence[str]],
) -> None:
    """Measure the sides of one group side by side."""
    (rounds, phases), (number, group) = repeated, numbered
    workload = results.workload
    root = BUILD / "bench" / workload.name / str(number)
    shutil.rmtree(root, ignore_errors=True)
    stored = (rounds + 1) * sum(map(workload.kv_bytes, results.lengths)) + workload.kv_bytes(SHORT)
    with ExitStack() as cleanup:
        sides = []
        for index, name in enumerate(group):
            key = f"ucm-bench-{os.getpid()}-{number}-{index}"
            place = Place(root / str(index) / "store", SHARED_MEMORY / key, key, PORTS + 10 * index, stored)
            try:
                setup = make_setup(name, release, place)
            except subprocess.CalledProcessError as error:
                results.failures[name] = f"its environment could not be made: {error}"
                continue
            side = Side(setup, place, root / str(index), quiet)
            cleanup.callback(side.close)
            sides.append(side)
        blocks = workload.kv_bytes(max(results.lengths)) // workload.block_bytes
        plainly = PlainBytes(root / "plain", blocks, workload.block_bytes)
        stages = Stages(workload, sides, plainly, lengths=results.lengths, rounds=rounds, phases=phases)
        results.add_group(stages.samples())
        results.failures |= stages.failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a part."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench.ttft", description=__doc__)
    parser.add_argument("--release", default=RELEASE)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens, multiples of the block size")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--groups", type=int, nargs="+", default=range(len(GROUPS)), help="by number, from 0")
    parser.add_argument("--only", nargs="+", help="of the sides in these groups; the one without a connector is added")
    parser.add_argument("--phases", nargs="*", default=RESTARTS, choices=RESTARTS, help="that begin with new engines")
    parser.add_argument("--patience", type=float, default=ALL, help="seconds of waiting for a quiet machine, in all")
    options = parser.parse_args(arguments)
    # A bench that is stopped ends its engines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    wanted = {NO_CONNECTOR, *options.only} if options.only else {name for group in GROUPS for name in group}
    groups = [[name for name in GROUPS[number] if name in wanted] for number in options.groups]
    chosen = (options.lengths, options.rounds, groups, options.phases, options.patience)
    for figure in figures(options.release, *chosen):
        met = {True: "met", False: "missed", None: ""}[figure.met]
        print(f"{figure.name}: {figure.value:.3f}, goal {figure.goal}: {met}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
