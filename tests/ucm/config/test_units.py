"""Parsing and formatting sizes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm.config.units import format_size, parse_size

if TYPE_CHECKING:
    from decimal import Decimal

UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}


@given(st.integers(1, 10**9), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_a_whole_number_and_a_unit(number: int, unit: str, space: str, upper: bool) -> None:
    text = f"{number}{space}{unit}"
    assert parse_size(text.upper() if upper else text) == number * UNITS[unit]


@given(st.decimals("0.001", "9999", places=3), st.sampled_from(["GiB", "TB"]))
def test_a_fraction_is_exact(number: Decimal, unit: str) -> None:
    assert parse_size(f"{number}{unit}") == int(number * UNITS[unit])


@pytest.mark.parametrize("value", [1, 4096, 10**18])
def test_a_number_is_bytes(value: int) -> None:
    assert parse_size(value) == value


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (0, "at least one byte"),
        (-1, "at least one byte"),
        ("0GiB", "at least one byte"),
        ("0.0001 B", "at least one byte"),
        (True, "not a size"),
        (1.5, "not a size"),
        (None, "not a size"),
        ("", "not a size"),
        ("GiB", "not a size"),
        ("-1GiB", "not a size"),
        ("1,5GiB", "not a size"),
        ("1e3", "not a size"),
        ("٣GiB", "not a size"),
        ("5G", "'G' is not a unit of size"),
        ("5 Gib s", "not a size"),
        ("5 blocks", "'blocks' is not a unit of size"),
    ],
)
def test_what_is_no_size(value: object, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse_size(value)


@given(st.integers(1, 2**60))
def test_what_is_shown_is_near_what_it_is(size: int) -> None:
    shown = format_size(size)
    assert re.fullmatch(r"(\d{1,4}|\d{1,2}\.\d{1,2}|\d+\.\d) ([KMGTP]i)?B", shown), shown
    assert abs(parse_size(shown) - size) <= size * 0.01
