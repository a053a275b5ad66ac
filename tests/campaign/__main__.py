"""Run the fault campaign, and print its figures."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import random
import secrets
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import tqdm

from tests.campaign import clocks, damaged, denied, full, kill, leases, refusing, rivals, vanish
from tests.campaign.figures import table
from tests.campaign.scene import Stage, folders

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.campaign.figures import Figures

DEFAULT_COUNT = 500


class Part(NamedTuple):
    """A part of the campaign."""

    run: Callable[[int, Stage], Figures]
    share: float  #: its trials, for one kill
    what: str
    needs: str = ""  #: a package that it runs beside


def _of_groups(count: int, stage: Stage) -> Figures:
    figures: Figures = importlib.import_module("tests.campaign.groups").run(count, stage)
    return figures


PARTS = {
    "kill": Part(kill.run, 1.0, "processes killed while they save"),
    "leases": Part(leases.run, 1.0, "processes killed while they lease, evict and drop in one store"),
    "damage": Part(damaged.run, 1.1, "files flipped, cut, mixed up, deleted"),
    "full": Part(full.run, 0.08, "disks filled, or the size of files limited"),
    "denied": Part(denied.run, 0.2, "permissions withdrawn from a store in use"),
    "vanish": Part(vanish.run, 0.2, "directories removed from a store in use"),
    "rivals": Part(rivals.run, 0.1, "stores with several writers of the same blocks"),
    "clocks": Part(clocks.run, 0.1, "stores whose clocks jump while blocks are evicted"),
    "refusing": Part(refusing.run, 0.1, "stores whose calls to the operating system fail at random"),
    "groups": Part(_of_groups, 1.7, "blocks of one KV-cache group damaged or missing, beside vLLM", needs="vllm"),
}


def parts_here() -> list[str]:
    """Return the parts that can run in this environment."""
    return [name for name, part in PARTS.items() if not part.needs or importlib.util.find_spec(part.needs)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; return 1 if a figure that must be zero is not."""
    listed = "; ".join(f"{name}: {part.what}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=f"{__doc__} The parts: {listed}.")
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all that can run here")
    parser.add_argument("--count", type=int, default=DEFAULT_COUNT, help="kills; other parts have their share of it")
    parser.add_argument("--seed", type=int, help="of an earlier run, to try the same again")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    strange = [name for name in options.parts if name not in PARTS]
    if strange:
        parser.error(f"there is no part {strange[0]!r}; there are {', '.join(PARTS)}")
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    began = time.monotonic()
    found = {name: run_part(name, options.count, seed) for name in options.parts or parts_here()}
    if options.json:
        print(json.dumps({"seed": seed, "parts": {name: figures.as_data() for name, figures in found.items()}}))
    else:
        print(table(found))
        print(f"seed {seed}, {time.monotonic() - began:.0f} s")
    return int(any(figures.failed for figures in found.values()))


def run_part(name: str, count: int, seed: int) -> Figures:
    """Run one part, and return its figures."""
    part = PARTS[name]
    trials = max(1, round(count * part.share))
    with folders() as (disk, shared), tqdm.tqdm(total=trials, desc=f"{name:<8}", disable=None) as bar:
        rng = random.Random(f"{seed} {name}")  # noqa: S311 - it decides what is tested
        return part.run(trials, Stage(rng, disk, shared, bar.update))


if __name__ == "__main__":
    sys.exit(main())
