"""What changed in the function around each insertion since the reviewed release before.

A rule's anchor can stay as it is while the code around it changes its meaning: another loop, an early return, a second
path. What is compared here is vLLM's own text in the two releases.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
#: Lines that a terminal shows of one function's diff; a page shows all.
SHORT = 24


@dataclass(frozen=True)
class Surrounding:
    """The function, or class, around a rule's insertion, and what changed in it.

    Attributes:
        name: Its qualified name.
        name_before: The one that the rule had around it before; empty if the rule was not inserted.
        diff: What changed, as the lines of a unified diff without its header; empty if nothing did.
    """

    name: str
    name_before: str
    diff: tuple[str, ...]

    @property
    def added(self) -> int:
        """How many lines are new."""
        return sum(line.startswith("+") for line in self.diff)

    @property
    def removed(self) -> int:
        """How many lines are gone."""
        return sum(line.startswith("-") for line in self.diff)

    def summary(self, since: str) -> str:
        """What changed, in a few words.

        Args:
            since: The reviewed release before.
        """
        if not self.name_before:
            return f"{self.name}: no rule was here in {since}"
        was = f" (was {self.name_before})" if self.name_before != self.name else ""
        if not self.diff:
            return f"{self.name}{was}: the same text as in {since}"
        return f"{self.name}{was}: +{self.added} -{self.removed} lines since {since}"

    def shortened(self) -> list[str]:
        """The diff as far as a terminal shows it."""
        rest = len(self.diff) - SHORT
        return [*self.diff[:SHORT], *([f"… {rest} more lines: the review page shows them"] if rest > 0 else [])]


@dataclass(frozen=True)
class Surroundings:
    """What is around all insertions of an overlay.

    Attributes:
        since: The reviewed release that they are compared with; empty if there is none.
        rules: By rule, for those that stand in a function or class.
        problem: Why there is no comparison; empty if there is one, or nothing to compare with.
    """

    since: str
    rules: dict[str, Surrounding]
    problem: str = ""

    def distinct(self, rules: Sequence[str]) -> list[Surrounding]:
        """What is around some rules, each function once."""
        return list(dict.fromkeys(self.rules[rule] for rule in rules if rule in self.rules))


def surroundings(
    overlay: Overlay,
    since: str,
    opened: Opener = open_sources,
) -> Surroundings:
    """Compare the functions around an overlay's insertions with those of the reviewed release before.

    Args:
        overlay: The overlay.
        since: The reviewed release before; empty for none.
        opened: The sources of a release.
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
    """The lines of every class and function, decorators included, by qualified name; of several, the last."""
    lines = source.decode().split("\n")
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
