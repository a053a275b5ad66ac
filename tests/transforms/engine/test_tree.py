"""Paths lead to nodes, and replacing at a path does what LibCST's own replacement does."""

from __future__ import annotations

import libcst as cst
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transforms.engine.tree import children, code_of, enclosing_statement, get, insert_statements, replace, walk

CODE = '''\
"""Doc."""
import os

@decorate(1)
class A(Base, metaclass=Meta):
    """Doc."""
    x: int = 1  # one

    async def run(self, a, *args, b=2, **kwargs) -> None:
        with open(a) as f, open(b):
            for i in range(10):
                if i: print(i); print(f"{i!r}")
                elif a: pass
                else:
                    yield [*args, {a: b, **kwargs}]
        try:
            del a[1:2]
        except ValueError as e:
            raise e from None
        finally:
            match a:
                case [x, *_] if x:
                    return
                case _:
                    assert lambda q, /, w=3: (q, w), "text" "joined"
'''
MODULE = cst.parse_module(CODE)
PATHS = [path for path, _ in walk(MODULE)]


def test_every_path_leads_to_its_node() -> None:
    assert all(get(MODULE, path) is node for path, node in walk(MODULE))


def test_walks_each_node_that_libcst_visits() -> None:
    seen: list[cst.CSTNode] = []

    class Visitor(cst.CSTVisitor):
        def on_visit(self, node: cst.CSTNode) -> bool:
            seen.append(node)
            return True

    MODULE.visit(Visitor())
    assert {id(n) for n in seen} == {id(node) for _, node in walk(MODULE)}


def test_parents_come_before_their_children() -> None:
    assert all(path[:-1] in PATHS[: PATHS.index(path)] for path in PATHS if path)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([path for path, node in walk(MODULE) if isinstance(node, cst.Name)]))
def test_replaces_as_deep_replace_does(path: tuple[tuple[str, int | None], ...]) -> None:
    new = cst.Name("replaced")
    wanted = cst.ensure_type(MODULE.deep_replace(get(MODULE, path), new), cst.Module)
    assert cst.ensure_type(replace(MODULE, path, new), cst.Module).code == wanted.code


def test_replacing_rebuilds_only_the_nodes_on_the_path() -> None:
    path = next(path for path, node in walk(MODULE) if isinstance(node, cst.Name) and node.value == "kwargs")
    changed = replace(MODULE, path, cst.Name("other"))
    kept = {id(node) for _, node in walk(MODULE)} - {id(get(MODULE, path[:n])) for n in range(len(path) + 1)}
    assert kept <= {id(node) for _, node in walk(changed)}
    assert MODULE.code == CODE


def test_replacing_the_root_is_the_new_node() -> None:
    assert code_of(replace(MODULE, (), cst.Name("x"))) == "x"


def test_children_are_direct() -> None:
    call = cst.parse_expression("f(a, b)")
    assert [step for step, _ in children(call)][:3] == [("func", None), ("args", 0), ("args", 1)]


@pytest.mark.parametrize(("index", "code"), [(0, "new\na\nb\n"), (1, "a\nnew\nb\n"), (2, "a\nb\nnew\n")])
def test_inserts_before_a_statement_or_at_the_end(index: int, code: str) -> None:
    module = cst.parse_module("a\nb\n")
    changed = insert_statements(module, (), index, cst.parse_module("new\n").body)
    assert cst.ensure_type(changed, cst.Module).code == code


def test_finds_the_statement_around_a_node() -> None:
    module = cst.parse_module("if a:\n    b = f(x)\n")
    path = next(path for path, node in walk(module) if isinstance(node, cst.Name) and node.value == "x")
    assert enclosing_statement(module, path) == ((("body", 0), ("body", None)), 0)
    assert enclosing_statement(module, ()) is None
    assert enclosing_statement(cst.parse_expression("f(x)"), (("args", 0),)) is None
