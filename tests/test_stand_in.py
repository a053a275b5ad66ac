"""A stand-in that does not accept the original's calls is refused when it is installed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.stand_in import disagreement

if TYPE_CHECKING:
    from collections.abc import Callable


def real(path: str, patience: float = 1.0, *, make: bool = True) -> str | None:
    return f"{path}{patience}{make}"


@pytest.mark.parametrize(
    "stand_in", [real, lambda *_, **__: None, lambda path, patience=0.0, *, make=False, other=1: None]
)
def test_what_takes_every_call_may_stand_for_it(stand_in: Callable[..., Any]) -> None:
    assert disagreement(real, stand_in) is None


@pytest.mark.parametrize(
    ("stand_in", "lacks"),
    [
        (lambda *_: None, "make"),
        (lambda path, *, make: None, "too many positional"),
        (lambda where, patience=0.0, *, make=True: None, "path"),
        (lambda path, patience, *, make=True: None, "patience"),
        (lambda path, patience=0.0, *, make=True, new: None, "new"),
    ],
)
def test_what_lacks_a_parameter_may_not(
    monkeypatch: pytest.MonkeyPatch, stand_in: Callable[..., Any], lacks: str
) -> None:
    place = SimpleNamespace(of=real)
    with pytest.raises(TypeError, match=lacks):
        monkeypatch.setattr(place, "of", stand_in)
    assert place.of is real


def test_a_name_s_stand_in_is_checked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="make"):
        monkeypatch.setattr("tests.test_stand_in.real", lambda *_: None)


def test_what_is_put_into_a_mapping_is_checked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="make"):
        monkeypatch.setitem({"of": real}, "of", lambda *_: None)
    with pytest.raises(TypeError, match="make"):
        monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(real=lambda *_: None))
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(real=lambda *_, **__: None))


#: Attributes that hold a function and replace none: a proxy, a layer, a configuration, a module that is built here, and
#: what an autospec does, which checks its own calls.
HOLDERS = ("spoil", "cpu_linear", "hf_overrides", "get_current_vllm_config_or_none", "side_effect")


def test_no_test_assigns_a_function_to_an_object() -> None:
    """Such an assignment would escape the check; a script without pytest does not count, nor does ``self.…``."""
    found = []
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            local = {node.name for node in ast.walk(function) if isinstance(node, ast.FunctionDef)}
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and (
                    isinstance(node.value, ast.Lambda) or (isinstance(node.value, ast.Name) and node.value.id in local)
                ):
                    found += [
                        f"{path.name}:{node.lineno}: {ast.unparse(target)}"
                        for target in node.targets
                        if isinstance(target, ast.Attribute)
                        and target.attr not in HOLDERS
                        and not ast.unparse(target).startswith("self.")
                    ]
    assert not sorted(set(found))


def test_what_is_no_function_is_not_compared() -> None:
    assert disagreement(1, lambda: 2) is None
    assert disagreement(None, real) is None
