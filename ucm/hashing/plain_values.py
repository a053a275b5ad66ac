"""Configuration objects as plain values, the same in every process."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_DEPTH = 8


def plain(value: Any, depth: int = _DEPTH) -> Any:
    """A value with nothing in it that depends on the process: no addresses, no order of sets.

    Args:
        value: A setting of vLLM: numbers, texts, collections, enumerations, dataclasses, torch dtypes, callables.
        depth: How many levels to follow.

    Returns:
        None, bools, numbers, texts, lists and dicts of those.
    """
    inner = functools.partial(plain, depth=depth - 1)
    if value is None or type(value) in {bool, int, float, str}:
        return value
    if depth == 0:
        return _name(type(value))
    if isinstance(value, Mapping):
        return {str(inner(key)): inner(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = [inner(item) for item in value]
        return items if isinstance(value, list | tuple) else sorted(items, key=repr)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: inner(getattr(value, field.name, None)) for field in fields(value)}
    return _object(value, inner)


def _object(value: Any, inner: Callable[[Any], Any]) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str | bytes | PurePath) or type(value).__module__ in {
        "torch",
        "numpy",
    }:  # dtypes, devices, numbers
        return str(value)
    if isinstance(value, functools.partial):
        return inner([value.func, value.args, value.keywords])
    if callable(value):
        return _name(value)
    to_dict = getattr(value, "to_dict", None)
    return inner(to_dict() if callable(to_dict) else {"type": _name(type(value)), **getattr(value, "__dict__", {})})


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
