"""Scopes: the class, function or loop in which a rule searches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import libcst as cst

from transforms.engine.patterns import pattern
from transforms.engine.tree import Path, get, walk

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Compound statements whose bodies belong to the class or module around them.
TRANSPARENT = (cst.If, cst.Else, cst.Try, cst.ExceptHandler, cst.Finally, cst.With)


@dataclass(frozen=True)
class Scope:
    """A region of a module.

    Attributes:
        name: ``Class.function``, ``function`` or ``Class``; empty for the whole module.
        loop_with: A statement in a loop within ``name``: the region is the innermost loop around it.
    """

    name: str = ""
    loop_with: str = ""

    def __str__(self) -> str:
        place = self.name or "the module"
        return f"{place}, the loop with `{self.loop_with}`" if self.loop_with else place

    def find(self, module: cst.Module) -> list[Path]:
        """Return the paths of the regions that match; a rule needs exactly one."""
        paths: list[Path] = [()]
        for name in filter(None, self.name.split(".")):
            paths = [(*p, *q) for p in paths for q in _definitions(get(module, p), name)]
        if self.loop_with:
            paths = [(*p, *q) for p in paths for q in _loops(get(module, p), self.loop_with)]
        return paths


def definitions(module: cst.Module) -> Iterator[tuple[str, Path]]:
    """Yield the qualified names of a module's classes, methods and functions with their paths."""
    for path, node in _members(module):
        name = node.name.value
        yield name, path
        if isinstance(node, cst.ClassDef):
            for below, member in _members(node):
                yield f"{name}.{member.name.value}", (*path, *below)


def _definitions(node: cst.CSTNode, name: str) -> list[Path]:
    return [path for path, member in _members(node) if member.name.value == name]


def _members(node: cst.CSTNode, path: Path = ()) -> Iterator[tuple[Path, cst.ClassDef | cst.FunctionDef]]:
    """Yield the classes and functions that a module or class defines directly, or under an ``if`` or ``try``."""
    for step_path, statement in _statements(node, path):
        if isinstance(statement, cst.ClassDef | cst.FunctionDef):
            yield step_path, statement
        elif isinstance(statement, TRANSPARENT):
            yield from _members(statement, step_path)


def _statements(node: cst.CSTNode, path: Path) -> Iterator[tuple[Path, cst.CSTNode]]:
    body = getattr(node, "body", None)
    if isinstance(body, cst.IndentedBlock):
        yield from ((((*path, ("body", None), ("body", i))), s) for i, s in enumerate(body.body))
    elif isinstance(node, cst.Module):
        yield from (((*path, ("body", i)), s) for i, s in enumerate(node.body))
    for name in ("orelse", "handlers", "finalbody"):
        value = getattr(node, name, None)
        if isinstance(value, cst.CSTNode):
            yield (*path, (name, None)), value
        elif isinstance(value, tuple | list):
            yield from (((*path, (name, i)), v) for i, v in enumerate(value))


def _loops(node: cst.CSTNode, statement: str) -> list[Path]:
    found = []
    for path in pattern(statement).find(node):
        loops = [p for p in _prefixes(path) if isinstance(get(node, p), cst.For | cst.While)]
        if loops and loops[-1] not in found:
            found.append(loops[-1])
    return found


def _prefixes(path: Path) -> Iterator[Path]:
    return (path[:length] for length in range(1, len(path)))


def statements(node: cst.CSTNode) -> Iterator[tuple[Path, cst.CSTNode]]:
    """Yield all statements at or below a node, each with its path."""
    for path, found in walk(node):
        if isinstance(found, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            yield path, found
