"""The edits that insert statements. No edit removes code.

An edit finds the nodes in a scope that it attaches to, and rebuilds the scope with its insertion at one of them.
`transforms.engine.members` has the edits that insert arguments, parameters, fields and methods.
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
        """The source text of the node to attach to; the search for candidates uses it."""

    @property
    def code(self) -> str:
        """The inserted source."""

    def find(self, scope: cst.CSTNode) -> list[Path]:
        """Return the paths, relative to the scope, of the nodes that it attaches to."""

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        """Return how often the scope already has this rule's insertion."""

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        """Return why nothing can be inserted at a found path; empty if it can."""

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        """Return the scope with the insertion at a found path."""


@dataclass(frozen=True)
class Beside:
    """Insert statements before or after the statement that contains the anchor.

    Attributes:
        anchor: A pattern: a statement, or an expression in one.
        code: The statements to insert.
        side: ``before`` or ``after``.
        level: ``inner`` attaches to the innermost statement around the match, ``outer`` to the statement around it in
            the scope's own body (for instance the ``if`` that guards the match).
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
            return "it is not alone on its lines in a block"
        if self.side == "after" and leaves(get(scope, _statement_path(place))):
            return "control never gets past it"
        return ""

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        block, index = cast("tuple[Path, int]", self._place(scope, path))
        return insert_statements(scope, block, index + (self.side == "after"), marked_statements(self.code, rule))

    def statement(self, scope: cst.CSTNode, path: Path) -> Path:
        """Return the path, relative to the scope, of the statement next to which an insertion goes."""
        return _statement_path(cast("tuple[Path, int]", self._place(scope, path)))

    def _place(self, scope: cst.CSTNode, path: Path) -> tuple[Path, int] | None:
        """Return the block and the statement's index in it, if the match is alone in that statement."""
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
    """Insert statements at the start of a function, after its docstring; in a module, before its first real import."""

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
    """Append statements to a function that ends without a ``return``."""

    code: str
    anchor: str = "its end"

    def find(self, scope: cst.CSTNode) -> list[Path]:
        return [_body_path(scope)]

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        return count_marked(scope, self.code, rule)

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        body = cast("cst.IndentedBlock", get(scope, path)).body
        if _one_line_body(scope, path) or any(map(leaves, body)):
            return _one_line_body(scope, path) or "control never reaches its end"
        return "the function may return before its end" if returns(get(scope, path)) else ""

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        length = len(cast("cst.IndentedBlock", get(scope, path)).body)
        return insert_statements(scope, path, length, marked_statements(self.code, rule))


def _own_statement(scope: cst.CSTNode, path: Path) -> tuple[Path, int] | None:
    """Return the statement of the scope's own body that contains the node at a path."""
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
    """Return whether the node at a path is in a one-line suite or an ``elif`` of the statement around it."""
    below = (get(scope, path[:length]) for length in range(len(statement) + 1, len(path) + 1))
    return any(isinstance(node, cst.SimpleStatementSuite | cst.If) for node in below)


def _body_path(scope: cst.CSTNode) -> Path:
    return () if isinstance(scope, cst.Module) else (("body", None),)


def _one_line_body(scope: cst.CSTNode, path: Path) -> str:
    return "its body is on one line" if isinstance(get(scope, path), cst.SimpleStatementSuite) else ""


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
