"""Published vLLM modules as syntax trees: their definitions, and the order of their calls."""

from __future__ import annotations

import ast
import functools
import gc
import inspect
from typing import TYPE_CHECKING

from tests.transforms.upstream import sources

if TYPE_CHECKING:
    from collections.abc import Iterator

BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
CONFIG = "vllm/v1/kv_cache_interface.py"
ENGINE = "vllm/v1/engine/core.py"
FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
MIXIN = "vllm/v1/worker/kv_connector_model_runner_mixin.py"
OUTPUT = "vllm/v1/core/sched/output.py"
REQUEST = "vllm/v1/request.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
RUNNER_V2 = "vllm/v1/worker/gpu/model_runner.py"
CONNECTOR_V2 = "vllm/v1/worker/gpu/kv_connector.py"
SCHEDULER = "vllm/v1/core/sched/scheduler.py"


@functools.cache
def module(release: str, path: str) -> ast.Module | None:
    """Return a module of a release; None if the release has none at this path."""
    tree = sources(release)
    if not tree.exists(path):
        return None
    gc.disable()  # millions of nodes without garbage, which the collector then ignores
    parsed = ast.parse(tree.read(path))
    gc.freeze()
    gc.enable()
    return parsed


def definition(release: str, path: str, qualified: str) -> ast.ClassDef | ast.FunctionDef | None:
    """Return a class or function by its qualified name."""
    node: ast.AST | None = module(release, path)
    for name in qualified.split("."):
        found = None
        for child in getattr(node, "body", ()):
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == name:
                found = child
        node = found
    return node if isinstance(node, ast.ClassDef | ast.FunctionDef) else None


def function(release: str, path: str, qualified: str) -> ast.FunctionDef:
    """Return a function that must exist."""
    found = definition(release, path, qualified)
    assert isinstance(found, ast.FunctionDef), f"vLLM {release} has no {qualified} in {path}"
    return found


def methods(release: str, path: str, name: str) -> dict[str, ast.FunctionDef]:
    """Return the methods of a class; none if it does not exist."""
    found = definition(release, path, name)
    return {node.name: node for node in getattr(found, "body", ()) if isinstance(node, ast.FunctionDef)}


def decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}


def fields(release: str, path: str, name: str) -> dict[str, str]:
    """Return a dataclass's fields with their annotations."""
    found = definition(release, path, name)
    assert found is not None, f"vLLM {release} has no {name} in {path}"
    return {ast.unparse(n.target): ast.unparse(n.annotation) for n in found.body if isinstance(n, ast.AnnAssign)}


def attributes(release: str, path: str, name: str) -> set[str]:
    """Return the attributes of a class's instances: fields, methods, properties, and assignments to ``self``."""
    found = definition(release, path, name)
    assert found is not None, f"vLLM {release} has no {name} in {path}"
    names = {ast.unparse(node.target) for node in found.body if isinstance(node, ast.AnnAssign)}
    names |= {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(found):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


def signature(node: ast.FunctionDef) -> inspect.Signature:
    """Return a method's signature without ``self``."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    first_default = len(positional) - len(given.defaults)
    parameters = [
        inspect.Parameter(
            arg.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None if n >= first_default else inspect._empty
        )
        for n, arg in enumerate(positional)
    ][0 if "staticmethod" in decorators(node) else 1 :]
    if given.vararg:
        parameters.append(inspect.Parameter(given.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        fallback = inspect._empty if default is None else None
        parameters.append(inspect.Parameter(arg.arg, inspect.Parameter.KEYWORD_ONLY, default=fallback))
    if given.kwarg:
        parameters.append(inspect.Parameter(given.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes below a node in source order."""
    for child in ast.iter_child_nodes(node):
        yield child
        yield from in_order(child)


def calls(node: ast.AST, *names: str) -> list[ast.Call]:
    """Return the calls of functions whose names end with one of these, in source order; without names, all."""
    found = [child for child in in_order(node) if isinstance(child, ast.Call)]
    return [call for call in found if not names or called(call) in names]


def called(call: ast.Call) -> str:
    """Return the last part of a called function's name."""
    return ast.unparse(call.func).rpartition(".")[2]


def sequence(node: ast.AST, *names: str) -> list[str]:
    """Return which of these are called, in source order; consecutive repetitions count once."""
    found: list[str] = []
    for call in calls(node, *names):
        if not found or found[-1] != called(call):
            found.append(called(call))
    return found


def conditions(node: ast.AST, inner: ast.AST) -> list[str]:
    """Return the conditions under which a node inside another is reached, innermost first."""
    parents = {child: parent for parent in ast.walk(node) for child in ast.iter_child_nodes(parent)}
    found: list[str] = []
    while inner in parents:
        parent = parents[inner]
        if isinstance(parent, ast.If) and inner in parent.body:
            found.append(ast.unparse(parent.test))
        inner = parent
    return found


def line_of(node: ast.AST, text: str) -> int:
    """Return the line of the first statement or expression in a node with this source.

    Raises:
        AssertionError: If there is none.
    """
    for child in in_order(node):
        if isinstance(child, ast.stmt | ast.expr) and ast.unparse(child) == text:
            return child.lineno
    raise AssertionError(f"{getattr(node, 'name', 'this')} has no {text!r}")
