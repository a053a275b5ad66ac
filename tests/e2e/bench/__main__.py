"""Measure, print a table of figures and goals, and write the numbers to ``build/bench/``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tests.e2e.bench import (
    agents,
    blend,
    building,
    caching,
    compression,
    crowd,
    drafts,
    hand_off,
    hybrid,
    lookups,
    memory,
    passes,
    real,
    redis_values,
    rerope,
    running,
    server_chunks,
    servers,
    sparse,
    start,
    store_shapes,
    ttft,
    weights,
)
from tests.e2e.bench.figure import Figure
from tests.e2e.environment import plain, with_overlay
from tests.e2e.judges import measuring as judging
from tests.e2e.needle import measuring
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def _engine(release: str) -> Iterator[Figure]:
    """Measure decoding with and without the overlay, and the costs of the checks at import."""
    overlay = with_overlay(release)
    for found in running.decoding(plain(release), overlay):
        if isinstance(found, Figure):
            yield found
        else:
            yield from start.content_checks(overlay, found)


SECTIONS: dict[str, Callable[[str], Iterator[Figure]]] = {
    "start": start.interpreter_start,
    "build": building.build,
    "download": lambda _: building.download(),
    "scheduler": lambda release: running.scheduler(with_overlay(release)),
    "engine": _engine,
    "weights": weights.figures,
    "hashing": lambda _: caching.hashing(),
    "store": lambda _: store_shapes.figures(),
    "compression": compression.figures,
    "names": lambda _: caching.names(),
    "lookups": lambda _: lookups.figures(),
    "redis": lambda _: redis_values.figures(),
    "servers": lambda _: servers.figures(),
    "chunks": lambda _: server_chunks.figures(),
    "ttft": ttft.figures,
    "real": real.figures,
    "hybrid": hybrid.figures,
    "crowd": crowd.figures,
    "agents": agents.figures,
    "hand_off": hand_off.figures,
    "memory": memory.figures,
    "passes": passes.figures,
    "sparse": sparse.figures,
    "drafts": drafts.figures,
    "rerope": rerope.figures,
    "needle": measuring.figures,
    "judges": judging.figures,
    "blend": blend.figures,
}
RELEASE = "0.32.0"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the sections; the exit code does not depend on the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--release", default=RELEASE, help=f"default: {RELEASE}")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.sections) - set(SECTIONS))
    if unknown:
        parser.error(f"there is no section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
    figures = []
    for figure in measure(options.release, options.sections or list(SECTIONS)):
        print(f"{figure.name}: {figure.value:.4g} {figure.unit}", file=sys.stderr, flush=True)
        figures.append(figure)
    _show(figures)
    directory = BUILD / "bench"
    directory.mkdir(parents=True, exist_ok=True)
    machine = {"processors": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    kept = {"release": options.release, "machine": machine, "figures": [dataclasses.asdict(f) for f in figures]}
    (directory / "figures.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
    return 0


def measure(release: str, sections: Sequence[str]) -> Iterator[Figure]:
    """Yield the figures of some sections, in the order of all sections."""
    for section, figures in SECTIONS.items():
        if section in sections:
            yield from figures(release)


def _show(figures: Sequence[Figure]) -> None:
    table = Table("figure", "measured", "goal", "met")
    for figure in figures:
        goal = "" if figure.goal is None else f"≤ {figure.goal:g} {figure.unit}".strip()
        met = {True: "yes", False: "no", None: ""}[figure.met]
        table.add_row(figure.name, f"{figure.value:.4g} {figure.unit}".strip(), goal, met)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
