"""A module's two versions side by side, cut into the regions to read and the unchanged ones between them."""

from __future__ import annotations

import ast
import io
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from transforms.pipeline.diff import module_diff
from transforms.pipeline.hunks import Hunk, owners, parse_diff

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transforms.pipeline.rewrite import RewrittenModule

#: Fewer unchanged lines than this are shown rather than folded.
SHORTEST_FOLD = 5


@dataclass(frozen=True)
class Row:
    """One line, or the place of one, in both versions.

    Attributes:
        old: The line of the upstream file; None where the overlay adds one.
        new: The line of the rewritten file; None where it has none.
        changed: Whether the two differ.
    """

    old: int | None
    new: int | None
    changed: bool = False


@dataclass(frozen=True)
class Region:
    """Consecutive rows: either a change with its context, or unchanged lines between two.

    Attributes:
        rows: Its rows.
        scope: The class and function in which the change stands; empty at the module's own level.
        rules: The rules whose insertions it holds, in order; none for unchanged lines.
    """

    rows: tuple[Row, ...]
    scope: str = ""
    rules: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether there is anything to read in it."""
        return any(row.changed for row in self.rows)


def lines_of(source: bytes) -> list[str]:
    """A source's lines, counted as the diff counts them."""
    return [line.removesuffix("\n") for line in io.StringIO(source.decode(), newline="\n")]


def regions(module: RewrittenModule, context: int) -> list[Region]:
    """The regions of a module from its first line to its last.

    Args:
        module: The module.
        context: How many unchanged lines to keep around each change.
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
    """The lines of every class and function, with its qualified name."""
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
