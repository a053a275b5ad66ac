"""Configuration objects become values that say the same in every process."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ucm.hashing.framing import frame
from ucm.hashing.plain_values import plain


class Backend(Enum):
    FLASH = "flash"
    TORCH = "torch"


class Text(str):
    __slots__ = ()


@dataclass
class Options:
    backend: Backend
    layers: frozenset[int]


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value


class Described:
    def to_dict(self) -> dict[Any, Any]:
        return {"theta": 1e4, 1: (None, True)}


def override(config: Any, theta: float) -> Any:
    return config, theta


HERE = __name__


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (None, None),
        (True, True),
        (0.5, 0.5),
        ("a", "a"),
        (Text("a"), "a"),
        (np.float32(2), "2.0"),
        (Path("/a"), "/a"),
        ((1, [2]), [1, [2]]),
        ({3, 1, 2}, [1, 2, 3]),
        (Backend.FLASH, "FLASH"),
        (Options(Backend.TORCH, frozenset({2, 1})), {"backend": "TORCH", "layers": [1, 2]}),
        (Options, f"{HERE}.Options"),
        (override, f"{HERE}.override"),
        (functools.partial(override, theta=2.0), [f"{HERE}.override", [], {"theta": 2.0}]),
        (Opaque(3), {"type": f"{HERE}.Opaque", "value": 3}),
        (Described(), {"theta": 1e4, "1": [None, True]}),
    ],
)
def test_what_becomes_of_it(value: Any, wanted: Any) -> None:
    assert plain(value) == wanted
    assert type(plain(value)) is type(wanted)
    assert frame(plain(value))
    assert json.dumps(plain(value))


def test_something_that_holds_itself_ends() -> None:
    chain = Opaque(1)
    chain.value = chain  # type: ignore[assignment]
    assert json.dumps(plain(chain)).count("Opaque") == 5
