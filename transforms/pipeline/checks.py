"""Checks of every rewritten module before anything is written.

The checks read only sources: they import neither vLLM nor the runtime.
"""

from __future__ import annotations

import ast
import bisect
import builtins
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from transforms.engine.errors import OverlayError
from transforms.engine.marks import MARK, UNREADABLE
from transforms.engine.transform import DEFAULT_SEAM, Seam
from transforms.pipeline.sources.tree import unreadable

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from transforms.pipeline.rewrite import Overlay, RewrittenModule

#: Names whose use shows that a module depends on its file's location.
TIED_TO_ITS_PLACE = frozenset({"__file__", "__path__", "__spec__", "__loader__", "__cached__"})
RESOURCE_READERS = frozenset({"pkgutil.get_data", "importlib.resources", "inspect.getfile", "inspect.getsourcefile"})

Function = ast.FunctionDef | ast.AsyncFunctionDef
_Named = ast.Name | ast.Attribute | ast.Import | ast.ImportFrom
_LOOKED_AT = (ast.Name, ast.Attribute, ast.Import, ast.ImportFrom, ast.Call)
#: The hooks of each seam with their parameters; None for a constant.
Signatures = dict[Seam, dict[str, ast.arguments | None]]


class CheckError(OverlayError):
    """A rewritten module fails a check."""


@dataclass(frozen=True)
class HookUse:
    """One use of a hook in a rewritten module.

    Attributes:
        hook: The hook's name.
        seam: The seam that it belongs to.
        line: The line in the rewritten module.
        call: The call, or None if the hook is only mentioned.
    """

    hook: str
    seam: Seam
    line: int
    call: ast.Call | None


def check_overlay(overlay: Overlay, passed: Collection[str] = ()) -> None:
    """Check every module of an overlay.

    Args:
        overlay: The overlay.
        passed: The paths of the modules that have passed these checks before.

    Raises:
        CheckError: Naming the module, the line and what is wrong.
        SourceError: An expression is nested too deeply for the checks.
    """
    signatures = {one.seam: hook_signatures(one.hooks) for one in overlay.product.registries}
    for module in overlay.modules:
        if module.path in passed:
            continue
        check_module(module, signatures)
        if module.default is not None and module.default != module.rewritten:
            check_module(replace(module, rewritten=module.default), signatures)


def check_module(module: RewrittenModule, signatures: Signatures) -> None:
    """Check that one module compiles, may be shadowed, calls existing hooks, and keeps its signatures."""
    _check_compiles(module)
    before, after = _parsed(module.upstream)[0], _parsed(module.rewritten)[0]
    uses = hook_uses(module.rewritten, signatures)
    _check_may_be_shadowed(module)
    _check_hooks(module, uses, signatures)
    _check_names(module, after, sorted({use.line for use in uses}), {seam.alias for seam in signatures})
    _check_signatures(module, before, after)


def hook_signatures(source: Path) -> dict[str, ast.arguments | None]:
    """Return the hooks of a seam and their parameters, read from its source; None for a constant."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    names: dict[str, ast.arguments | None] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            names[node.name] = node.args
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: None for alias in node.names}
    return names


def hook_uses(source: bytes, seams: Collection[Seam] = (DEFAULT_SEAM,)) -> list[HookUse]:
    """Return every use of a hook in a module's source, in source order."""
    by_alias = {seam.alias: seam for seam in seams}
    _, nodes = _parsed(source)
    calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    found = [
        HookUse(node.attr, by_alias[node.value.id], node.lineno, calls.get(id(node)))
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in by_alias
    ]
    return sorted(found, key=lambda use: (use.line, use.hook))


# The checks, the manifest and the package's notes parse the same sources; a release has fewer than 40 of them.
@functools.lru_cache(maxsize=40)
def _parsed(source: bytes) -> tuple[ast.Module, tuple[ast.AST, ...]]:
    """Return a source's tree and the nodes that the checks use; walking a tree takes longer than parsing it."""
    tree = ast.parse(source)
    return tree, tuple(node for node in ast.walk(tree) if isinstance(node, _LOOKED_AT))


