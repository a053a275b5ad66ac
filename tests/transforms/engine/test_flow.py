"""Statements that control never gets past are recognised."""

from __future__ import annotations

import libcst as cst
import pytest

from transforms.engine.flow import is_passed_by, leaves
from transforms.engine.patterns import pattern


def _leaves(code: str) -> bool:
    return leaves(cst.ensure_type(cst.parse_module(code), cst.Module).body[0])


@pytest.mark.parametrize(
    "code",
    [
        "return",
        "raise E",
        "break",
        "continue",
        "a(); return",
        "if a:\n    return\nelse:\n    raise E",
        "if a: return\nelif b: return\nelse: return",
        "with a:\n    return",
        "while True:\n    a()",
        "try:\n    return\nexcept E:\n    raise",
        "try:\n    a()\nexcept E:\n    raise\nelse:\n    return",
        "try:\n    a()\nfinally:\n    return",
        "try:\n    return\nexcept* E:\n    raise",
        "match a:\n    case 1:\n        return\n    case _:\n        raise E",
        "sys.exit()",
        "sys.exit(1)",
        "exit()",
        "os._exit(0)",
        "assert not True",
        "if True:\n    return",
        "if 1: return\nelse: a()",
        "if False:\n    a()\nelse:\n    return",
        "while 1:\n    for a in b:\n        break",
        "while not False:\n    a()",
        "if a:\n    if b:\n        return\n    else:\n        return\nelse:\n    return",
    ],
)
def test_leaves(code: str) -> None:
    assert _leaves(code)


@pytest.mark.parametrize(
    "code",
    [
        "a()",
        "if a:\n    return",
        "if a:\n    return\nelse:\n    b()",
        "if a: return\nelif b: c()\nelse: return",
        "for x in y:\n    return",
        "while a:\n    return",
        "while True:\n    break",
        "with a:\n    b()",
        "try:\n    return\nexcept E:\n    a()",
        "try:\n    a()\nexcept E:\n    return",
        "match a:\n    case 1:\n        return",
        "match a:\n    case _ if b:\n        return",
        "match a:\n    case 1:\n        b()\n    case _:\n        return",
        "if False:\n    return",
        "if TYPE_CHECKING:\n    return",
        "if a or False:\n    return",
        "exit",
        "self.exit()",
        "exit = a()",
        "while True:\n    for a in b:\n        pass\n    else:\n        break",
        "def f():\n    return",
        "class A:\n    a()",
    ],
)
def test_goes_on(code: str) -> None:
    assert not _leaves(code)


@pytest.mark.parametrize(
    ("code", "passed"),
    [
        ("sys.exit()\nanchor()", True),
        ("if False:\n    anchor()", True),
        ("if 0: pass\nelif not True:\n    anchor()", True),
        ("if typing.TYPE_CHECKING:\n    anchor()", True),
        ("while None:\n    anchor()", True),
        ("if a and False:\n    anchor()", True),
        ("if True:\n    a()\nelse:\n    anchor()", True),
        ("x = anchor() if False else a", True),
        ("if False:\n    a()\nelse:\n    anchor()", False),
        ("if True:\n    anchor()", False),
        ("if a or True:\n    anchor()", False),
        ("if a and b:\n    anchor()", False),
        ("if anchor():\n    a()", False),
        ("while True:\n    anchor()", False),
        ("x = a if False else anchor()", False),
    ],
)
def test_is_passed_by(code: str, passed: bool) -> None:
    module = cst.ensure_type(cst.parse_module(code), cst.Module)
    (path,) = pattern("anchor()").find(module)
    assert is_passed_by(module, path) is passed
