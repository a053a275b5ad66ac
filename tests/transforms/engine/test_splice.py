"""What did not change keeps its bytes, and what cannot be placed is not guessed."""

from __future__ import annotations

import libcst as cst
import pytest

from transforms.engine.apply import apply_rules
from transforms.engine.edits import AtStart, after, before
from transforms.engine.members import Field, Keyword, Method, Parameter
from transforms.engine.rule import Rule, rule
from transforms.engine.scope import Scope
from transforms.engine.splice import spliced

SOURCE = '''\
"""A module."""
import os

def f(a):
    g(a)   # odd   spacing
    return a

@odd( 1 )
class C:
    """A class."""
    x : int=0

    def f(self):
        import os
        g(self)

    # before the method
    def h(self): return 1


class D(C):
\ty = 1
\tdef f(self):
\t\tg(self)
'''
RULES = {
    "in a function": rule("t.function", Scope("f"), after("g(a)", "new()")),
    "in a method": rule("t.method", Scope("C.f"), before("g(self)", "new()")),
    "in a method with tabs": rule("t.tabs", Scope("D.f"), after("g(self)", "new()")),
    "at the start": rule("t.start", Scope(), AtStart("import new")),
    "a method": rule("t.member", Scope("C"), Method("f", "def new(self):\n    return 2")),
    "a field": rule("t.field", Scope("C"), Field("new: int = 0")),
    "a keyword": rule("t.keyword", Scope("f"), Keyword("g(a)", "new", "None")),
    "a parameter": rule("t.parameter", Scope("C.f"), Parameter("new=None")),
}


def changed(source: bytes, *rules: Rule) -> tuple[cst.Module, cst.Module]:
    module = cst.parse_module(source)
    result, outcomes = apply_rules(module, rules, "m.py", "1.0")
    assert not any(outcome.status.failed for outcome in outcomes), outcomes
    return module, result


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("what", [*RULES, "everything"])
def test_it_is_what_libcst_prints(what: str, end: bytes) -> None:
    source = SOURCE.encode().replace(b"\n", end)
    module, result = changed(source, *(RULES.values() if what == "everything" else [RULES[what]]))
    assert spliced(source, module, result) == result.bytes != source


def test_other_orders_are_printed_in_their_order() -> None:
    module = cst.parse_module(SOURCE)
    turned = module.with_changes(body=module.body[::-1])
    assert spliced(SOURCE.encode(), module, turned) == turned.bytes


def test_without_a_change_it_is_the_source() -> None:
    module = cst.parse_module(SOURCE)
    assert spliced(b"whatever", module, module) == b"whatever"


@pytest.mark.parametrize(
    "source",
    [SOURCE.replace("\n", "\r"), SOURCE * 2, SOURCE.replace("odd   spacing", "other")],
    ids=["ends", "twice", "text"],
)
def test_what_does_not_stand_there_once_is_not_replaced(source: str) -> None:
    module, result = changed(SOURCE.encode(), RULES["in a function"])
    assert spliced(source.encode(), module, result) is None