def changed_definitions(source: bytes, seams: Collection[Seam] = (DEFAULT_SEAM,)) -> dict[str, list[str]]:
    """Return what rules changed in a rewritten module: functions, classes with new fields, and the module's variables.

    Returns:
        The hooks that each uses, by qualified name. A nested function counts as the outer one.
    """
    uses = hook_uses(source, seams)
    marks = {line for line, text in enumerate(source.splitlines(), 1) if MARK.encode() in text}
    changes = marks | {use.line for use in uses}
    found: dict[str, list[str]] = {}
    for name, node in _definitions(_parsed(source)[0]):
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if any(line in lines for line in changes):
            found[name] = sorted({use.hook for use in uses if use.line in lines})
    # A class counts only for statements outside its methods: its new fields.
    return {name: hooks for name, hooks in found.items() if not any(other.startswith(f"{name}.") for other in found)}


def _definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Yield a module's functions, classes, the classes' functions, and variables, also under an ``if`` or ``try``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            yield prefix + child.name, child
        elif not prefix and isinstance(child, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((target.id, child) for target in targets if isinstance(target, ast.Name))
        if isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.stmt | ast.excepthandler) and not isinstance(child, Function):
            yield from _definitions(child, prefix)


def _check_compiles(module: RewrittenModule) -> None:
    try:
        compile(_parsed(module.rewritten)[0], module.path, "exec", dont_inherit=True)
    except RecursionError as error:
        raise unreadable(module.path, error) from error
    except UNREADABLE as error:
        raise _error(module, f"does not compile: {error}") from error


def _check_may_be_shadowed(module: RewrittenModule) -> None:
    if module.path.endswith("__init__.py"):
        raise _error(module, "is a package's __init__: shadowing it would cut the package off from its other modules")
    allowed = {"__file__"} if any(transform.module.reads_beside for transform in module.transforms) else set()
    for node in _parsed(module.upstream)[1]:
        if not isinstance(node, _Named):
            continue
        found = (_names(node) & (TIED_TO_ITS_PLACE | RESOURCE_READERS)) - allowed
        if found:
            raise _error(module, f"depends on where its file lies: `{found.pop()}`", node.lineno)


