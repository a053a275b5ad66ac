"""The closed set of changes that a rule can make: each inserts, none removes.

An edit finds the nodes that it attaches to inside a scope, and rebuilds the scope's root with its insertion at one of
them. What it inserts carries the rule's mark, a trailing ``# ucm: <rule id>``, wherever the layout has room for one:
the reader of a rewritten module can look any line up, and a second run recognises its own work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, cast

import libcst as cst

from transforms.engine.errors import RuleDefinitionError
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

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        place = _own_statement(scope, path) if self.level == "outer" else enclosing_statement(scope, path)
        if place is None:
            raise RuleDefinitionError("an anchor does not lie in a statement", where=rule, fix=self.anchor)
        block, index = place
        return insert_statements(scope, block, index + (self.side == "after"), _statements(self.code, rule))


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
    anchor: str = "..."

    def find(self, scope: cst.CSTNode) -> list[Path]:
        return [_body_path(scope)]

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        return _count_marked(scope, self.code, rule)

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
    anchor: str = "..."

    def find(self, scope: cst.CSTNode) -> list[Path]:
        path = _body_path(scope)
        body = cast("cst.IndentedBlock", get(scope, path)).body
        return [] if _leaves(body[-1]) else [path]

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        return _count_marked(scope, self.code, rule)

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
        calls = (cast("cst.Call", get(scope, path)) for path in self.find(scope))
        return sum(any(a.keyword is not None and code_of(a).startswith(self.code) for a in c.args) for c in calls)

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        call = cast("cst.Call", get(scope, path))
        argument = cst.Arg(
            keyword=cst.Name(self.name),
            value=cst.parse_expression(self.value),
            equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
        )
        return replace(scope, path, call.with_changes(args=_appended(call, argument, rule)))


@dataclass(frozen=True)
class Parameter:
    """One more parameter of a function, the last that can be passed by position, with a default."""

    code: str
    anchor: str = "def"

    def find(self, scope: cst.CSTNode) -> list[Path]:
        return [()] if isinstance(scope, cst.FunctionDef) else []

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        wanted = self._parsed().name.value
        return sum(isinstance(n, cst.Param) and n.name.value == wanted for _, n in walk(scope))

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        function = cast("cst.FunctionDef", scope)
        layout = function.params.params[-1].comma
        last = function.params.params[-1].with_changes(comma=_comma_like(function.params.params))
        added = self._parsed().with_changes(comma=_marked_comma(layout, rule))
        return function.with_deep_changes(function.params, params=[*function.params.params[:-1], last, added])

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
    anchor: str = "class"

    def find(self, scope: cst.CSTNode) -> list[Path]:
        if not isinstance(scope, cst.ClassDef):
            return []
        body = scope.body.body
        last = max((i for i, s in enumerate(body) if _is_field(s)), default=None)
        return [] if last is None else [(("body", None), ("body", last))]

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        return _count_marked(scope, self.code, rule)

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
    elif isinstance(node, cst.BaseCompoundStatement) and isinstance(node.body, cst.IndentedBlock):
        comment = node.body.header.comment
    else:
        return None
    return comment.value if comment else None


def _own_statement(scope: cst.CSTNode, path: Path) -> tuple[Path, int] | None:
    """The statement of the scope's own body that holds the node at a path."""
    body = _body_path(scope)
    name, index = path[len(body)]
    return (body, index) if name == "body" and index is not None else None


def _body_path(scope: cst.CSTNode) -> Path:
    return () if isinstance(scope, cst.Module) else (("body", None),)


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


def _leaves(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[-1], cst.Return | cst.Raise)


def _is_field(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.AnnAssign)


def _appended(call: cst.Call, argument: cst.Arg, rule: str) -> list[cst.Arg]:
    """The call's arguments with one more, laid out as the call is."""
    if not call.args:
        return [argument]
    *rest, last = call.args
    return [
        *rest,
        last.with_changes(comma=_comma_like(call.args), whitespace_after_arg=cst.SimpleWhitespace("")),
        argument.with_changes(
            comma=_marked_comma(last.comma, rule),
            whitespace_after_arg=last.whitespace_after_arg,
        ),
    ]


def _comma_like(items: tuple[cst.Arg, ...] | list[cst.Arg] | object) -> cst.Comma:
    """The comma that separates the items already there: on one line, or one line each."""
    sequence = cast("list[cst.Arg]", items)
    if len(sequence) > 1 and isinstance(sequence[-2].comma, cst.Comma):
        comma = sequence[-2].comma
        if isinstance(comma.whitespace_after, cst.ParenthesizedWhitespace):
            plain = comma.whitespace_after.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=())
            return comma.with_changes(whitespace_after=plain)
        return comma
    return cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def _marked_comma(last: cst.Comma | cst.MaybeSentinel, rule: str) -> cst.Comma | cst.MaybeSentinel:
    """The comma after the added item: where the closing bracket has its own line, there is room for the mark."""
    if isinstance(last, cst.Comma) and isinstance(last.whitespace_after, cst.ParenthesizedWhitespace):
        comment = cst.TrailingWhitespace(whitespace=cst.SimpleWhitespace("  "), comment=cst.Comment(MARK + rule))
        space = last.whitespace_after.with_changes(first_line=comment, empty_lines=())
        return last.with_changes(whitespace_after=space)
    return last
