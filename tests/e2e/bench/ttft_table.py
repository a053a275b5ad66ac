"""The tables of times to first token: one for each group and length, all phases side by side."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tests.e2e.bench.peers import NO_CONNECTOR, SIDES
from tests.e2e.bench.ttft_stages import (
    COLD,
    DISK,
    DROPPED,
    HIT,
    NEXT,
    PLAIN_COPY,
    PLAIN_READ,
    RESET,
    RESTART,
)

if TYPE_CHECKING:
    from tests.e2e.bench.ttft_results import Results

ROWS = [*SIDES, PLAIN_READ, PLAIN_COPY]
COLUMNS = {
    COLD: "cold, saving",
    NEXT: "next request while saving",
    HIT: "in-engine hit",
    RESET: "loaded, same engine",
    RESTART: "loaded, engine restarted",
    DISK: "and its memory lost",
    DROPPED: "and page cache dropped",
}


def show(results: Results) -> None:
    """Print the medians, what failed, which first tokens differ, and how busy the machine was with other things."""
    console = Console(width=180)
    for group in range(len(results.groups)):
        for length in results.lengths:
            console.print(_table(results, group, length))
    for side, reason in results.failures.items():
        console.print(f"{side} could not be measured to the end: {reason.strip().splitlines()[-1]}")
    for difference in results.differing_tokens():
        console.print(f"another answer: {difference}")
    samples = [sample for group in results.groups for sample in group]
    if samples:
        console.print(f"load average meanwhile: {_spread([s.load for s in samples], 1, '')}")
        console.print(f"processors used by others meanwhile: {_spread([s.others for s in samples], 100, ' %')}")
        console.print(f"disturbed by that: {sum(s.disturbed for s in samples)} of {len(samples)} measurements")


def _table(results: Results, group: int, length: int) -> Table:
    table = Table("milliseconds", title=f"{length} tokens, {results.workload.kv_bytes(length) / 2**20:.0f} MiB of KV")
    measured = {sample.side for sample in results.groups[group]}
    columns = {
        phase: column for phase, column in COLUMNS.items() if any(s.phase == phase for s in results.groups[group])
    }
    for column in columns.values():
        table.add_column(column, justify="right")
    for side in (one for one in ROWS if one in measured):
        cells = [_cell(results, group, side, phase, length) for phase in columns]
        table.add_row(side, *cells)
    return table


def _cell(results: Results, group: int, side: str, phase: str, length: int) -> str:
    """A median and its range; a hit that was asked for beside it, and what was not found, is marked."""
    reference = f"{phase} {HIT}"
    if side == NO_CONNECTOR and results.of(group, side, reference, length):
        return f"hit {_cell(results, group, side, reference, length)}"
    seconds = [1000 * value for value in results.seconds(group, side, phase, length)]
    if not seconds:
        return ""
    found = [s.cached for s in results.of(group, side, phase, length).values() if s.cached is not None]
    missed = phase not in {COLD, NEXT} and any(cached != length for cached in found)
    spread = f", {min(seconds):.0f} to {max(seconds):.0f}" if len(seconds) > 1 else ""
    return f"{statistics.median(seconds):.1f}{' (missed)' if missed else ''}{spread}"


def _spread(values: list[float], factor: float, unit: str) -> str:
    low, middle, high = (factor * value for value in (min(values), statistics.median(values), max(values)))
    return f"{low:.1f} to {high:.1f}{unit}, median {middle:.1f}{unit}"
