"""The closed set of changes that a rule can make: each inserts, none removes.

An edit finds the nodes that it attaches to inside a scope, and rebuilds the scope's root with its insertion at one of
them. What it inserts carries the rule's mark, a trailing ``# ucm: <rule id>``, wherever the layout has room for one:
the reader of a rewritten module can look any line up, and a second run recognises its own work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast

import libcst as cst

from transforms.engine.arguments import appended
from transforms.engine.errors import RuleDefinitionError
from transforms.engine.flow import leaves
from transforms.engine.patterns import pattern
from transforms.engine.tree import code_of, enclosing_statement, get, insert_statements, replace, walk

if TYPE_CHECKING:
    from transforms.engine.tree import Path

MARK = "# ucm: "


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
        return _count_marked(scope, self.code, rule)

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        place = self._place(scope, path)
        if place is None:
            return "it does not stand on lines of its own in a block"
        if self.side == "after" and leaves(get(scope, _statement_path(place))):
            return "control never gets past it"
        return ""

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        block, index = cast("tuple[Path, int]", self._place(scope, path))
        return insert_statements(scope, block, index + (self.side == "after"), _statements(self.code, rule))

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
        return _count_marked(scope, self.code, rule)

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        return _one_line_body(scope, path)

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        body = cast("cst.IndentedBlock | cst.Module", get(scope, path)).body
        index = 0
        while index < len(body) and (_is_docstring(body[index]) or _is_future_import(body[index])):
            index += 1
        return insert_statements(scope, path, index, _statements(self.code, rule))


@dataclass(frozen=True)
class AtEnd:
    """Statements at the end of a function that falls off its end."""

    code: str
    anchor: str = "its end"

    def find(self, scope: cst.CSTNode) -> list[Path]:
        return [_body_path(scope)]

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        return _count_marked(scope, self.code, rule)

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        body = cast("cst.IndentedBlock", get(scope, path)).body
        return _one_line_body(scope, path) or ("control never gets there" if any(map(leaves, body)) else "")

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        length = len(cast("cst.IndentedBlock", get(scope, path)).body)
        return insert_statements(scope, path, length, _statements(self.code, rule))


@dataclass(frozen=True)
class Keyword:
    """One more keyword argument of a call."""

    anchor: str
    name: str
    value: str

    @property
    def code(self) -> str:
        return f"{self.name}={self.value}"

    def find(self, scope: cst.CSTNode) -> list[Path]:
        return pattern(self.anchor).find(scope)

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        value = code_of(cst.parse_expression(self.value))
        return sum(code_of(a.value) == value for path in self.find(scope) for a in self._given(get(scope, path)))

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        call = cast("cst.Call", get(scope, path))
        if self._given(call):
            return f"it gives {self.name} already"
        bare = (a for a in call.args if isinstance(a.value, cst.GeneratorExp) and not a.value.lpar)
        return "its only argument is a generator without brackets" if any(bare) else ""

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        call = cast("cst.Call", get(scope, path))
        argument = cst.Arg(
            keyword=cst.Name(self.name),
            value=cst.parse_expression(self.value),
            equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
        )
        arguments = appended(call.args, argument, call.whitespace_before_args, MARK + rule)
        return replace(scope, path, call.with_changes(args=arguments))

    def _given(self, call: cst.CSTNode) -> list[cst.Arg]:
        arguments = cast("cst.Call", call).args
        return [a for a in arguments if a.keyword is not None and a.keyword.value == self.name]


@dataclass(frozen=True)
class Parameter:
    """One more parameter of a function, the last that can be passed by position, with a default."""

    code: str
    anchor: str = "its parameters"

    def find(self, scope: cst.CSTNode) -> list[Path]:
        return [()] if isinstance(scope, cst.FunctionDef) else []

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        if not isinstance(scope, cst.FunctionDef):
            return 0
        wanted, given = self._parsed().name.value, scope.params
        return sum(p.name.value == wanted for p in (*given.posonly_params, *given.params, *given.kwonly_params))

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        rest = cast("cst.FunctionDef", scope).params.star_arg
        return f"it would take what callers pass to *{rest.name.value}" if isinstance(rest, cst.Param) else ""

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        function = cast("cst.FunctionDef", scope)
        given = function.params
        parameters = appended(given.params, self._parsed(), function.whitespace_before_params, MARK + rule)
        return function.with_changes(params=given.with_changes(params=parameters))

    def _parsed(self) -> cst.Param:
        function = cst.ensure_type(cst.parse_statement(f"def f({self.code}): ..."), cst.FunctionDef)
        parameter = function.params.params[0]
        if parameter.default is None:
            raise RuleDefinitionError("an inserted parameter has no default", where=self.code)
        return parameter


@dataclass(frozen=True)
class Field:
    """One more field of a dataclass, with a default, after its last field."""

    code: str
    anchor: str = "its fields"

    def find(self, scope: cst.CSTNode) -> list[Path]:
        if not isinstance(scope, cst.ClassDef):
            return []
        body = scope.body.body
        last = max((i for i, s in enumerate(body) if _is_field(s)), default=None)
        return [] if last is None else [(("body", None), ("body", last))]

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        return _count_marked(scope, self.code, rule)

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        return ""

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        index = cast("int", path[-1][1])
        return insert_statements(scope, path[:-1], index + 1, _statements(self.code, rule))


@dataclass(frozen=True)
class Method:
    """One more method of a class, after the method that the anchor names."""

    anchor: str
    code: str

    def find(self, scope: cst.CSTNode) -> list[Path]:
        if not isinstance(scope, cst.ClassDef):
            return []
        body = scope.body.body
        named = (i for i, s in enumerate(body) if isinstance(s, cst.FunctionDef) and s.name.value == self.anchor)
        return [(("body", None), ("body", i)) for i in named]

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        return _count_marked(scope, self.code, rule)

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        return ""

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        method = cst.ensure_type(_statements(self.code, rule)[0], cst.FunctionDef)
        spaced = method.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        index = cast("int", path[-1][1])
        return insert_statements(scope, path[:-1], index + 1, [spaced])


def _statements(code: str, rule: str) -> list[cst.BaseStatement]:
    """Parse what is to be inserted; its first line carries the mark."""
    body: list[cst.BaseStatement] = list(cst.parse_module(code).body)
    comment = cst.TrailingWhitespace(whitespace=cst.SimpleWhitespace("  "), comment=cst.Comment(MARK + rule))
    head = body[0]
    if isinstance(head, cst.SimpleStatementLine):
        body[0] = head.with_changes(trailing_whitespace=comment)
    else:
        suite = cst.ensure_type(cast("cst.BaseCompoundStatement", head).body, cst.IndentedBlock)
        body[0] = head.with_changes(body=suite.with_changes(header=comment))
    return body


def _count_marked(scope: cst.CSTNode, code: str, rule: str) -> int:
    """How many statements in the scope carry the rule's mark and are what it would insert."""
    wanted = code_of(_statements(code, rule)[0])
    return sum(code_of(n) == wanted for _, n in walk(scope) if _mark_of(n) == MARK + rule)


def _mark_of(node: cst.CSTNode) -> str | None:
    if isinstance(node, cst.SimpleStatementLine):
        comment = node.trailing_whitespace.comment
    elif isinstance(suite := getattr(node, "body", None), cst.IndentedBlock):
        comment = suite.header.comment
    else:
        return None
    return comment.value if comment else None


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


def _is_field(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.AnnAssign)
