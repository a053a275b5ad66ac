"""Changes to a module that a new release could make: harmless ones, and ones that remove a rule's anchor.

A harmless mutation changes one place; `mutated` makes many of them, more than half in the functions that rules search.
It goes through the places from last to first, so that the paths of the remaining ones stay valid.
"""

from __future__ import annotations

import functools
import operator
import random
import re
from typing import TYPE_CHECKING, Any, TypeVar, cast

import libcst as cst

from transforms.engine.flow import leaves
from transforms.engine.members import Field
from transforms.engine.tree import (
    Path,
    children,
    code_fields,
    code_nodes,
    enclosing_statement,
    get,
    insert_statements,
    replace,
)
from transforms.pipeline.product import products

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transforms.engine.rule import Rule, Variant

Site = tuple[Path, cst.CSTNode]
Item = TypeVar("Item", cst.Arg, cst.Param)

#: The number of places that `mutated` changes, inside the functions that the rules search and elsewhere.
INSIDE, ELSEWHERE = 40, 25
FLAT = cst.SimpleWhitespace("")
BROKEN = cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace("    "))
CLOSING = cst.ParenthesizedWhitespace(indent=True)


def add_comment(root: cst.CSTNode, path: Path, rng: random.Random) -> cst.CSTNode:
    node = cast("cst.SimpleStatementLine", get(root, path))
    lines = [cst.EmptyLine(indent=False), cst.EmptyLine(comment=cst.Comment(f"# unrelated {rng.random()}"))]
    return replace(root, path, node.with_changes(leading_lines=[*lines, *node.leading_lines]))


def add_statement(root: cst.CSTNode, path: Path, rng: random.Random) -> cst.CSTNode:
    block, index = path[:-1], cast("int", path[-1][1])
    new = cst.parse_statement(f"unrelated = {rng.randrange(100)}")
    side = 0 if leaves(get(root, path)) or rng.random() < 0.5 else 1
    return insert_statements(root, block, index + side, [new])


def add_parameter(root: cst.CSTNode, path: Path, rng: random.Random) -> cst.CSTNode:
    function = cast("cst.FunctionDef", get(root, path))
    added = cst.Param(cst.Name(f"unrelated_{rng.randrange(10**6)}"), default=cst.Name("None"))
    given = list(function.params.params)
    if given:
        added = added.with_changes(comma=given[-1].comma, whitespace_after_param=given[-1].whitespace_after_param)
        parted = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        given[-1] = given[-1].with_changes(comma=parted, whitespace_after_param=FLAT)
    return replace(root, path, function.with_changes(params=function.params.with_changes(params=[*given, added])))


def reorder_keywords(root: cst.CSTNode, path: Path, rng: random.Random) -> cst.CSTNode:
    call = cast("cst.Call", get(root, path))
    named = [i for i, arg in enumerate(call.args) if arg.keyword is not None]
    arguments = list(call.args)
    for here, there in zip(named, rng.sample(named, len(named)), strict=True):
        other = call.args[there]
        arguments[here] = call.args[here].with_changes(keyword=other.keyword, value=other.value, equal=other.equal)
    return replace(root, path, call.with_changes(args=arguments))


def reorder_methods(root: cst.CSTNode, path: Path, rng: random.Random) -> cst.CSTNode:
    cls = cast("cst.ClassDef", get(root, path))
    body = list(cls.body.body)
    plain = [i for i, s in enumerate(body) if isinstance(s, cst.FunctionDef) and not s.decorators]
    moved = [body[i] for i in rng.sample(plain, len(plain))]
    for index, method in zip(plain, moved, strict=True):
        body[index] = method
    return replace(root, path, cls.with_changes(body=cls.body.with_changes(body=body)))


def rename_local(root: cst.CSTNode, path: Path, rng: random.Random) -> cst.CSTNode:
    function = cast("cst.FunctionDef", get(root, path))
    names = sorted(_unrelated_locals(function))
    return replace(root, path, _renamed(function, rng.choice(names))) if names else root


def lay_call_out(root: cst.CSTNode, path: Path, rng: random.Random) -> cst.CSTNode:
    call = cast("cst.Call", get(root, path))
    opening, arguments = _laid_out(call.args, "whitespace_after_arg", rng)
    return replace(root, path, call.with_changes(args=arguments, whitespace_before_args=opening))


def lay_parameters_out(root: cst.CSTNode, path: Path, rng: random.Random) -> cst.CSTNode:
    function = cast("cst.FunctionDef", get(root, path))
    opening, given = _laid_out(function.params.params, "whitespace_after_param", rng)
    parameters = function.params.with_changes(params=given)
    return replace(root, path, function.with_changes(params=parameters, whitespace_before_params=opening))


def change_quotes(root: cst.CSTNode, path: Path, rng: random.Random) -> cst.CSTNode:
    string = cast("cst.SimpleString", get(root, path))
    quote = "'" if string.value[0] == '"' else '"'
    return replace(root, path, string.with_changes(value=f"{quote}{string.value[1:-1]}{quote}"))


