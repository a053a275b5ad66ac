"""Control flow: points that control never reaches, and insertions that keep it from what follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import libcst as cst

from transforms.engine.tree import children, code_of

if TYPE_CHECKING:
    from transforms.engine.tree import Path

JUMPS = (cst.Return, cst.Raise, cst.Continue, cst.Break)
LOOPS = (cst.For, cst.While)
#: Calls that end the process or the thread.
EXITS = frozenset({"sys.exit", "exit", "quit", "os._exit", "os.abort"})
#: Names with a known truth.
TRUTHS = {"True": True, "False": False, "None": False, "TYPE_CHECKING": False}


def leaves(statement: cst.CSTNode) -> bool:
    """Return whether control never passes from a statement to the next one."""
    if isinstance(statement, JUMPS) or _exits(statement):
        return True
    if isinstance(statement, cst.Assert):
        return truth(statement.test) is False
    if isinstance(statement, cst.If):
        return _if_leaves(statement)
    if isinstance(statement, cst.Try | cst.TryStar):
        return _try_leaves(statement)
    if isinstance(statement, cst.While):
        return truth(statement.test) is True and not _breaks(statement.body)
    if isinstance(statement, cst.Match):
        last = statement.cases[-1]
        catches_all = isinstance(last.pattern, cst.MatchAs) and last.pattern.pattern is None and last.guard is None
        return catches_all and all(_block_leaves(case.body) for case in statement.cases)
    if isinstance(statement, cst.Else | cst.With):
        return _block_leaves(statement.body)
    return isinstance(statement, cst.SimpleStatementLine) and any(map(leaves, statement.body))


def is_passed_by(root: cst.CSTNode, path: Path) -> bool:
    """Return whether control never reaches the node at a path.

    A statement before it always leaves, or it is in a branch whose condition is a constant: ``if False:``.
    """
    node = root
    for name, index in path:
        value = getattr(node, name)
        if isinstance(node, cst.If | cst.While | cst.IfExp) and truth(node.test) is {"body": False, "orelse": True}.get(
            name, ...
        ):
            return True
        if index is not None and isinstance(node, cst.Module | cst.IndentedBlock) and any(map(leaves, value[:index])):
            return True
        node = value if index is None else value[index]
    return False


def truth(test: cst.BaseExpression) -> bool | None:
    """Return whether a condition always or never holds when the code runs; None if that depends."""
    if isinstance(test, cst.Name):
        return TRUTHS.get(test.value)
    if isinstance(test, cst.Attribute):
        return TRUTHS.get(test.attr.value) if test.attr.value == "TYPE_CHECKING" else None
    if isinstance(test, cst.Integer | cst.Float | cst.SimpleString):
        return bool(test.evaluated_value)
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        inner = truth(test.expression)
        return None if inner is None else not inner
    if isinstance(test, cst.BooleanOperation):
        decides = isinstance(test.operator, cst.Or)
        sides = {truth(test.left), truth(test.right)}
        return decides if decides in sides else None if None in sides else not decides
    return None


def diversions(node: cst.CSTNode) -> set[str]:
    """Return how a piece of code can keep control from what follows it: its jumps, loops and yields.

    Nested functions do not count: they only run when they are called. A jump out of a loop of the piece itself counts,
    too; the loop does in any case.
    """
    if isinstance(node, cst.FunctionDef | cst.Lambda | cst.ClassDef):
        return set()
    own = {type(node).__name__.lower()} if isinstance(node, (*JUMPS, *LOOPS, cst.Assert, cst.Yield)) else set()
    return own.union(*(diversions(child) for _, child in children(node)))


def returns(node: cst.CSTNode) -> bool:
    """Return whether a node contains a ``return``, not counting nested functions."""
    if isinstance(node, cst.FunctionDef | cst.Lambda):
        return False
    return isinstance(node, cst.Return) or any(returns(child) for _, child in children(node))


def _exits(statement: cst.CSTNode) -> bool:
    call = statement.value if isinstance(statement, cst.Expr) else None
    return isinstance(call, cst.Call) and code_of(call.func) in EXITS


def _if_leaves(statement: cst.If) -> bool:
    holds = truth(statement.test)
    taken = holds is not False and _block_leaves(statement.body)
    other = holds is not True and statement.orelse is not None and leaves(statement.orelse)
    return (taken or holds is False) and (other or holds is True)


def _breaks(node: cst.CSTNode) -> bool:
    """Return whether a loop's body breaks out of this loop; breaks of loops within it do not count."""
    if isinstance(node, cst.FunctionDef | cst.ClassDef):
        return False
    if isinstance(node, cst.For | cst.While):
        return node.orelse is not None and _breaks(node.orelse)
    return isinstance(node, cst.Break) or any(_breaks(child) for _, child in children(node))


def _block_leaves(block: cst.BaseSuite) -> bool:
    return any(map(leaves, block.body))


def _try_leaves(statement: cst.Try | cst.TryStar) -> bool:
    if statement.finalbody is not None and _block_leaves(statement.finalbody.body):
        return True
    tried = _block_leaves(statement.body) or (statement.orelse is not None and leaves(statement.orelse))
    return tried and all(_block_leaves(handler.body) for handler in statement.handlers)
