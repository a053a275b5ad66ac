"""Scopes find regions by name and by loop."""

from __future__ import annotations

import libcst as cst
import pytest

from transforms.engine.scope import Scope, definitions, statements
from transforms.engine.tree import code_of, get

CODE = """\
import os

def free():
    def hidden():
        pass

class A:
    def run(self):
        for x in xs:
            while x:
                use(x)
            step(x)
        for y in ys:
            use(y)
            use(y)

    if os.name:
        def guarded(self):
            pass
    else:
        def other(self):
            pass

    class Inner:
        def deep(self):
            pass

try:
    def tried(): pass
except ImportError:
    def caught(): pass
else:
    def untroubled(): pass
finally:
    def always(): pass

with ctx:
    class B:
        def run(self): pass
"""
MODULE = cst.parse_module(CODE)


def first_line(scope: Scope) -> list[str]:
    return [code_of(get(MODULE, path)).partition("\n")[0] for path in scope.find(MODULE)]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("free", "def free():"),
        ("A", "class A:"),
        ("A.run", "def run(self):"),
        ("A.guarded", "def guarded(self):"),
        ("A.other", "def other(self):"),
        ("A.Inner.deep", "def deep(self):"),
        ("tried", "def tried(): pass"),
        ("caught", "def caught(): pass"),
        ("untroubled", "def untroubled(): pass"),
        ("always", "def always(): pass"),
        ("B.run", "def run(self): pass"),
        ("free.hidden", "def hidden():"),
    ],
)
def test_finds_a_definition_by_its_qualified_name(name: str, line: str) -> None:
    assert first_line(Scope(name)) == [line]


@pytest.mark.parametrize("name", ["hidden", "run", "A.deep", "Inner", "A.missing", "C.run"])
def test_finds_nothing_elsewhere(name: str) -> None:
    assert Scope(name).find(MODULE) == []


def test_the_empty_scope_is_the_module() -> None:
    assert Scope().find(MODULE) == [()]
    assert str(Scope()) == "the module"


def test_finds_each_of_several_definitions_of_one_name() -> None:
    module = cst.parse_module("if a:\n    def f(): pass\nelse:\n    def f(): pass\n")
    assert len(Scope("f").find(module)) == 2


def test_a_loop_is_the_innermost_one_around_its_statement() -> None:
    assert first_line(Scope("A.run", loop_with="use(x)")) == ["while x:"]
    assert first_line(Scope("A.run", loop_with="step(x)")) == ["for x in xs:"]


def test_a_loop_counts_once_however_often_the_statement_occurs_in_it() -> None:
    assert first_line(Scope("A.run", loop_with="use(y)")) == ["for y in ys:"]


def test_two_loops_with_the_statement_are_two_regions() -> None:
    assert len(Scope("A.run", loop_with="use(_)").find(MODULE)) == 2


def test_a_statement_outside_every_loop_has_none() -> None:
    assert Scope("A", loop_with="pass").find(MODULE) == []


def test_a_loop_scope_says_what_it_looks_for() -> None:
    assert str(Scope("A.run", loop_with="use(x)")) == "A.run, the loop with `use(x)`"


def test_lists_definitions_with_their_places() -> None:
    found = dict(definitions(MODULE))
    assert {"free", "A", "A.run", "A.guarded", "A.Inner", "tried", "B", "B.run"} <= found.keys()
    assert "hidden" not in found
    assert all(cst.ensure_type(get(MODULE, p), cst.FunctionDef) for n, p in found.items() if n.endswith("run"))


def test_lists_statements_at_every_depth() -> None:
    module = cst.parse_module("a = 1\nif a:\n    b = 2\n")
    assert [code_of(node).partition("\n")[0] for _, node in statements(module)] == ["a = 1", "if a:", "b = 2"]
