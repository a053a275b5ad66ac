"""A stand-in that does not accept the original's calls is refused when it is installed."""

from __future__ import annotations

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


def test_what_is_no_function_is_not_compared() -> None:
    assert disagreement(1, lambda: 2) is None
    assert disagreement(None, real) is None
