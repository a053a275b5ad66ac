"""What must hold of every rewritten module before it is written anywhere.

All of it is read off the source: nothing of vLLM and nothing of the runtime is imported.
"""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transforms.engine.errors import OverlayError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transforms.pipeline.rewrite import Overlay, RewrittenModule

HOOKS = "_ucm_hooks"
HOOKS_SOURCE = Path(__file__).parents[2] / "ucm" / "integration" / "vllm" / "hooks.py"
#: Names whose use means that a module depends on where its file lies.
TIED_TO_ITS_PLACE = frozenset({"__file__", "__path__", "__spec__", "__loader__", "__cached__"})
RESOURCE_READERS = frozenset({"pkgutil.get_data", "importlib.resources", "inspect.getfile", "inspect.getsourcefile"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


class CheckError(OverlayError):
    """A rewritten module must not be shipped."""


@dataclass(frozen=True)
class HookUse:
    """One use of a hook in a rewritten module.

    Attributes:
        hook: The hook's name.
        line: The line in the rewritten module.
        call: The call, or None where the hook is only named.
    """

    hook: str
    line: int
    call: ast.Call | None


def check_overlay(overlay: Overlay) -> None:
    """Check every module of an overlay.

    Raises:
        CheckError: Naming the module, the line and what is wrong.
    """
    signatures = hook_signatures()
    for module in overlay.modules:
        check_module(module, signatures)


def check_module(module: RewrittenModule, signatures: dict[str, ast.arguments | None]) -> None:
    """Check one module: it compiles, may be shadowed, resolves what it calls, and keeps its callers' signatures."""
    before, after = _parsed(module, module.upstream), _parsed(module, module.rewritten)
    _check_may_be_shadowed(module, before)
    _check_hooks(module, signatures)
    _check_names(module, after)
    _check_signatures(module, before, after)


def hook_signatures(source: Path = HOOKS_SOURCE) -> dict[str, ast.arguments | None]:
    """The hooks of the seam and their parameters, read from its source; None for a constant."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    names: dict[str, ast.arguments | None] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            names[node.name] = node.args
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: None for alias in node.names}
    return names


def hook_uses(source: bytes) -> list[HookUse]:
    """Every use of a hook in a module's source, in source order."""
    tree = ast.parse(source)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_hook(node)]
    found = [HookUse(node.attr, node.lineno, calls.get(id(node))) for node in attributes]
    return sorted(found, key=lambda use: (use.line, use.hook))


def _is_hook(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == HOOKS


def _parsed(module: RewrittenModule, source: bytes) -> ast.Module:
    try:
        compile(source, module.path, "exec", dont_inherit=True)
        return ast.parse(source, module.path)
    except (SyntaxError, ValueError) as error:
        raise _error(module, f"does not compile: {error}") from error


def _check_may_be_shadowed(module: RewrittenModule, tree: ast.Module) -> None:
    if module.path.endswith("__init__.py"):
        raise _error(module, "is a package's __init__: shadowing it would cut the package off from its other modules")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name | ast.Attribute | ast.Import | ast.ImportFrom):
            continue
        found = _names(node) & (TIED_TO_ITS_PLACE | RESOURCE_READERS)
        if found:
            raise _error(module, f"depends on where its file lies: `{found.pop()}`", node.lineno)


def _names(node: ast.Name | ast.Attribute | ast.Import | ast.ImportFrom) -> set[str]:
    """What a name or an import names, dotted."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return {ast.unparse(node)}


def _check_hooks(module: RewrittenModule, signatures: dict[str, ast.arguments | None]) -> None:
    for use in hook_uses(module.rewritten):
        if use.hook not in signatures:
            raise _error(module, f"calls a hook that ucm/integration/vllm/hooks.py does not have: {use.hook}", use.line)
        arguments = signatures[use.hook]
        if use.call is not None and arguments is not None and not _accepts(arguments, use.call):
            raise _error(module, f"calls {use.hook} with arguments that it does not take", use.line)


def _accepts(arguments: ast.arguments, call: ast.Call) -> bool:
    names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
    given = set(names[: len(call.args)]) | {keyword.arg for keyword in call.keywords}
    required = set(names[: len(names) - len(arguments.defaults)])
    return len(call.args) <= len(names) and required <= given <= set(names)


def _check_names(module: RewrittenModule, tree: ast.Module) -> None:
    """Every name in a statement that uses a hook is bound before it: a parameter, a local, a global or a builtin."""
    known = _bound_names(tree.body) | set(dir(builtins)) | {"__name__"}
    for function, outer in _functions(tree):
        parameters = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
        for statement in _hook_statements(function):
            local = {n for n, line in _stores(function) if line < statement.lineno}
            for node in _own_expressions(statement):
                if not (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)):
                    continue
                if node.id not in known | outer | parameters | local:
                    raise _error(module, f"uses `{node.id}`, which is not bound there", node.lineno)


def _functions(tree: ast.AST, outer: frozenset[str] = frozenset()) -> Iterator[tuple[Function, frozenset[str]]]:
    """All functions with the names that the functions around them bind."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield node, outer
            inner = (
                outer | {n for n, _ in _stores(node)} | {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
            )
            yield from _functions(node, frozenset(inner))
        else:
            yield from _functions(node, outer)


def _hook_statements(function: Function) -> Iterator[ast.stmt]:
    for node in ast.walk(function):
        if isinstance(node, ast.stmt) and any(_is_hook(n) for n in _own_expressions(node)):
            yield node


def _own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """The nodes of a statement without those of the statements inside it."""
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.excepthandler):
            yield from (node for node in ast.walk(child))


def _stores(function: Function) -> Iterator[tuple[str, int]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno


def _bound_names(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
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
