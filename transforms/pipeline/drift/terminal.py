"""Print drift in a terminal: one release in full, several as a matrix."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from transforms.engine.report import Status
from transforms.pipeline.census import advice, by_kind, census_summary
from transforms.pipeline.changes import Change
from transforms.place import command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from transforms.engine.census import Census
    from transforms.pipeline.census import Site
    from transforms.pipeline.drift.model import Drift, RuleDrift

MOVED = "◆"
NO_SOURCES = "-"
SYMBOLS: dict[Status, tuple[str, str]] = {
    Status.APPLIED: ("●", "green"),
    Status.NOT_APPLICABLE: ("·", "dim"),
    Status.UPSTREAMED: ("↑", "cyan"),
    Status.MISSING: ("✗", "bold red"),
    Status.ENDED: ("∅", "bold red"),
    Status.AMBIGUOUS: ("?", "bold red"),
    Status.FORBIDDEN: ("!", "bold red"),
    Status.PRESENT: ("=", "bold red"),
}


def symbol(rule: RuleDrift) -> tuple[str, str]:
    """Return the character and the style of one rule in one release."""
    if rule.outcome.status is Status.APPLIED and rule.moved:
        return MOVED, "yellow"
    return SYMBOLS[rule.outcome.status]


def print_release(drift: Drift, console: Console) -> None:
    """Print one release: every rule with its place, what moved, and details of the failures."""
    if not drift.rules:
        console.print(Text(f"{drift.title} could not be tried: {drift.problem}", "red"))
        return
    kind = "reviewed" if drift.reviewed else "not reviewed yet"
    since = f", compared with the overlay of {drift.since}" if drift.since else ""
    console.print(Text(f"{drift.title}: {kind}{since}", style="bold"))
    if drift.artefact:
        console.print(Text(f"read from the {drift.artefact.kind} {drift.artefact.name}", style="dim"))
    for transform, rules in groupby(drift.rules, key=lambda rule: rule.transform):
        _print_module(drift, transform, list(rules), console)
    _print_verdict(drift, console)


def _print_module(drift: Drift, transform: str, rules: list[RuleDrift], console: Console) -> None:
    change = drift.modules.get(transform)
    heading = Text(f"\n{transform}", style="bold")
    heading.append(f"  {rules[0].outcome.path or 'no module'}", style="not bold")
    if change and change.path and change.path_before and change.path != change.path_before:
        heading.append(f"  (was {change.path_before})", style="not bold yellow")
    elif change and change.upstream_changed is not None:
        heading.append("  upstream file changed" if change.upstream_changed else "  same upstream file", "not bold dim")
    console.print(heading)
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=1)
    table.add_column(no_wrap=True, min_width=24)
    table.add_column(justify="right", no_wrap=True, min_width=5)
    table.add_column()
    above = ""
    for rule in rules:
        mark, style = symbol(rule)
        lines, note = ", ".join(map(str, rule.lines)), explain(rule)
        said = "as above" if len(note) > len("as above") and note == above else note
        table.add_row(Text(mark, style), rule.outcome.rule, lines, Text(said, _style(rule)))
        above = note
    console.print(table)
    for around in drift.around.distinct([rule.outcome.rule for rule in rules]):
        if around.diff:
            console.print(Text(f"  around: {around.summary(drift.since)}", "yellow"))
            print_diff(around.shortened(), console)


def print_diff(lines: Sequence[str], console: Console) -> None:
    """Print the lines of a unified diff in colour."""
    for line in lines:
        style = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1], "dim")
        console.print(Text(f"    {line}", style), soft_wrap=True)


def explain(rule: RuleDrift) -> str:
    """Return a note on one rule beside its status and its lines."""
    outcome, change = rule.outcome, rule.change
    if outcome.status is not Status.APPLIED:
        gone = change is not None and change.change is Change.GONE and not rule.failed
        return f"{outcome.status.value}{', was inserted before' if gone else ''}: {outcome.detail}"
    parts = ["new"] if change is not None and change.change is Change.NEW else []
    parts += change.notes if change else ()
    told = any("variant" in part for part in parts)
    return "; ".join([f"variant {outcome.variant}"] * (bool(outcome.variant) and not told) + parts)


def _style(rule: RuleDrift) -> str:
    return "red" if rule.failed else "yellow" if rule.moved else "dim"


def _print_verdict(drift: Drift, console: Console) -> None:
    console.print()
    for rule in drift.failures:
        console.print(Text(rule.outcome.describe(), "red"))
    if drift.problem:
        console.print(Text(f"the rewritten modules fail their check: {drift.problem}", "red"))
    if drift.around.problem:
        console.print(Text(f"what changed around the rules is not known: {drift.around.problem}", "yellow"))
    for site in drift.unclassified:
        for line in advice(site, drift.census, drift.title):
            console.print(Text(line, "red"), soft_wrap=True)
    if drift.census:
        for kind, some in by_kind(drift.census).items():
            style = "" if all(site.is_known for site in some) else "red"
            console.print(Text(f"census of {kind}: {census_summary(some)}", style))
    counts = drift.counts
    console.print(Text(", ".join(f"{counts[status]} {status.value}" for status in SYMBOLS if counts[status])))
    legend = "  ".join(f"{character} {status.value}" for status, (character, _) in SYMBOLS.items())
    console.print(Text(f"{legend}  {MOVED} applied, and changed since the release before", style="dim"))
    console.print(Text(f"{drift.title}: {_verdict(drift)}", _verdict_style(drift.passes)))
    if drift.passes and not drift.reviewed:
        console.print(Text(command(f"next: nox -s review -- {drift.release}")))
    elif not drift.passes:
        console.print(
            Text(command(f"next: nox -s adopt -- {drift.release} lists what to decide, and the edits that do it"))
        )


def _verdict(drift: Drift) -> str:
    if not drift.applies:
        return "no overlay can be built"
    news = len(drift.unclassified)
    return (
        f"every rule applies, and the census has {news} new place{'s' * (news != 1)}" if news else "every rule applies"
    )


def _verdict_style(fine: bool) -> str:
    return "bold green" if fine else "bold red"


def print_matrix(drifts: Sequence[Drift], console: Console) -> None:
    """Print a matrix of rules and releases, as wide as the terminal, then the failures in full."""
    cells = {drift.release: {rule.outcome.rule: symbol(rule) for rule in drift.rules} for drift in drifts}
    rules = list(dict.fromkeys(rule.outcome.rule for drift in drifts for rule in drift.rules))
    width = max(map(len, rules), default=0)
    room = max(1, (console.width - width) // 2)
    for start in range(0, len(drifts), room):
        shown = [drift.release for drift in drifts[start : start + room]]
        _print_header(shown, width, console)
        for rule in rules:
            line = Text(rule.ljust(width))
            for release in shown:
                line.append(" ").append(*cells[release].get(rule, (NO_SOURCES, "dim")))
            console.print(line, no_wrap=True)
        console.print()
    console.print(_legend())
    for drift in drifts:
        if not drift.passes:
            _print_verdict(drift, console)
    known = sum(not drift.unclassified for drift in drifts)
    told = f"{known} of {len(drifts)} releases: no new place in the census"
    console.print(Text(told, _verdict_style(known == len(drifts))))
    fine = sum(drift.applies for drift in drifts)
    console.print(Text(f"{fine} of {len(drifts)} releases: every rule applies", _verdict_style(fine == len(drifts))))


def print_censuses(
    censuses: Mapping[str, Sequence[Site]], stale: Sequence[tuple[Census, str]], console: Console
) -> None:
    """Print how many places each release has and how they are classified, then the unclassified ones.

    Args:
        censuses: The places of each release, by its name on a command line.
        stale: The classifications that match no place, see `obsolete`.
        console: The console to print on.
    """
    for release, sites in censuses.items():
        for kind, some in by_kind(sites).items():
            console.print(Text(f"{release}, {kind}: {census_summary(some)}"), soft_wrap=True)
    for release, sites in censuses.items():
        for site in sites:
            if not site.is_known:
                for line in advice(site, sites, release):
                    console.print(Text(line, "red"), soft_wrap=True)
    for census, pattern in stale:
        console.print(Text(f"obsolete: {census.id} classifies {pattern}, and no reviewed release has it", "red"))


def _print_header(releases: Sequence[str], width: int, console: Console) -> None:
    """Print the releases vertically, above their columns."""
    first = f"{releases[0].partition('.')[0]}."
    shared = first if all(release.startswith(first) for release in releases) else ""
    names = [release.removeprefix(shared) for release in releases]
    height = max(map(len, names))
    columns = [name.rjust(height) for name in names]
    for row in range(height):
        label = f"rule in {shared}…" if row == height - 1 else ""
        console.print(Text(label.ljust(width) + "".join(f" {c[row]}" for c in columns), "bold"), no_wrap=True)


def _legend() -> Text:
    legend = Text()
    for status, (mark, style) in SYMBOLS.items():
        legend.append(mark, style).append(f" {status.value}   ")
    legend.append(f"\n{MOVED}", "yellow")
    return legend.append(" applied; new since the release before, or by another module, variant or text")
