"""Find code that resembles what a failed rule looked for, for its report."""

from __future__ import annotations

import difflib
import functools
from typing import TYPE_CHECKING, cast

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from transforms.engine.report import Candidate
from transforms.engine.scope import definitions, statements
from transforms.engine.tree import code_of, get

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transforms.engine.tree import Path

SHOWN = 3


def places(module: cst.Module, paths: Sequence[Path]) -> tuple[Candidate, ...]:
    """Return the nodes at some paths with their line numbers."""
    lines = _line_numbers(module) if paths else {}
    return tuple(_candidate(lines, get(module, path)) for path in paths[: SHOWN + 2])


def nearest_statements(module: cst.Module, scope: Path, anchor: str) -> tuple[Candidate, ...]:
    """Return the statements in a scope, or else in the module, whose text is most similar to an anchor."""
    for root in (get(module, scope), module):
        texts = {_first_line(node): node for _, node in statements(root)}
        names = difflib.get_close_matches(anchor, texts, n=SHOWN, cutoff=0.45)
        if names:
            lines = _line_numbers(module)
            return tuple(_candidate(lines, texts[name]) for name in names)
    return ()


def nearest_definitions(module: cst.Module, name: str) -> tuple[Candidate, ...]:
    """Return the classes and functions whose names are most similar to a scope's."""
    found = dict(definitions(module))
    names = difflib.get_close_matches(name, found, n=SHOWN, cutoff=0.5)
    return places(module, [found[name] for name in names])


def _first_line(node: cst.CSTNode) -> str:
    """Return a node's first line, without the comments and decorators before it."""
    bare = node
    if isinstance(node, cst.ClassDef | cst.FunctionDef):
        bare = node.with_changes(leading_lines=(), decorators=(), lines_after_decorators=())
    elif isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement):
        bare = node.with_changes(leading_lines=())
    return code_of(bare).partition("\n")[0]


def _candidate(lines: dict[int, int], node: cst.CSTNode) -> Candidate:
    return Candidate(lines.get(id(node), 0), _first_line(node))


# One search takes longer than all rules of a module. Those that fail are told of the published module and of the one
# that earlier rules have changed; each is held with its numbers, so that no other node gets the identity of one of its.
@functools.lru_cache(maxsize=2)
def _line_numbers(module: cst.Module) -> dict[int, int]:
    positions = MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)
    return {
        id(node): position.start.line
        for node, position in cast("dict[cst.CSTNode, cst.metadata.CodeRange]", positions).items()
    }
