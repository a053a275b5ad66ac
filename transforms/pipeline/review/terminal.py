"""Print the review in a terminal: side by side if it is wide enough, otherwise unified."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from transforms.pipeline.changes import Change
from transforms.pipeline.drift.terminal import print_diff
from transforms.pipeline.review.regions import Region, Row, lines_of, regions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from transforms.engine.transform import Transform
    from transforms.pipeline.changes import RuleChange
    from transforms.pipeline.review.model import ModuleReview, Review

CONTEXT = 3
#: From this width on, both versions fit side by side.
WIDE = 160
ADDED, REMOVED = "green", "red"


def print_review(review: Review, console: Console) -> None:
    """Print every change of a review with its record and its rules."""
    for module in review.modules:
        _print_module(module, review, console)
    console.print(Text("\nnot inserted" if review.lock["not_inserted"] else "\nevery rule is inserted", "bold"))
    for entry in review.lock["not_inserted"]:
        console.print(Text(f"  {entry['rule']}: {entry['status']}: {entry['reason']}"))
    console.print()


def _print_module(module: ModuleReview, review: Review, console: Console) -> None:
    console.print()
    console.rule(Text(f"{module.id}  {module.module.path}", "bold"), align="left", style="dim")
    change = module.change
    if change and change.upstream_changed is not None:
        same = "changed since" if change.upstream_changed else "is the same as in"
        console.print(Text(f"upstream file {same} {review.changes.since}", "dim"))
    console.print(Text(f"upstream  {module.upstream_sha256}\nrewritten {module.rewritten_sha256}", "dim"))
    for transform in module.transforms:
        console.print(Padding(_record(transform), (1, 0)))
    shown: set[str] = set()
    for region in regions(module.module, CONTEXT):
        if region.changed:
            _print_region(region, module, review, console)
            _print_around(region, review, shown, console)


def _print_around(region: Region, review: Review, shown: set[str], console: Console) -> None:
    for around in review.around.distinct(region.rules):
        if around.name not in shown:
            shown.add(around.name)
            console.print(Text(f"around: {around.summary(review.changes.since)}", "yellow" if around.diff else "dim"))
            print_diff(around.shortened(), console)
            console.print()


def _record(transform: Transform) -> Table:
    record = transform.governance
    upstream = record.upstream
    told = {
        "why": record.why,
        "how": record.how,
        "runs in": ", ".join(process.value for process in record.processes),
        "upstream": f"{upstream.status.value}: {upstream.reason}{f' ({upstream.link})' if upstream.link else ''}",
        "goes away when": record.removal,
    }
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(max_width=100)
    for name, text in told.items():
        table.add_row(name, Text(text))
    return table


def _print_region(region: Region, module: ModuleReview, review: Review, console: Console) -> None:
    console.print(Text(region.scope or "module level", "bold"))
    for rule in region.rules:
        outcome = module.outcomes[rule]
        line = Text(f"  {rule}", ADDED)
        line.append(f"  {outcome.hits} hit{'s' if outcome.hits != 1 else ''}", "dim")
        if outcome.variant:
            line.append(f"  variant {outcome.variant}", "dim")
        line.append(*_since(review.changes.rules.get(rule)))
        console.print(line)
    console.print(_side_by_side(region, module) if console.width >= WIDE else _unified(region, module))
    console.print()


def _since(change: RuleChange | None) -> tuple[str, str]:
    if change is None or change.change is Change.SAME:
        return "", ""
    style = "dim" if change.change is Change.SHIFTED else "yellow"
    return f"  {change.change.value}: {'; '.join(change.notes)}", style


def _side_by_side(region: Region, module: ModuleReview) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    for _ in range(2):
        table.add_column(justify="right", style="dim", no_wrap=True, width=5)
        table.add_column(ratio=1)
    old, new = _code(module)
    for row in region.rows:
        left = _line(old, row.old, REMOVED if row.changed else "")
        right = _line(new, row.new, ADDED if row.changed else "")
        table.add_row(str(row.old or ""), left, str(row.new or ""), right)
    return table


def _unified(region: Region, module: ModuleReview) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(justify="right", style="dim", no_wrap=True, width=5)
    table.add_column()
    old, new = _code(module)
    for row in region.rows:
        for number, line in _lines(row, old, new):
            table.add_row(str(number), line)
    return table


def _lines(row: Row, old: list[str], new: list[str]) -> Iterator[tuple[int, Text]]:
    if row.changed and row.old:
        yield row.old, _line(old, row.old, REMOVED)
    if row.new:
        yield row.new, _line(new, row.new, ADDED if row.changed else "")


def _code(module: ModuleReview) -> tuple[list[str], list[str]]:
    return lines_of(module.module.upstream), lines_of(module.module.rewritten)


def _line(source: list[str], number: int | None, changed: str) -> Text:
    """Return one line of code: a changed line in one colour, any other highlighted."""
    if number is None:
        return Text()
    code = source[number - 1]
    if changed:
        return Text(f"{'+' if changed == ADDED else '-'} {code}", changed)
    highlighted = Syntax("", "python", theme="ansi_dark").highlight(code)
    highlighted.rstrip()
    return Text("  ").append_text(highlighted)
