"""Encode plain values as bytes unambiguously: two values have the same bytes only if they are equal."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any


def frame(value: Any) -> bytes:
    """Return the encoding of a plain value.

    Every item carries its type and its length, so no two sequences of items have the same encoding. Mappings are
    encoded in the order of their encoded keys; lists and tuples are encoded alike.

    Args:
        value: None, a bool, an int, a float, a str, bytes, or a list, tuple or mapping of those.

    Raises:
        TypeError: The value contains anything else.
    """
    if value is None or isinstance(value, bool):
        return b"n" if value is None else b"t" if value else b"f"
    if isinstance(value, int):
        return _sized(b"i", str(int(value)).encode())
    if isinstance(value, float):
        return b"d" + struct.pack("<d", value)
    if isinstance(value, str):
        return _sized(b"s", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes | bytearray | memoryview):
        return _sized(b"b", bytes(value))
    if isinstance(value, list | tuple):
        return _counted(b"l", [frame(item) for item in value])
    if isinstance(value, Mapping):
        return _counted(b"m", sorted(frame(key) + frame(item) for key, item in value.items()))
    raise TypeError(f"{type(value).__qualname__} has no encoding")


def _sized(tag: bytes, data: bytes) -> bytes:
    return b"%b%d:%b" % (tag, len(data), data)


def _counted(tag: bytes, items: list[bytes]) -> bytes:
    return b"%b%d:%b" % (tag, len(items), b"".join(items))
