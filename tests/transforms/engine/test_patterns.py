"""Patterns match by structure."""

from __future__ import annotations

import libcst as cst
import pytest

from transforms.engine.errors import RuleDefinitionError
from transforms.engine.patterns import Pattern, pattern


def count(text: str, code: str) -> int:
    return len(pattern(text).find(cst.parse_module(code)))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("f(_)", "f(a + b)\n"),
        ("f(_, x)", "f(None, x)\n"),
        ("_.run(x)", "self.runner.run(x)\n"),
        ("self._", "self.anything\n"),
        ("f(...)", "f()\n"),
        ("f(...)", "f(a, b=c, *d, **e)\n"),
        ("f(a, ...)", "f(a, b=c)\n"),
        ("f(a, ..., k=1)", "f(a, b, z=2, k=1)\n"),
        ("f(a=1, b=2)", "f(b=2, a=1)\n"),
        ("f('a')", 'f("a")\n'),
        ("f(a, b)", "f(\n    a,  # one\n\n    b,\n)\n"),
        ("x = a + b", "x   =  (a\n      + b)  # sum\n"),
        ("x[1:2]", "x[ 1 : 2 ]\n"),
        ("for x in y: ...", "for x in y:\n    a()\n    b()\n"),
        ("for x in y: ...", "for x in y: a()\n"),
        ("if a: f()", "if a:\n\n    # why\n    f()\n"),
        ("if a:\n    f()\n    g()", "if a: f(); g()\n"),
        ("return a", "def f():\n    return (a)\n"),
        ("x: int = 1", "x : int=1\n"),
        ("a[...]", "a[...]\n"),
        ("f(*a)", "f(*a)\n"),
    ],
)
def test_matches_whatever_the_layout(text: str, code: str) -> None:
    assert count(text, code) == 1


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("f(_)", "f()\n"),
        ("f(_)", "f(a, b)\n"),
        ("f(_)", "f(*a)\n"),
        ("f(a, ...)", "f(b)\n"),
        ("f(a, ...)", "f(*a)\n"),
        ("f(..., k=1)", "f(k=2)\n"),
        ("f(..., k=1)", "f(1)\n"),
        ("f(a, b)", "f(b, a)\n"),
        ("f()", "g()\n"),
        ("f('a')", "f(b'a')\n"),
        ("x = a", "x += a\n"),
        ("x = a", "x: int = a\n"),
        ("if a: ...", "if a:\n    b()\nelse:\n    c()\n"),
        ("if a: f()", "if a:\n    f()\n    g()\n"),
        ("for x in y: ...", "async def f():\n    async for x in y:\n        pass\n"),
        ("a[...]", "a[0]\n"),
        ("a < b", "a > b\n"),
    ],
)
def test_does_not_match_what_means_something_else(text: str, code: str) -> None:
    assert count(text, code) == 0


def test_finds_every_match_in_source_order() -> None:
    module = cst.parse_module("f(1)\nif a:\n    f(2)\n    g(f(3))\n")
    assert len(pattern("f(_)").find(module)) == 3
    assert pattern("f(_)").find(module) == sorted(pattern("f(_)").find(module), key=lambda path: path[0][1] or 0)


def test_a_statement_is_not_an_expression() -> None:
    assert count("x = f(a)", "y = f(a)\n") == 0
    assert count("f(a)", "x = f(a)\n") == 1


@pytest.mark.parametrize("text", ["", "x =", "a; b", "a\nb", "def f(: ..."])
def test_refuses_what_is_not_one_piece_of_code(text: str) -> None:
    with pytest.raises(RuleDefinitionError, match="pattern") as caught:
        Pattern(text)
    assert repr(text) in str(caught.value)


def test_compiles_a_pattern_once() -> None:
    assert pattern("f(a)") is pattern("f(a)")
