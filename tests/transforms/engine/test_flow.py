"""Statements that control never gets past are recognised."""

from __future__ import annotations

import libcst as cst
import pytest

from transforms.engine.flow import leaves


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
        "def f():\n    return",
        "class A:\n    a()",
    ],
)
def test_goes_on(code: str) -> None:
    assert not _leaves(code)
