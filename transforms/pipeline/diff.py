"""The reviewed diff. It has no context, so its only lines of vLLM are those that change.

The settings are pinned here and nowhere else: patience matching, no context, ``a/`` and ``b/`` prefixes, no dates, and
behind each hunk's range the qualified name of the function or class that it changes, and whether only a build with
``--hooks all`` contains it.
``git apply --unidiff-zero`` and ``patch -p1`` apply the result to the published sources.

Patience matching (Bram Cohen; ``git diff --patience``) first aligns the lines that occur exactly once on each side. An
inserted call is then one block, instead of being spread over the blank lines and brackets around it.
"""

from __future__ import annotations

import ast
import io
import warnings
from bisect import bisect_left
from collections import Counter
from difflib import Match, SequenceMatcher
from functools import partial
from typing import TYPE_CHECKING

from transforms.engine.marks import UNREADABLE, decoded
from transforms.pipeline.hunks import Hunk, owners

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from transforms.pipeline.rewrite import Overlay, RewrittenModule

OPT_IN = "only with --hooks all"


class PatienceMatcher(SequenceMatcher[str]):
    """The standard library's matcher, with patience matching in place of its search.

    Args:
        before: Lines.
        after: Lines.
    """

    a: Sequence[str]
    b: Sequence[str]

    def __init__(self, before: Sequence[str], after: Sequence[str]) -> None:
        super().__init__(None, before, "", autojunk=False)  # it would index ``after`` for its own search
        self.b = after

    def get_matching_blocks(self) -> list[Match]:
        """Return the runs of equal lines in order, ended by an empty one."""
        blocks: list[Match] = []
        for i, j in sorted(self._equal_lines()):
            if blocks and (blocks[-1].a + blocks[-1].size, blocks[-1].b + blocks[-1].size) == (i, j):
                blocks[-1] = blocks[-1]._replace(size=blocks[-1].size + 1)
            else:
                blocks.append(Match(i, j, 1))
        return [*blocks, Match(len(self.a), len(self.b), 0)]

    def _equal_lines(self) -> Iterator[tuple[int, int]]:
        """Yield the indices of matched lines in ``a`` and ``b``, in any order."""
        ranges = [(0, len(self.a), 0, len(self.b))]
        while ranges:
            i, i_end, j, j_end = ranges.pop()
            while i < i_end and j < j_end and self.a[i] == self.b[j]:
                yield i, j
                i, j = i + 1, j + 1
            unique = self._unique_lines(range(i, i_end), range(j, j_end))
            for i_unique, j_unique in unique:
                yield i_unique, j_unique
                ranges.append((i, i_unique, j, j_unique))
                i, j = i_unique + 1, j_unique + 1
            if unique:
                ranges.append((i, i_end, j, j_end))
                continue
            while i < i_end and j < j_end and self.a[i_end - 1] == self.b[j_end - 1]:
                i_end, j_end = i_end - 1, j_end - 1
                yield i_end, j_end

    def _unique_lines(self, rows: range, columns: range) -> list[tuple[int, int]]:
        """Return the longest common subsequence of the lines that occur exactly once on each side."""
        counts = Counter(self.a[i] for i in rows), Counter(self.b[j] for j in columns)
        column_of = {self.b[j]: j for j in columns if counts[0][self.b[j]] == counts[1][self.b[j]] == 1}
        pairs = [(i, column_of[self.a[i]]) for i in rows if self.a[i] in column_of]
        # Patience sorting: pile n holds the smallest last column of any increasing series of n + 1 lines.
        piles: list[int] = []
        last: list[int] = []
        before: list[int] = []
        for number, (_, j) in enumerate(pairs):
            pile = bisect_left(piles, j)
            piles[pile : pile + 1], last[pile : pile + 1] = [j], [number]
            before.append(last[pile - 1] if pile else -1)
        series = []
        number = last[-1] if last else -1
        while number >= 0:
            series.append(pairs[number])
            number = before[number]
        return series[::-1]


