"""Control flow: find the points that control never reaches, because code inserted there would not run."""

from __future__ import annotations

import libcst as cst

from transforms.engine.tree import children, walk


def leaves(statement: cst.CSTNode) -> bool:
    """Return whether control never passes from a statement to the next one."""
    if isinstance(statement, cst.Return | cst.Raise | cst.Continue | cst.Break):
        return True
    if isinstance(statement, cst.If):
        return statement.orelse is not None and _block_leaves(statement.body) and leaves(statement.orelse)
    if isinstance(statement, cst.Try | cst.TryStar):
        return _try_leaves(statement)
    if isinstance(statement, cst.While):
        endless = isinstance(statement.test, cst.Name) and statement.test.value == "True"
        return endless and not any(isinstance(node, cst.Break) for _, node in walk(statement))
    if isinstance(statement, cst.Match):
        last = statement.cases[-1]
        catches_all = isinstance(last.pattern, cst.MatchAs) and last.pattern.pattern is None and last.guard is None
        return catches_all and all(_block_leaves(case.body) for case in statement.cases)
    if isinstance(statement, cst.Else | cst.With):
        return _block_leaves(statement.body)
    return isinstance(statement, cst.SimpleStatementLine) and any(map(leaves, statement.body))


def returns(node: cst.CSTNode) -> bool:
    """Return whether a node contains a ``return``, not counting nested functions."""
    if isinstance(node, cst.FunctionDef | cst.Lambda):
        return False
    return isinstance(node, cst.Return) or any(returns(child) for _, child in children(node))


def _block_leaves(block: cst.BaseSuite) -> bool:
    return any(map(leaves, block.body))


def _try_leaves(statement: cst.Try | cst.TryStar) -> bool:
    if statement.finalbody is not None and _block_leaves(statement.finalbody.body):
        return True
    tried = _block_leaves(statement.body) or (statement.orelse is not None and leaves(statement.orelse))
    return tried and all(_block_leaves(handler.body) for handler in statement.handlers)
