"""The mark on what a rule inserts: a trailing ``# ucm: <rule id>``, wherever the layout has room for one.

With it the reader of a rewritten module can look any line up, and a second run recognises its own work.
"""

from __future__ import annotations

from typing import cast

import libcst as cst

from transforms.engine.tree import code_of, walk

MARK = "# ucm: "


def marked_statements(code: str, rule: str) -> list[cst.BaseStatement]:
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


def count_marked(scope: cst.CSTNode, code: str, rule: str) -> int:
    """How many statements in the scope carry the rule's mark and are what it would insert."""
    wanted = code_of(marked_statements(code, rule)[0])
    return sum(code_of(n) == wanted for _, n in walk(scope) if _mark_of(n) == MARK + rule)


def _mark_of(node: cst.CSTNode) -> str | None:
    if isinstance(node, cst.SimpleStatementLine):
        comment = node.trailing_whitespace.comment
    elif isinstance(suite := getattr(node, "body", None), cst.IndentedBlock):
        comment = suite.header.comment
    else:
        return None
    return comment.value if comment else None
