"""Parse a reviewed diff: which lines each rule added to which module."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transforms.engine.marks import MARK
from transforms.pipeline.rewrite import NOTICE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transforms.engine.transform import Transform

RANGE = re.compile(r"@@ -\d+(?:,\d+)? \+(\d+)(?:,\d+)? @@")
NOTICE_STARTS = tuple(line.partition("{")[0] for line in NOTICE.splitlines())


@dataclass(frozen=True)
class Hunk:
    """One change of a module.

    Attributes:
        line: The line of the rewritten module at which the added lines start.
        removed: The upstream lines that are replaced, without line ends.
        added: The lines in their place.
    """

    line: int
    removed: tuple[str, ...]
    added: tuple[str, ...]


@dataclass(frozen=True)
class Inserted:
    """What one rule added.

    Attributes:
        path: The module's path.
        lines: Where each of its insertions starts in the rewritten module.
        text: The added lines without their indentation.
    """

    path: str
    lines: tuple[int, ...]
    text: tuple[str, ...]


def parse_diff(diff: str) -> dict[str, list[Hunk]]:
    """Return the hunks of each module in a zero-context diff."""
    modules: dict[str, list[Hunk]] = {}
    for part in re.split(r"^--- a/", diff, flags=re.MULTILINE)[1:]:
        header, *lines = part.split("\n")
        modules[header] = list(_hunks(lines))
    return modules


def _hunks(lines: Sequence[str]) -> Iterator[Hunk]:
    starts = [i for i, line in enumerate(lines) if RANGE.match(line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        found = RANGE.match(lines[start])
        body = lines[start + 1 : end]
        yield Hunk(
            int(found[1]) if found else 0,
            tuple(line[1:] for line in body if line.startswith("-")),
            tuple(line[1:] for line in body if line.startswith("+")),
        )


def owners(hunk: Hunk, path: str, transforms: Sequence[Transform]) -> list[str]:
    """Return the rule of each added line of a hunk; empty for the notice of changes.

    A statement's first line has its rule's mark, and the rest of the statement follows. An upstream line that had to
    change, for instance by a comma, precedes the mark. If there is no room for a mark, the text identifies the rule.
    """
    rules, current = [""] * len(hunk.added), ""
    for index, line in enumerate(hunk.added):
        current = line.partition(MARK)[2].strip() or current
        rules[index] = current
    first = next(filter(None, rules), "") or _unmarked(hunk, path, transforms)
    return [
        "" if line.startswith(NOTICE_STARTS) else rule or first for line, rule in zip(hunk.added, rules, strict=True)
    ]


def _unmarked(hunk: Hunk, path: str, transforms: Sequence[Transform]) -> str:
    """Return the rule whose code is in a hunk without a mark."""
    added = "\n".join(hunk.added)
    for transform in transforms:
        if any(place.path == path for place in transform.module.paths):
            for rule in transform.rules:
                if any(variant.edit.code in added for variant in rule.variants):
                    return rule.id
    return ""


def inserted(diff: str, transforms: Sequence[Transform]) -> dict[str, Inserted]:
    """Return what each rule added, by rule id."""
    found: dict[str, Inserted] = {}
    for path, hunks in parse_diff(diff).items():
        for hunk in hunks:
            for offset, (rule, line) in enumerate(zip(owners(hunk, path, transforms), hunk.added, strict=True)):
                if not rule:
                    continue
                so_far = found.get(rule, Inserted(path, (), ()))
                starts = MARK + rule in line or not so_far.lines
                lines = (*so_far.lines, hunk.line + offset) if starts else so_far.lines
                found[rule] = Inserted(path, lines, (*so_far.text, line.strip()))
    return found
