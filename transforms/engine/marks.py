"""The mark on inserted code: a trailing ``# ucm: <rule id>`` where the layout allows one.

It leads a reader from any inserted line to its rule, and lets a second run recognise its own insertions.
"""

from __future__ import annotations

import io
import tokenize
from typing import cast

import libcst as cst

from transforms.engine.tree import code_of, statement_nodes

MARK = "# ucm: "
#: What parsing Python can raise: a syntax, a null byte, an unknown encoding, and nesting that is too deep.
UNREADABLE = (SyntaxError, ValueError, LookupError, RecursionError, MemoryError)


def marked_statements(code: str, rule: str) -> list[cst.BaseStatement]:
    """Parse the code to insert, and mark its first line."""
    body: list[cst.BaseStatement] = list(cst.parse_module(code).body)
    comment = cst.TrailingWhitespace(whitespace=cst.SimpleWhitespace("  "), comment=cst.Comment(MARK + rule))
    head = body[0]
    if isinstance(head, cst.SimpleStatementLine):
        body[0] = head.with_changes(trailing_whitespace=comment)
    else:
        suite = cst.ensure_type(cast("cst.BaseCompoundStatement", head).body, cst.IndentedBlock)
        body[0] = head.with_changes(body=suite.with_changes(header=comment))
    return body


def count_marked(scope: cst.CSTNode, code: str, rule: str) -> int:
    """Return how many statements in the scope have the rule's mark and equal its insertion."""
    marked = [node for node in statement_nodes(scope) if _mark_of(node) == MARK + rule]
    if not marked:
        return 0
    wanted = code_of(marked_statements(code, rule)[0])
    return sum(code_of(node) == wanted for node in marked)


def _mark_of(node: cst.CSTNode) -> str | None:
    if isinstance(node, cst.SimpleStatementLine):
        comment = node.trailing_whitespace.comment
    elif isinstance(suite := getattr(node, "body", None), cst.IndentedBlock):
        comment = suite.header.comment
    else:
        return None
    return comment.value if comment else None


def decoded(source: bytes) -> str:
    """Return a module's text, in the encoding that it declares, without a byte order mark; line ends are kept.

    Raises:
        SyntaxError: It declares an encoding that there is not, or is in another one.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    return source.decode(encoding)


def marked_lines(rewritten: bytes) -> dict[str, list[int]]:
    """Return the line numbers of each rule's marks in a rewritten module."""
    found: dict[str, list[int]] = {}
    for number, line in enumerate(io.StringIO(decoded(rewritten), newline="\n"), 1):
        _, mark, rule = line.partition(MARK)
        if mark:
            found.setdefault(rule.strip(), []).append(number)
    return found
