"""Patterns that read like the code they match.

A pattern is Python source that matches by structure, whatever the layout, comments, quotes and parentheses. Two tokens
are wildcards: ``_`` matches any expression, ``...`` matches any further arguments or, as a body, any statements.
Keyword arguments match in any order.

    self.kv_cache_manager.allocate_slots(request, ...)
    for req_id in scheduler_output.finished_req_ids: ...
    request = self.running[req_index]
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import libcst as cst

from transforms.engine.errors import RuleDefinitionError
from transforms.engine.tree import code_fields, find

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transforms.engine.tree import Path


class Pattern:
    """A compiled pattern.

    Args:
        text: One expression or one statement.

    Raises:
        RuleDefinitionError: If the text is neither.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._node = _parse(text)
        self._type = type(self._node)

    def matches(self, node: cst.CSTNode) -> bool:
        """Return whether the pattern matches this node itself."""
        return type(node) is self._type and _same(self._node, node)

    def find(self, root: cst.CSTNode) -> list[Path]:
        """Return the paths of all matches at or below a node."""
        return find(root, self._type, self.matches)


@functools.cache
def pattern(text: str) -> Pattern:
    """Compile a pattern; cached."""
    return Pattern(text)


def _parse(text: str) -> cst.CSTNode:
    try:
        return cst.parse_expression(text)
    except cst.ParserSyntaxError:
        pass
    try:
        statement = cst.parse_statement(text)
    except cst.ParserSyntaxError as error:
        raise RuleDefinitionError(
            "a pattern is neither an expression nor a statement", where=repr(text), fix=error.message
        ) from None
    if not isinstance(statement, cst.SimpleStatementLine):
        return statement
    if len(statement.body) != 1:
        raise RuleDefinitionError("a pattern is not one statement", where=repr(text))
    return statement.body[0]


def _same(wanted: object, found: object) -> bool:
    if isinstance(wanted, cst.Name) and wanted.value == "_":
        return isinstance(found, cst.BaseExpression)
    if isinstance(wanted, cst.BaseSuite) and isinstance(found, cst.BaseSuite):
        return _is_ellipsis(wanted) or _same(_statements(wanted), _statements(found))
    if type(wanted) is not type(found):
        return False
    if isinstance(wanted, cst.Call) and isinstance(found, cst.Call):
        return _same(wanted.func, found.func) and _same_arguments(wanted.args, found.args)
    if isinstance(wanted, cst.SimpleString) and isinstance(found, cst.SimpleString):
        return wanted.evaluated_value == found.evaluated_value
    if isinstance(wanted, cst.CSTNode):
        return _same_fields(wanted, found)
    if isinstance(wanted, tuple | list) and isinstance(found, tuple | list):
        return len(wanted) == len(found) and all(map(_same, wanted, found))
    return wanted == found


def _statements(suite: cst.BaseSuite) -> list[cst.CSTNode]:
    """Return the statements of a suite, also those that share a line."""
    return [s for line in suite.body for s in (line.body if isinstance(line, cst.SimpleStatementLine) else (line,))]


def _same_fields(wanted: cst.CSTNode, found: object) -> bool:
    return all(_same(getattr(wanted, name), getattr(found, name)) for name in code_fields(type(wanted)))


def _same_arguments(wanted: Sequence[cst.Arg], found: Sequence[cst.Arg]) -> bool:
    open_ended = any(_is_ellipsis(arg.value) for arg in wanted)
    fixed = [arg for arg in wanted if not _is_ellipsis(arg.value)]
    if not open_ended and len(fixed) != len(found):
        return False
    positional = [arg for arg in found if arg.keyword is None]
    named = {arg.keyword.value: arg for arg in found if arg.keyword is not None}
    return all(_same_argument(arg, counterpart) for arg, counterpart in _pair(fixed, positional, named))


def _pair(
    wanted: Sequence[cst.Arg], positional: Sequence[cst.Arg], named: dict[str, cst.Arg]
) -> Iterator[tuple[cst.Arg, cst.Arg | None]]:
    """Pair each wanted argument with the one found at its position, or under its keyword."""
    rest = iter(positional)
    for arg in wanted:
        yield arg, (next(rest, None) if arg.keyword is None else named.get(arg.keyword.value))


def _same_argument(wanted: cst.Arg, found: cst.Arg | None) -> bool:
    return found is not None and wanted.star == found.star and _same(wanted.value, found.value)


def _is_ellipsis(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.IndentedBlock | cst.SimpleStatementSuite | cst.SimpleStatementLine):
        return len(node.body) == 1 and _is_ellipsis(node.body[0])
    if isinstance(node, cst.Expr):
        return _is_ellipsis(node.value)
    return isinstance(node, cst.Ellipsis)