def _names(node: _Named) -> set[str]:
    """Return the dotted names that a name, an attribute or an import refers to."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    if isinstance(node, ast.Name):
        return {node.id}
    return {f"{node.value.id}.{node.attr}"} if isinstance(node.value, ast.Name) else set()


def check_hook_uses(source: bytes, signatures: Signatures) -> str:
    """Return what is wrong with the first wrong use of a hook in a source; empty if all are right."""
    return next((problem for use in hook_uses(source, signatures) if (problem := _wrong_use(use, signatures))), "")


def _wrong_use(use: HookUse, signatures: Signatures) -> str:
    known = signatures[use.seam]
    if use.hook not in known:
        return f"calls a hook that {use.seam.module.replace('.', '/')}.py does not have: {use.hook}"
    arguments = known[use.hook]
    if use.call is not None and arguments is not None and not _accepts(arguments, use.call):
        return f"calls {use.hook} with arguments that it does not take"
    return ""


def _check_hooks(module: RewrittenModule, uses: Sequence[HookUse], signatures: Signatures) -> None:
    for use in uses:
        if problem := _wrong_use(use, signatures):
            raise _error(module, problem, use.line)
    within = {hook for hooks in changed_definitions(module.rewritten, signatures).values() for hook in hooks}
    for use in uses:
        if use.hook not in within:
            problem = f"uses {use.hook} outside of every function, class and variable, where nothing shows that it ran"
            raise _error(module, problem, use.line)


def _accepts(arguments: ast.arguments, call: ast.Call) -> bool:
    names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
    given = set(names[: len(call.args)]) | {keyword.arg for keyword in call.keywords}
    required = set(names[: len(names) - len(arguments.defaults)])
    return len(call.args) <= len(names) and required <= given <= set(names)


def _check_names(module: RewrittenModule, tree: ast.Module, lines: Sequence[int], seams: Collection[str]) -> None:
    """Check that every name in a statement with a hook is bound: a parameter, a local, a global or a builtin."""
    known = _bound_names(module.rewritten) | set(dir(builtins)) | {"__name__"}
    for function, outer in _functions(tree, lines):
        parameters = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
        for statement in _hook_statements(function, lines, seams):
            local = {n for n, line in _stores(function) if line < statement.lineno}
            for node in _own_expressions(statement):
                if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
                    continue
                if node.id not in known | outer | parameters | local:
                    raise _error(module, f"uses `{node.id}`, which is not bound there", node.lineno)


def _functions(
    tree: ast.AST, lines: Sequence[int], outer: frozenset[str] = frozenset()
) -> Iterator[tuple[Function, frozenset[str]]]:
    """Yield the functions that contain some of the lines, with the names that enclosing functions bind."""
    for node in ast.iter_child_nodes(tree):
        if not _has_line(node, lines):
            continue
        if isinstance(node, Function):
            yield node, outer
            inner = (
                outer | {n for n, _ in _stores(node)} | {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
            )
            yield from _functions(node, lines, frozenset(inner))
        else:
            yield from _functions(node, lines, outer)


def _has_line(node: ast.AST, lines: Sequence[int]) -> bool:
    """Return whether a node, decorators included, contains one of the sorted lines."""
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", None)
    if last is None:
        return True
    first = min([first, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return bisect.bisect_left(lines, first) < bisect.bisect_right(lines, last)


def _hook_statements(node: ast.AST, lines: Sequence[int], seams: Collection[str]) -> Iterator[ast.stmt]:
    """Yield the statements at or below a node that use a hook in their own expressions."""
    if not _has_line(node, lines):
        return
    if isinstance(node, ast.stmt) and any(isinstance(n, ast.Name) and n.id in seams for n in _own_expressions(node)):
        yield node
    for child in ast.iter_child_nodes(node):
        yield from _hook_statements(child, lines, seams)


def _own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, without those of the statements inside it."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.excepthandler):
            yield from (node for node in ast.walk(child))


def _stores(function: Function) -> Iterator[tuple[str, int]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno


def _bound_names(source: bytes) -> set[str]:
    """Return the names that a module's top-level statements bind, and those that any import in it binds."""
    tree, nodes = _parsed(source)
    imports = (node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
    names = {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
    for statement in tree.body:
        if isinstance(statement, Function | ast.ClassDef):
            names.add(statement.name)
        else:
            names |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names


def _check_signatures(module: RewrittenModule, before: ast.Module, after: ast.Module) -> None:
    changed = _signatures(after)
    for name, was in _signatures(before).items():
        now = changed.get(name)
        if now is None:
            raise _error(module, f"no longer defines {name}")
        if ast.dump(was) != ast.dump(now) and not _only_gained_defaults(was, now):
            raise _error(module, f"changes the signature of {name} other than by a defaulted parameter at its end")


def _signatures(tree: ast.AST, prefix: str = "") -> dict[str, ast.arguments]:
    found: dict[str, ast.arguments] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            found[f"{prefix}{node.name}:{len(found)}" if f"{prefix}{node.name}" in found else prefix + node.name] = (
                node.args
            )
        elif isinstance(node, ast.ClassDef):
            found |= _signatures(node, f"{prefix}{node.name}.")
    return found


def _only_gained_defaults(was: ast.arguments, now: ast.arguments) -> bool:
    added = len(now.args) - len(was.args)
    same_args = [ast.dump(a) for a in was.args] == [ast.dump(a) for a in now.args[: len(was.args)]]
    defaults = [ast.dump(d) for d in was.defaults]
    same_defaults = defaults == [ast.dump(d) for d in now.defaults[: len(defaults)]]
    return (
        added >= 0
        and len(now.defaults) - len(was.defaults) == added
        and same_args
        and same_defaults
        and _rest(was) == _rest(now)
    )


def _rest(arguments: ast.arguments) -> str:
    others = ast.arguments(
        posonlyargs=arguments.posonlyargs,
        args=[],
        vararg=arguments.vararg,
        kwonlyargs=arguments.kwonlyargs,
        kw_defaults=arguments.kw_defaults,
        kwarg=arguments.kwarg,
        defaults=[],
    )
    return ast.dump(others)


def _error(module: RewrittenModule, problem: str, line: int = 0) -> CheckError:
    where = f"{module.path}:{line}" if line else module.path
    return CheckError(
        f"the rewritten {module.name} {problem}",
        where=f"{where} (transform {module.transform})",
        fix="correct the transform; `python -m transforms drift RELEASE` shows where its rules attach",
    )
