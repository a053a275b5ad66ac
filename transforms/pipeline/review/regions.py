"""Split a module's two versions into regions to read and unchanged regions between them."""

from __future__ import annotations

import ast
import io
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from transforms.engine.marks import decoded
from transforms.pipeline.diff import module_diff
from transforms.pipeline.hunks import Hunk, owners, parse_diff

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transforms.pipeline.rewrite import RewrittenModule

#: Shorter runs of unchanged lines are shown rather than folded.
SHORTEST_FOLD = 5


@dataclass(frozen=True)
class Row:
    """One row of the side-by-side view.

    Attributes:
        old: The line number in the upstream file; None where the overlay adds a line.
        new: The line number in the rewritten file; None where the overlay removes a line.
        changed: Whether the two versions differ.
    """

    old: int | None
    new: int | None
    changed: bool = False


@dataclass(frozen=True)
class Region:
    """Consecutive rows: either a change with its context, or unchanged lines between two changes.

    Attributes:
        rows: The rows.
        scope: The class and function of the change; empty at module level.
        rules: The rules whose insertions the region contains, in order; empty for unchanged lines.
    """

    rows: tuple[Row, ...]
    scope: str = ""
    rules: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether the region contains a change."""
        return any(row.changed for row in self.rows)


def lines_of(source: bytes) -> list[str]:
    """Return a source's lines, counted as in the diff."""
    return [line.removesuffix("\n") for line in io.StringIO(decoded(source), newline="\n")]


def regions(module: RewrittenModule, context: int) -> list[Region]:
    """Return the regions of a module, from its first line to its last.

    Args:
        module: The module.
        context: The number of unchanged lines to keep around each change.
    """
    hunks = parse_diff(module_diff(module.path, module.upstream, module.rewritten)).get(module.path, [])
    rule_at = {
        hunk.line + offset: rule
        for hunk in hunks
        for offset, rule in enumerate(owners(hunk, module.path, module.transforms))
        if rule
    }
    rows = list(_rows(hunks, len(lines_of(module.rewritten))))
    scopes = _scopes(module.rewritten)
    return [_region(part, rule_at, scopes) for part in _parts(rows, context)]


def _rows(hunks: Sequence[Hunk], length: int) -> Iterator[Row]:
    old = new = 1
    for hunk in hunks:
        while new < hunk.line:
            yield Row(old, new)
            old, new = old + 1, new + 1
        for index in range(max(len(hunk.removed), len(hunk.added))):
            left = old + index if index < len(hunk.removed) else None
            right = new + index if index < len(hunk.added) else None
            yield Row(left, right, changed=True)
        old, new = old + len(hunk.removed), new + len(hunk.added)
    while new <= length:
        yield Row(old, new)
        old, new = old + 1, new + 1


def _parts(rows: Sequence[Row], context: int) -> list[list[Row]]:
    shown = [False] * len(rows)
    for index, row in enumerate(rows):
        if row.changed:
            shown[max(0, index - context) : index + context + 1] = [True] * len(
                rows[max(0, index - context) : index + context + 1]
            )
    for is_shown, run in groupby(range(len(rows)), key=lambda i: shown[i]):
        indexes = list(run)
        if not is_shown and len(indexes) < SHORTEST_FOLD:
            for index in indexes:
                shown[index] = True
    return [[rows[i] for i in run] for _, run in groupby(range(len(rows)), key=lambda i: shown[i])]


def _region(rows: list[Row], rule_at: dict[int, str], scopes: list[tuple[range, str]]) -> Region:
    changed = [row.new for row in rows if row.changed and row.new]
    rules = tuple(dict.fromkeys(rule_at[line] for line in changed if line in rule_at))
    first = next((line for line in changed if line in rule_at), 0)
    around = [(lines, name) for lines, name in scopes if first in lines]
    return Region(tuple(rows), min(around, key=lambda found: len(found[0]))[1] if around else "", rules)


def _scopes(source: bytes) -> list[tuple[range, str]]:
    """Return the lines of every class and function, with its qualified name."""
    found: list[tuple[range, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}{child.name}"
                found.append((range(child.lineno, (child.end_lineno or child.lineno) + 1), name))
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return found
