"""The changes that a rule can make: each inserts, none removes. Here are those that insert statements.

An edit finds the nodes that it attaches to inside a scope, and rebuilds the scope's root with its insertion at one of
them. `transforms.engine.members` has the edits that insert arguments, parameters, fields and methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast

import libcst as cst

from transforms.engine.flow import leaves, returns
from transforms.engine.marks import count_marked, marked_statements
from transforms.engine.patterns import pattern
from transforms.engine.tree import enclosing_statement, get, insert_statements

if TYPE_CHECKING:
    from transforms.engine.tree import Path


class Edit(Protocol):
    """One kind of insertion."""

    @property
    def anchor(self) -> str:
        """What it attaches to, as a person would write it; used to look for candidates."""

    @property
    def code(self) -> str:
        """What it inserts."""

    def find(self, scope: cst.CSTNode) -> list[Path]:
        """The paths, inside the scope, of the nodes that it attaches to."""

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        """How often this rule's insertion is there already."""

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        """Why nothing can be inserted at one of the found paths; empty if it can."""

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        """The scope with the insertion at one of the found paths."""


@dataclass(frozen=True)
class Beside:
    """Statements before or after the statement that holds the anchor.

    Attributes:
        anchor: A pattern: a statement, or an expression that one holds.
        code: The statements to insert.
        side: ``before`` or ``after``.
        level: ``inner`` attaches to the innermost statement around the match, ``outer`` to the statement of the
            scope's own body around it (past the ``if`` that guards the match, say).
    """

    anchor: str
    code: str
    side: Literal["before", "after"]
    level: Literal["inner", "outer"] = "inner"

    def find(self, scope: cst.CSTNode) -> list[Path]:
        return pattern(self.anchor).find(scope)

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        return count_marked(scope, self.code, rule)

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        place = self._place(scope, path)
        if place is None:
            return "it does not stand on lines of its own in a block"
        if self.side == "after" and leaves(get(scope, _statement_path(place))):
            return "control never gets past it"
        return ""

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        block, index = cast("tuple[Path, int]", self._place(scope, path))
        return insert_statements(scope, block, index + (self.side == "after"), marked_statements(self.code, rule))

    def _place(self, scope: cst.CSTNode, path: Path) -> tuple[Path, int] | None:
        """The block and the index of the statement in it, if the match has that statement to itself."""
        outer = self.level == "outer"
        place = _own_statement(scope, path) if outer else enclosing_statement(scope, path)
        if place is None or _shares_line(get(scope, _statement_path(place))):
            return None
        return place if outer or not _is_conditional(scope, path, _statement_path(place)) else None


def before(anchor: str, code: str, level: Literal["inner", "outer"] = "inner") -> Beside:
    """Insert statements before the one that holds the anchor."""
    return Beside(anchor, code, "before", level)


def after(anchor: str, code: str, level: Literal["inner", "outer"] = "inner") -> Beside:
    """Insert statements after the one that holds the anchor."""
    return Beside(anchor, code, "after", level)


@dataclass(frozen=True)
class AtStart:
    """Statements at the start of a function, after its docstring; in a module, before its first real import."""

    code: str
    anchor: str = "its start"

    def find(self, scope: cst.CSTNode) -> list[Path]:
        return [_body_path(scope)]

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        return count_marked(scope, self.code, rule)

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        return _one_line_body(scope, path)

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        body = cast("cst.IndentedBlock | cst.Module", get(scope, path)).body
        index = 0
        while index < len(body) and (_is_docstring(body[index]) or _is_future_import(body[index])):
            index += 1
        return insert_statements(scope, path, index, marked_statements(self.code, rule))


@dataclass(frozen=True)
class AtEnd:
    """Statements at the end of a function that falls off its end."""

    code: str
    anchor: str = "its end"

    def find(self, scope: cst.CSTNode) -> list[Path]:
        return [_body_path(scope)]

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        return count_marked(scope, self.code, rule)

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        body = cast("cst.IndentedBlock", get(scope, path)).body
        if _one_line_body(scope, path) or any(map(leaves, body)):
            return _one_line_body(scope, path) or "control never gets there"
        return "the function may return before its end" if returns(get(scope, path)) else ""

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        length = len(cast("cst.IndentedBlock", get(scope, path)).body)
        return insert_statements(scope, path, length, marked_statements(self.code, rule))


def _own_statement(scope: cst.CSTNode, path: Path) -> tuple[Path, int] | None:
    """The statement of the scope's own body that holds the node at a path."""
    body = _body_path(scope)
    if len(path) <= len(body) or path[: len(body)] != body:
        return None
    name, index = path[len(body)]
    is_block = isinstance(get(scope, body), cst.Module | cst.IndentedBlock)
    return (body, index) if is_block and name == "body" and index is not None else None


def _statement_path(place: tuple[Path, int]) -> Path:
    block, index = place
    return (*block, ("body", index))


def _shares_line(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and len(statement.body) > 1


def _is_conditional(scope: cst.CSTNode, path: Path, statement: Path) -> bool:
    """Whether the node at a path is part of a one-line suite or an ``elif`` of the statement around it."""
    below = (get(scope, path[:length]) for length in range(len(statement) + 1, len(path) + 1))
    return any(isinstance(node, cst.SimpleStatementSuite | cst.If) for node in below)


def _body_path(scope: cst.CSTNode) -> Path:
    return () if isinstance(scope, cst.Module) else (("body", None),)


def _one_line_body(scope: cst.CSTNode, path: Path) -> str:
    return "its body stands on one line" if isinstance(get(scope, path), cst.SimpleStatementSuite) else ""


def _is_docstring(statement: cst.CSTNode) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(statement.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )


def _is_future_import(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and any(
        isinstance(s, cst.ImportFrom) and isinstance(s.module, cst.Name) and s.module.value == "__future__"
        for s in statement.body
    )
