"""Find where rules of several owners meet in one overlay. The lock records each place, so a reviewer accepts it.

An insertion can also end a function before another owner's insertion, or change a variable that the other one uses.
Neither shows in the diff of one owner, so both are listed.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

import libcst as cst

from transforms.engine.apply import attachments
from transforms.engine.marks import marked_lines
from transforms.engine.members import Keyword
from transforms.engine.report import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transforms.engine.rule import Rule
    from transforms.engine.tree import Path
    from transforms.pipeline.rewrite import Overlay, RewrittenModule


@dataclass(frozen=True)
class _Insertion:
    """One insertion of a rule in a rewritten module.

    Attributes:
        rule: The rule.
        function: The qualified name of the function around it; empty if there is none.
        line: Its first line.
        loops: The lines of the loops of the function around it.
        assigns: The names that it binds or deletes.
        uses: The names that it reads.
        shared: Those of the names it binds that belong to the module: other functions see them, too.
        replaces: These, and the attributes that it binds.
    """

    rule: Rule
    function: str
    line: int
    loops: frozenset[int]
    assigns: frozenset[str]
    uses: frozenset[str]
    shared: frozenset[str]
    replaces: frozenset[str]

    def runs_before(self, other: _Insertion) -> bool:
        """Return whether it can run before another one in a call of the function."""
        return self.function == other.function and (self.line < other.line or bool(self.loops & other.loops))


def conflicts(overlay: Overlay) -> list[str]:
    """Return where owners meet: on one anchor, before each other's insertions, and in switches of a shared module."""
    return [
        told
        for module in overlay.modules
        if len(_owners(module, overlay)) > 1
        for told in [
            *_shared_anchors(module, overlay),
            *_in_the_way(module, overlay),
            *_shared_switches(module, overlay),
        ]
    ]


def shared_groups(overlay: Overlay) -> dict[str, set[str]]:
    """Return, for each group, the groups that share a module with it, and so are switched off together."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in overlay.modules:
        groups = {transform.module.group for transform in module.transforms}
        for group in groups:
            found[group] |= groups - {group}
    return found


def _owners(module: RewrittenModule, overlay: Overlay) -> list[str]:
    return list(dict.fromkeys(overlay.product.owner_of(t.id).owner for t in module.transforms))


def _shared_anchors(module: RewrittenModule, overlay: Overlay) -> list[str]:
    """Return the anchors that rules of several owners attach to, with the order of their insertions."""
    upstream = cst.parse_module(module.upstream)
    applied = {outcome.rule: outcome for outcome in module.outcomes if outcome.status is Status.APPLIED}
    at: dict[tuple[Path, str], list[str]] = defaultdict(list)
    for transform in module.transforms:
        for rule in transform.rules:
            if rule.id in applied:
                for place in attachments(upstream, rule, applied[rule.id].variant):
                    at[place].append(rule.id)
    found = []
    for (_, side), rules in sorted(at.items(), key=lambda item: item[1]):
        if len({overlay.product.owner_of(rule).owner for rule in rules}) > 1:
            # An insertion after a statement, or at a start, goes before earlier insertions.
            order = rules if side in {"before", "AtEnd"} else rules[::-1]
            found.append(f"{module.path}: one anchor has {' and '.join(rules)}; their order there: {', '.join(order)}")
    return found


def _in_the_way(module: RewrittenModule, overlay: Overlay) -> list[str]:
    """Return the insertions that may skip a later one of another owner, or change what it reads."""
    found = []
    for one, other in permutations(_insertions(module), 2):
        if overlay.product.owner_of(one.rule.id) is overlay.product.owner_of(other.rule.id):
            continue
        where = f"{module.path}: in {one.function}, {one.rule.id}"
        if one.rule.diverts and one.runs_before(other):
            found.append(f"{where} may keep {other.rule.id} from running: {one.rule.diverts}")
        if names := (one.assigns if one.runs_before(other) else one.shared) & other.uses:
            found.append(f"{where} assigns {', '.join(sorted(names))}, which {other.rule.id} uses")
        if other.function and one.replaces & {*other.function.split(".")}:
            found.append(f"{where} may replace {other.function}, which has {other.rule.id}")
    return list(dict.fromkeys(found))


def _insertions(module: RewrittenModule) -> list[_Insertion]:
    rules = {rule.id: rule for transform in module.transforms for rule in transform.rules}
    variants = {outcome.rule: outcome.variant for outcome in module.outcomes}
    statements = list(_statements(ast.parse(module.rewritten)))
    found = []
    for name, lines in marked_lines(module.rewritten).items():
        for line in lines if name in rules else ():
            # Outer statements come first, so the last one is the innermost around the mark.
            function, loops, _ = [one for one in statements if one[2].lineno <= line <= (one[2].end_lineno or 0)][-1]
            edit = next(form.edit for form in rules[name].variants if form.name == variants[name])
            inserted = ast.parse(edit.value if isinstance(edit, Keyword) else edit.code)
            binds = frozenset(_bound(inserted))
            shared = binds & _declared_global(inserted) if function else binds
            replaces = shared | _attributes(inserted)
            found.append(_Insertion(rules[name], function, line, loops, binds, _names(inserted), shared, replaces))
    return found


def _statements(
    node: ast.AST, function: str = "", prefix: str = "", loops: frozenset[int] = frozenset()
) -> Iterator[tuple[str, frozenset[int], ast.stmt]]:
    """Yield all statements, each with the outermost function around it, and the loops of that function around it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield function, loops, child
        inner, name, around = function, prefix, loops
        if isinstance(child, ast.ClassDef) and not function:
            name = f"{prefix}{child.name}."
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not function:
            inner = prefix + child.name
        elif isinstance(child, ast.For | ast.AsyncFor | ast.While):
            around = loops | {child.lineno}
        yield from _statements(child, inner, name, around)


def _names(node: ast.AST) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


def _bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that code binds or deletes in any way, without the insides of nested functions and classes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    for child in ast.iter_child_nodes(node):
        yield from _bound(child)


def _attributes(node: ast.AST) -> frozenset[str]:
    """Return the attributes that code binds or deletes, also by ``setattr`` with a literal name."""
    stored = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load)}
    calls = (n for n in ast.walk(node) if isinstance(n, ast.Call) and len(n.args) > 1)
    set_by_name = (n.args[1] for n in calls if isinstance(n.func, ast.Name) and n.func.id in {"setattr", "delattr"})
    return frozenset(stored | {str(n.value) for n in set_by_name if isinstance(n, ast.Constant)})


def _declared_global(node: ast.AST) -> frozenset[str]:
    return frozenset(name for n in ast.walk(node) if isinstance(n, ast.Global) for name in n.names)


def _shared_switches(module: RewrittenModule, overlay: Overlay) -> list[str]:
    groups = {t.module.group: overlay.product.owner_of(t.id).title for t in module.transforms}
    return [
        f"{module.path}: switching {group} off also takes the hooks of {', '.join(others)} along"
        for group, owner in groups.items()
        if (others := sorted({title for title in groups.values() if title != owner}))
    ]
