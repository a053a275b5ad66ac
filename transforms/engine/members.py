"""The edits that insert a keyword argument, a parameter, a dataclass field or a method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import libcst as cst

from transforms.engine.arguments import appended
from transforms.engine.errors import RuleDefinitionError
from transforms.engine.marks import MARK, count_marked, marked_statements
from transforms.engine.patterns import pattern
from transforms.engine.tree import code_of, get, insert_statements, replace

if TYPE_CHECKING:
    from transforms.engine.tree import Path


@dataclass(frozen=True)
class Keyword:
    """Add a keyword argument to a call."""

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
            return f"it already passes {self.name}"
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
    """Add a parameter with a default to a function, as the last positional one."""

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
    """Add a field with a default to a dataclass, after its last field."""

    code: str
    anchor: str = "its fields"

    def find(self, scope: cst.CSTNode) -> list[Path]:
        if not isinstance(scope, cst.ClassDef):
            return []
        body = scope.body.body
        last = max((i for i, s in enumerate(body) if _is_field(s)), default=None)
        return [] if last is None else [(("body", None), ("body", last))]

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        return count_marked(scope, self.code, rule)

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        return ""

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        index = cast("int", path[-1][1])
        return insert_statements(scope, path[:-1], index + 1, marked_statements(self.code, rule))


@dataclass(frozen=True)
class Method:
    """Add a method to a class, after the method that the anchor names."""

    anchor: str
    code: str

    def find(self, scope: cst.CSTNode) -> list[Path]:
        if not isinstance(scope, cst.ClassDef):
            return []
        body = scope.body.body
        named = (i for i, s in enumerate(body) if isinstance(s, cst.FunctionDef) and s.name.value == self.anchor)
        return [(("body", None), ("body", i)) for i in named]

    def applied(self, scope: cst.CSTNode, rule: str) -> int:
        return count_marked(scope, self.code, rule)

    def obstacle(self, scope: cst.CSTNode, path: Path) -> str:
        return ""

    def apply(self, scope: cst.CSTNode, path: Path, rule: str) -> cst.CSTNode:
        method = cst.ensure_type(marked_statements(self.code, rule)[0], cst.FunctionDef)
        spaced = method.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        index = cast("int", path[-1][1])
        return insert_statements(scope, path[:-1], index + 1, [spaced])


def _is_field(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(statement.body[0], cst.AnnAssign)