def module_diff(path: str, upstream: bytes, rewritten: bytes, note: Callable[[Hunk], str] = lambda _: "") -> str:
    """Return the zero-context diff of one module with its file header; empty if nothing changed.

    Args:
        path: The module's path.
        upstream: Its source as published.
        rewritten: Its source in the overlay.
        note: Returns the end of a hunk's heading, with a space before it; empty for none.
    """
    hunks = "".join(_hunks(_lines(upstream), _lines(rewritten), _scopes(rewritten), note))
    return f"--- a/{path}\n+++ b/{path}\n{hunks}" if hunks else ""


def overlay_diff(overlay: Overlay) -> str:
    """Return the diff of all modules of an overlay, ordered by path."""
    modules = sorted(overlay.modules, key=lambda module: module.path)
    return "".join(module_diff(m.path, m.upstream, m.rewritten, partial(_opt_in, m)) for m in modules)


def _opt_in(module: RewrittenModule, hunk: Hunk) -> str:
    """Return whether a build without ``--hooks all`` lacks a hunk, or which of its rules such a build lacks."""
    if module.default is None:
        return f" ({OPT_IN})"
    rules = dict.fromkeys(filter(None, owners(hunk, module.path, module.transforms))) if module.opt_in else {}
    lacking = [rule for rule in rules if rule in module.opt_in]
    if not lacking:
        return ""
    return f" ({OPT_IN})" if len(lacking) == len(rules) else f" ({', '.join(lacking)} {OPT_IN})"


def unified_lines(before: Sequence[str], after: Sequence[str], context: int) -> Iterator[str]:
    """Yield the lines of a unified diff without a file header; the input lines have no line ends."""
    for group in PatienceMatcher(before, after).get_grouped_opcodes(context):
        yield f"@@ -{_range(group[0][1], group[-1][2])} +{_range(group[0][3], group[-1][4])} @@"
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                yield from (f" {line}" for line in before[i1:i2])
            else:
                yield from (f"-{line}" for line in before[i1:i2])
                yield from (f"+{line}" for line in after[j1:j2])


def _lines(source: bytes) -> list[str]:
    """Split text as git and patch do: only a line feed ends a line."""
    return list(io.StringIO(decoded(source), newline="\n"))


def _scopes(source: bytes) -> list[tuple[int, int, str]]:
    """Return the first and last line, from 1 on, and the qualified name of each function and class, outer ones first.

    Empty if the source is not Python of this interpreter.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # about escapes in vLLM's strings
        try:
            module = ast.parse(source)
        except UNREADABLE:
            return []
    found: list[tuple[int, int, str]] = []
    waiting: list[tuple[ast.AST, str]] = [(module, "")]
    while waiting:
        node, prefix = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found.append((first, child.end_lineno or first, prefix + child.name))
                waiting.append((child, f"{prefix}{child.name}."))
            elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                waiting.append((child, prefix))
    return sorted(found)


def _hunks(
    before: list[str], after: list[str], scopes: list[tuple[int, int, str]], note: Callable[[Hunk], str]
) -> Iterator[str]:
    for tag, i1, i2, j1, j2 in PatienceMatcher(before, after).get_opcodes():
        if tag != "equal":
            line = j1 + 1 if j2 > j1 else j1
            name = next((f" {name}" for first, last, name in reversed(scopes) if first <= line <= last), "")
            end = note(
                Hunk(
                    line,
                    tuple(text.rstrip("\n") for text in before[i1:i2]),
                    tuple(text.rstrip("\n") for text in after[j1:j2]),
                )
            )
            yield f"@@ -{_range(i1, i2)} +{_range(j1, j2)} @@{name}{end}\n"
            yield from _marked("-", before[i1:i2])
            yield from _marked("+", after[j1:j2])


def _range(start: int, end: int) -> str:
    """Format a range of lines; an empty range names the line before it."""
    return f"{start + 1 if end > start else start},{end - start}"


def _marked(sign: str, lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"{sign}{line}" if line.endswith("\n") else f"{sign}{line}\n\\ No newline at end of file\n"
