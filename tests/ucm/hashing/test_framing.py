"""The encoding is unambiguous."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm.hashing.framing import frame

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(), v, max_size=4), max_leaves=8
)


def tagged(value: Any) -> Any:
    """The value with its types, because 1 == True == 1.0 in Python, and 0.0 == -0.0."""
    if isinstance(value, list):
        return ["list", *map(tagged, value)]
    if isinstance(value, dict):
        return {key: tagged(item) for key, item in value.items()}
    return (type(value).__name__, math.copysign(1, value) if isinstance(value, float) else 0, value)


@given(VALUES, VALUES)
def test_equal_bytes_mean_equal_values(one: Any, other: Any) -> None:
    assert (frame(one) == frame(other)) == (tagged(one) == tagged(other))


@given(st.lists(st.binary()), st.lists(st.binary()))
def test_the_cuts_between_items_count(one: list[bytes], other: list[bytes]) -> None:
    assert (frame(one) == frame(other)) == (one == other)


def test_no_encoding_is_the_beginning_of_another() -> None:
    values = [None, True, 1, 12, "1", "12", b"1", [1], [1, 2], {}, {"a": 1}]
    codes = [frame(value) for value in values]
    assert [a for a in codes for b in codes if a != b and b.startswith(a)] == []


def test_the_order_of_a_mapping_does_not_count() -> None:
    assert frame({"a": 1, "b": 2}) == frame({"b": 2, "a": 1})


def test_what_has_no_encoding() -> None:
    with pytest.raises(TypeError, match="object has no encoding"):
        frame([1, object()])
