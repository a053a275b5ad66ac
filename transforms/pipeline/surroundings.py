"""Show what changed in the function around each insertion since the previous reviewed release.

A rule's anchor can stay the same while the code around it changes its meaning: another loop, an early return, a second
path. The comparison is of vLLM's own text in the two releases.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transforms.engine.marks import decoded
from transforms.engine.report import Status
from transforms.pipeline.census import scope_names
from transforms.pipeline.diff import unified_lines
from transforms.pipeline.lock import read_lock
from transforms.pipeline.sources.open import open_sources
from transforms.pipeline.sources.tree import SourceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transforms.pipeline.rewrite import Overlay
    from transforms.pipeline.sources.tree import Opener

CONTEXT = 3
#: The number of diff lines per function that a terminal shows; a page shows all.
SHORT = 24


@dataclass(frozen=True)
class Surrounding:
    """The function or class around a rule's insertion, and what changed in it.

    Attributes:
        name: Its qualified name.
        name_before: The qualified name of the one before; empty if the rule was not inserted.
        diff: The changes, as lines of a unified diff without its header; empty if there are none.
    """

    name: str
    name_before: str
    diff: tuple[str, ...]

    @property
    def added(self) -> int:
        """The number of added lines."""
        return sum(line.startswith("+") for line in self.diff)

    @property
    def removed(self) -> int:
        """The number of removed lines."""
        return sum(line.startswith("-") for line in self.diff)

    def summary(self, since: str) -> str:
        """Summarise the changes in a few words.

        Args:
            since: The previous reviewed release.
        """
        if not self.name_before:
            return f"{self.name}: no rule was here in {since}"
        was = f" (was {self.name_before})" if self.name_before != self.name else ""
        if not self.diff:
            return f"{self.name}{was}: the same text as in {since}"
        return f"{self.name}{was}: +{self.added} -{self.removed} lines since {since}"

    def shortened(self) -> list[str]:
        """Return the part of the diff that a terminal shows."""
        rest = len(self.diff) - SHORT
        return [*self.diff[:SHORT], *([f"… {rest} more lines: the review page shows them"] if rest > 0 else [])]


@dataclass(frozen=True)
class Surroundings:
    """The functions and classes around all insertions of an overlay.

    Attributes:
        since: The reviewed release to which they are compared; empty if there is none.
        rules: By rule, for those inserted in a function or class.
        problem: Why the comparison failed; empty if it did not, or there is nothing to compare with.
    """

    since: str
    rules: dict[str, Surrounding]
    problem: str = ""

    def distinct(self, rules: Sequence[str]) -> list[Surrounding]:
        """Return the functions and classes around some rules, each once."""
        return list(dict.fromkeys(self.rules[rule] for rule in rules if rule in self.rules))


def surroundings(
    overlay: Overlay,
    since: str,
    opened: Opener = open_sources,
) -> Surroundings:
    """Compare the functions around an overlay's insertions with those of the previous reviewed release.

    Args:
        overlay: The overlay.
        since: The previous reviewed release; empty for none.
        opened: Opens the sources of a release.
    """
    lock = read_lock(since, overlay.product) if since else None
    if lock is None:
        return Surroundings("", {})
    names = scope_names(overlay.product)
    before = {
        rule["id"]: (module["path"], names.get((rule["id"], rule.get("variant", "")), ""))
        for module in lock["modules"]
        for rule in module["rules"]
    }
    try:
        texts = opened(since, package=overlay.product.package).read_many(
            sorted({path for path, name in before.values() if name})
        )
    except SourceError as error:
        return Surroundings(since, {}, str(error))
    was = {path: definitions(source) for path, source in texts.items()}
    found = {}
    for module in overlay.modules:
        now = definitions(module.upstream)
        for outcome in module.outcomes:
            name = names.get((outcome.rule, outcome.variant), "")
            if outcome.status is Status.APPLIED and name:
                path, old = before.get(outcome.rule, ("", ""))
                lines = was[path].get(old, []) if old else []
                found[outcome.rule] = Surrounding(
                    name, old, tuple(unified_lines(lines, now.get(name, []), CONTEXT)) if old else ()
                )
    return Surroundings(since, found)


def definitions(source: bytes) -> dict[str, list[str]]:
    """Return the lines of every class and function, including decorators, by qualified name; the last one counts."""
    lines = decoded(source).split("\n")
    found: dict[str, list[str]] = {}
    waiting: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    while waiting:
        prefix, parent = waiting.pop(0)
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found[f"{prefix}{node.name}"] = lines[first - 1 : node.end_lineno]
                if isinstance(node, ast.ClassDef):
                    waiting.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                waiting.append((prefix, node))
    return found
