"""Parse and format sizes in bytes."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {"b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-zA-Z]*)\s*", re.ASCII)

#: How to write a size, for messages.
SIZE_HELP = "write bytes as a whole number, or a text with a unit such as '512MiB', '200GiB' or '1.5TB'"


def parse_size(value: object) -> int:
    """Return the bytes of a size: a number, or a text such as ``200GiB``.

    Units of 1024 have an ``i`` (KiB, MiB, GiB, TiB, PiB), units of 1000 have none (kB, MB, GB, TB, PB); case does not
    matter. A number is bytes. A bare ``G`` is ambiguous and is refused.

    Raises:
        ValueError: If it is not a size, or less than one byte.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        unit = match["unit"].lower() or "b"
        if unit not in _UNITS:
            raise ValueError(f"{match['unit']!r} is not a unit of size")
        size = int(Decimal(match["number"]) * _UNITS[unit])
    else:
        raise ValueError("not a size")
    if size < 1:
        raise ValueError("a size must be at least one byte")
    return size


def format_size(size: float) -> str:
    """Format a size with three digits and a unit of 1024."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1024 and len(units) > 1:  # noqa: PLR2004 - the step between the units
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if size >= 100 else f"{size:.3g} {units[0]}"  # noqa: PLR2004 - three digits