def add_brackets(root: cst.CSTNode, path: Path, rng: random.Random) -> cst.CSTNode:
    assignment = cast("cst.Assign", get(root, path))
    value = assignment.value.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return replace(root, path, assignment.with_changes(value=value))


def _is_statement(path: Path, node: cst.CSTNode) -> bool:
    return (
        len(path) > 1
        and path[-1][0] == "body"
        and isinstance(node, cst.SimpleStatementLine | cst.BaseCompoundStatement)
    )


def _may_follow(path: Path, node: cst.CSTNode) -> bool:
    """Return whether a statement may be inserted here: not next to a docstring or a class's fields."""
    return _is_statement(path, node) and path[-1][1] != 0 and not isinstance(node, cst.FunctionDef)


def _is_open_call(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Call) and bool(node.args) and not isinstance(node.args[0].value, cst.GeneratorExp)


def _is_plain_function(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.FunctionDef) and bool(node.params.params) and not _has_special_parameters(node.params)


def _has_special_parameters(given: cst.Parameters) -> bool:
    return bool(
        given.kwonly_params or given.posonly_params or given.star_kwarg or isinstance(given.star_arg, cst.Param)
    )


HARMLESS: dict[
    str, tuple[Callable[[cst.CSTNode, Path, random.Random], cst.CSTNode], Callable[[Path, cst.CSTNode], bool]]
]
HARMLESS = {
    "comments": (add_comment, _is_statement),
    "statements": (add_statement, _may_follow),
    "parameters": (add_parameter, lambda _, node: isinstance(node, cst.FunctionDef)),
    "keyword order": (reorder_keywords, lambda _, node: isinstance(node, cst.Call) and len(node.args) > 1),
    "method order": (reorder_methods, lambda _, node: isinstance(node, cst.ClassDef)),
    "locals": (rename_local, lambda _, node: isinstance(node, cst.FunctionDef)),
    "call layout": (lay_call_out, lambda _, node: _is_open_call(node)),
    "parameter layout": (lay_parameters_out, lambda _, node: _is_plain_function(node)),
    "quotes": (change_quotes, lambda _, node: isinstance(node, cst.SimpleString) and _may_change_quotes(node.value)),
    "brackets": (add_brackets, lambda _, node: isinstance(node, cst.Assign) and not node.value.lpar),
}


def _may_change_quotes(value: str) -> bool:
    return re.fullmatch(r"""(["'])[^"'\\]+\1""", value) is not None


def sites(module: cst.Module) -> list[Site]:
    """Return the places that a mutation may change: all except those in an f-string, which must stay on its line."""
    found: list[Site] = []
    waiting: list[Site] = [((), module)]
    while waiting:
        path, node = waiting.pop()
        found.append((path, node))
        if not isinstance(node, cst.FormattedString):
            waiting += [((*path, step), child) for step, child in children(node, code_fields)][::-1]
    return found


def mutated(
    module: cst.Module, places: Sequence[Site], scopes: Sequence[Path], kinds: Sequence[str], seed: int
) -> cst.Module:
    """Return the module with harmless changes of some kinds.

    Args:
        module: The module.
        places: Its `sites`.
        scopes: The regions that the rules search.
        kinds: Keys of `HARMLESS`.
        seed: The seed of the random choices.
    """
    rng = random.Random(seed)  # noqa: S311 - a test that repeats itself
    chosen: list[tuple[int, str]] = []
    for kind in kinds:
        fits = HARMLESS[kind][1]
        fitting = [i for i, (path, node) in enumerate(places) if fits(path, node)]
        inside = [i for i in fitting if any(_related(places[i][0], scope) for scope in scopes)]
        for some, most in ((inside, INSIDE), (fitting, ELSEWHERE)):
            chosen += [(i, kind) for i in rng.sample(some, min(most, len(some)))]
    root: cst.CSTNode = module
    last_first = sorted(set(chosen), key=lambda one: (one[0], one[1] != "statements", one[1]), reverse=True)
    for index, kind in last_first:  # at one place, the insertion that moves the place comes last
        root = HARMLESS[kind][0](root, places[index][0], rng)
    return cast("cst.Module", root)


def _related(path: Path, scope: Path) -> bool:
    return path[: len(scope)] == scope or scope[: len(path)] == path


def _laid_out(
    items: Sequence[Item], space: str, rng: random.Random
) -> tuple[cst.BaseParenthesizableWhitespace, list[Item]]:
    """Lay items out on one line or one per line, with or without a trailing comma; return the space before them too."""
    broken, last_comma = rng.random() < 0.5, rng.random() < 0.5
    between = cst.Comma(whitespace_after=BROKEN if broken else cst.SimpleWhitespace(" "))
    closing = CLOSING if broken else FLAT
    *rest, last = items
    end = cst.Comma(whitespace_after=closing) if last_comma else cst.MaybeSentinel.DEFAULT
    parted: dict[str, Any] = {"comma": between, space: FLAT}
    ended: dict[str, Any] = {"comma": end, space: FLAT if last_comma else closing}
    return BROKEN if broken else FLAT, [*(item.with_changes(**parted) for item in rest), last.with_changes(**ended)]


