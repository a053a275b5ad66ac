"""The tables of what sparse methods cost and save, and the figures that have a goal."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.sparse_model import block_size
from tests.e2e.bench.sparse_results import attention, predicted, step
from tests.e2e.needle.settings import DENSE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.e2e.bench.sparse_results import Group

#: An engine without any method.
NO_METHOD = "no method"
#: The goals hold for prompts of at least so many tokens and for this budget.
LONG, BUDGET = 32_768, 0.1
MOST_ATTENTION, MOST_STEP, MOST_OVERHEAD = 1 / 3, 1 / 2, 1.02
#: Of a step that fetches little, and of one that fetches most of what it reads.
MOST_ALIKE, MOST_UNLIKE = 1 / 1.5, 1 / 0.9


def show(groups: Mapping[str, Sequence[Group]]) -> None:
    """Print a table for each part, what failed, and how disturbed the machine was."""
    console = Console(width=160)
    for part, table in (("decode", _decoding), ("fetch", _fetching), ("full", _overhead), ("held", _blocks)):
        if groups.get(part):
            console.print(table(groups[part]))
    for group in (group for many in groups.values() for group in many):
        for side, reason in group.failures.items():
            console.print(f"{side}, {group.length} tokens, {group.budget:.0%}: {_cause(reason)}")
    samples = [sample for many in groups.values() for group in many for sample in group.samples]
    if samples:
        others = 100 * statistics.median(sample.others for sample in samples)
        disturbed = sum(sample.disturbed for sample in samples)
        console.print(f"disturbed by others: {disturbed} of {len(samples)} samples; their median share {others:.1f} %")


def goals(groups: Mapping[str, Sequence[Group]]) -> Iterator[Figure]:
    """The figures that have a goal, and those of other lengths and budgets without one."""
    for group in groups.get("decode", []):
        goal = group.length >= LONG and group.budget == BUDGET
        for side in _compared(group, DENSE):
            where = f"{side}, {group.length} tokens, {group.budget:.0%}"
            each = group.ratios(side, DENSE, attention)
            detail: dict[str, Any] = {"each": each, "disturbed": group.disturbed}
            name = f"{where}: attention and selection, time to dense attention"
            yield Figure(name, statistics.median(each), "", MOST_ATTENTION if goal else None, detail)
            each = group.ratios(side, DENSE, step)
            detail = {**detail, "each": each, "predicted": 1 / predicted(group, side, DENSE)[1]}
            name = f"{where}: a decode step, time to dense"
            yield Figure(name, statistics.median(each), "", MOST_STEP if goal else None, detail)
    for group in groups.get("fetch", []):
        for side in _compared(group, DENSE):
            each = group.ratios(side, DENSE, step)
            fetched = group.median(side, lambda sample: sample.fetched)
            tokens = "one token repeated" if group.repeats else "the model's tokens"
            name = f"{side}, {group.length} tokens, {group.budget:.0%}, {tokens}: a decode step, time to dense"
            most = MOST_ALIKE if group.repeats else MOST_UNLIKE
            detail = {"each": each, "fetched": fetched}
            yield Figure(name, statistics.median(each), "", most if side == "ESA" else None, detail)
    for group in groups.get("full", []):
        for side in _compared(group, NO_METHOD):
            each = group.ratios(side, NO_METHOD, step)
            detail = {"each": each, "same_tokens": group.tokens.get(side) == group.tokens.get(NO_METHOD)}
            name = f"{side}, nothing left out: a decode step, time to no method"
            yield Figure(name, statistics.median(each), "", MOST_OVERHEAD, detail)


def _compared(group: Group, to: str) -> list[str]:
    """The sides that have a round in common with another, without that one."""
    return [side for side in _measured(group) if side != to and group.of(side).keys() & group.of(to).keys()]


def _decoding(groups: Sequence[Group]) -> Table:
    table = Table(
        "side", title="decode steps, milliseconds; predicted: by the bytes to read and the memory's bandwidth"
    )
    columns = ("tokens", "budget", "step", "attention", "selection", "both, predicted", "selection of step", "tokens/s")
    for column in (*columns, "both: dense / it", "predicted", "step: dense / it", "predicted"):
        table.add_column(column, justify="right")
    for group in (group for group in groups if DENSE in _measured(group)):
        whole, _ = predicted(group, DENSE, DENSE)
        for side in [DENSE, *_compared(group, DENSE)]:
            taken, method = group.median(side, step), group.median(side, lambda sample: sample.method)
            reading = group.median(side, lambda sample: sample.attention)
            expected, ratio = predicted(group, side, DENSE)
            cells = [f"{group.length}", f"{group.budget:.0%}" if side != DENSE else ""]
            cells += [f"{1000 * value:.2f}" for value in (taken, reading, method, expected)]
            cells += [f"{method / taken:.1%}", f"{1 / taken:.1f}"]
            if side != DENSE:
                gains = [statistics.median(group.ratios(DENSE, side, value)) for value in (attention, step)]
                cells += [f"{value:.2f}" for value in (gains[0], whole / expected, gains[1], ratio)]
            table.add_row(side, *cells)
        table.add_section()
    return table


def _fetching(groups: Sequence[Group]) -> Table:
    table = Table("side", title="decode steps of a method that fetches blocks, milliseconds")
    for column in ("tokens", "generated", "step", "attention", "selection", "fetched", "time to dense"):
        table.add_column(column, justify="right")
    for group in groups:
        for side in _measured(group):
            values = [group.median(side, of) for of in (step, lambda s: s.attention, lambda s: s.method)]
            cells = [f"{group.length}", "one token" if group.repeats else "the model's"]
            cells += [f"{1000 * value:.2f}" for value in values]
            cells.append(f"{group.median(side, lambda sample: sample.fetched):.0%}" if side != DENSE else "")
            cells.append(f"{statistics.median(group.ratios(side, DENSE, step)):.2f}" if side != DENSE else "")
            table.add_row(side, *cells)
        table.add_section()
    return table


def _overhead(groups: Sequence[Group]) -> Table:
    table = Table("side", "tokens", "step, ms", "to no method", "same tokens", title="a budget beyond the context")
    for group in groups:
        for side in _measured(group):
            ratios = group.ratios(side, NO_METHOD, step)
            same = group.tokens.get(side) == group.tokens.get(NO_METHOD)
            spread = f"{statistics.median(ratios):.4f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else ""
            table.add_row(
                side, f"{group.length}", f"{1000 * group.median(side, step):.3f}", spread, "yes" if same else "no"
            )
    return table


def _blocks(groups: Sequence[Group]) -> Table:
    table = Table("side", title="KV that a request holds, in tokens of whole blocks; the same budget at all lengths")
    for column in ("tokens", "budget", "most in prefill", "after it", "prefill, s"):
        table.add_column(column, justify="right")
    for side in dict.fromkeys(side for group in groups for side in group.held):
        for group in (group for group in groups if side in group.held):
            size = block_size(group.length)
            counts = [group.budget * group.length, size * group.most[side], size * group.held[side]]
            cells = [f"{count:.0f}" for count in counts]
            table.add_row(side, f"{group.length}", *cells, f"{group.prefill_s[side]:.1f}")
    return table


def _measured(group: Group) -> list[str]:
    """The sides that have samples, in the order of their first."""
    return list(dict.fromkeys(sample.side for sample in group.samples))


def _cause(reason: str) -> str:
    """The line of a log that says why an engine ended."""
    lines = [line for line in reason.strip().splitlines() if "Error" in line]
    return (lines or reason.strip().splitlines() or ["no reason given"])[-1].strip()