RENAMED = "_elsewhere"


#: Where a name is not that of a variable.
NOT_VARIABLES = {(cst.Attribute, "attr"), (cst.Arg, "keyword")}


def _renamed(node: cst.CSTNode, name: str) -> cst.CSTNode:
    """Return a node with a variable renamed; what does not name it is not copied, as a transformer of LibCST does."""
    if isinstance(node, cst.Name):
        return node.with_changes(value=name + RENAMED) if node.value == name else node
    changes: dict[str, Any] = {}
    for field in code_fields(type(node)):
        if (type(node), field) in NOT_VARIABLES:
            continue
        value = getattr(node, field)
        if isinstance(value, cst.CSTNode):
            new: Any = _renamed(value, name)
            same = new is value
        elif isinstance(value, tuple | list):
            new = [_renamed(item, name) if isinstance(item, cst.CSTNode) else item for item in value]
            same = all(map(operator.is_, new, value))
        else:
            continue
        if not same:
            changes[field] = new
    return node.with_changes(**changes) if changes else node


@functools.cache
def words() -> frozenset[str]:
    """Return the names in the code and the anchors of all rules."""
    variants = [v for one in products() for t in one.transforms for rule in t.rules for v in rule.variants]
    texts = " ".join(f"{v.scope.loop_with} {v.edit.anchor} {v.edit.code}" for v in variants)
    return frozenset(re.findall(r"\w+", texts))


def _unrelated_locals(function: cst.FunctionDef) -> set[str]:
    nodes = list(code_nodes(function))
    bound = {t.target.value for t in nodes if isinstance(t, cst.AssignTarget) and isinstance(t.target, cst.Name)}
    taken = {p.name.value for p in nodes if isinstance(p, cst.Param)}
    declared = {i.name.value for s in nodes if isinstance(s, cst.Global | cst.Nonlocal) for i in s.names}
    return bound - taken - declared - words()


def target(module: cst.Module, rule: Rule, release: str) -> tuple[Variant, Path, list[Path]]:
    """Return the variant that fits, its scope and the paths of its anchors in the module.

    Raises:
        LookupError: If none fits.
    """
    for variant in sorted(rule.variants, key=lambda v: release not in v.releases):
        scopes = variant.scope.find(module)
        hits = variant.edit.find(get(module, scopes[0])) if len(scopes) == 1 else []
        if len(hits) == rule.expect:
            return variant, scopes[0], [(*scopes[0], *hit) for hit in hits]
    raise LookupError(rule.id)


def deleted(module: cst.Module, rule: Rule, release: str) -> cst.Module:
    """Return the module without the statement that the rule attaches to."""
    variant, scope, hits = target(module, rule, release)
    if isinstance(variant.edit, Field):
        block = (*scope, ("body", None))
        hits = [(*block, ("body", i)) for i in range(len(cast("cst.IndentedBlock", get(module, block)).body))]
    root: cst.CSTNode = module
    for hit in reversed(hits):
        root = replace(root, _statement(module, hit), cst.parse_statement("pass"))
    return cast("cst.Module", root)


def doubled_anchor(module: cst.Module, rule: Rule, release: str) -> cst.Module:
    """Return the module with the rule's anchor statement twice, or with its scope twice if that is the anchor."""
    variant, scope, hits = target(module, rule, release)
    return _twice(module, scope if isinstance(variant.edit, Field) else hits[0])


def doubled(module: cst.Module, rule: Rule, release: str) -> cst.Module:
    """Return the module with the rule's scope twice."""
    return _twice(module, target(module, rule, release)[1])


def renamed(module: cst.Module, rule: Rule, release: str, part: int) -> cst.Module:
    """Return the module with the scope's class (part 0) or its last definition (part -1) renamed."""
    variant, scope, _ = target(module, rule, release)
    on_the_way = [scope[:length] for length in range(1, len(scope) + 1)]
    defined = [p for p in on_the_way if isinstance(get(module, p), cst.ClassDef | cst.FunctionDef)]
    path = defined[: len(variant.scope.name.split("."))][part]
    node = cast("cst.FunctionDef", get(module, path))
    return cast("cst.Module", replace(module, (*path, ("name", None)), cst.Name(node.name.value + RENAMED)))


HARMFUL: dict[str, Callable[[cst.Module, Rule, str], cst.Module]] = {
    "anchor deleted": deleted,
    "anchor doubled": doubled_anchor,
    "scope doubled": doubled,
    "class renamed": lambda module, rule, release: renamed(module, rule, release, 0),
    "function renamed": lambda module, rule, release: renamed(module, rule, release, -1),
}


def _statement(module: cst.Module, path: Path) -> Path:
    place = enclosing_statement(module, path)
    if place is None:
        raise LookupError(path)
    block, index = place
    return (*block, ("body", index))


def _twice(module: cst.Module, path: Path) -> cst.Module:
    statement = _statement(module, path)
    copy = cast("cst.BaseStatement", get(module, statement))
    block, index = statement[:-1], cast("int", statement[-1][1])
    return cast("cst.Module", insert_statements(module, block, index + 1, [copy]))
