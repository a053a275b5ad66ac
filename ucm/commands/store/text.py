"""Format the commands' output: text, tables, progress bars, JSON."""

from __future__ import annotations

import datetime as dt
import json
import sys
import time
from typing import TYPE_CHECKING, Any

import tqdm

from ucm.config.settings import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The description of an empty directory.
NO_STORE = "no store here: none was written yet, this is another directory, or its file system is not mounted"
_STEPS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def say(lines: Iterable[str]) -> None:
    """Print results."""
    for line in lines:
        sys.stdout.write(f"{line}\n")


def say_json(data: Any) -> None:
    """Print a result for a program."""
    say([json.dumps(data, indent=1, ensure_ascii=False)])


def ago(moment: float | None) -> str:
    """Return how long ago a moment was.

    Args:
        moment: The moment, in seconds since the epoch, or None.
    """
    if moment is None:
        return "never"
    age = time.time() - moment
    if age < -1:
        return "in the future"
    for length, unit in _STEPS:
        if age >= 2 * length:
            return f"{age / length:.0f} {unit} ago"
    return "just now"


def iso(moment: float | None) -> str | None:
    """Return a moment in ISO 8601; None if there is none, or it is out of range."""
    if moment is None:
        return None
    try:
        return dt.datetime.fromtimestamp(moment, dt.timezone.utc).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None


def many(number: int, one: str, more: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else more}"


def blocks_and_bytes(blocks: int, nbytes: int) -> str:
    """Return a number of blocks and their size."""
    return f"{many(blocks, 'block', 'blocks')}, {format_size(nbytes)}"


def about_unmarked(path: str) -> list[str]:
    """Return the message about a namespace without a marker."""
    return [
        f"{path} looks like a namespace but lacks its marker, so nothing cleans it up.",
        "  An engine that uses it creates the marker again within minutes; if none does, delete the directory.",
    ]


def progress(what: str, total: int | None, unit: str) -> tqdm.tqdm[Any]:
    """Return a progress bar on standard error, shown only in a terminal.

    Args:
        what: The activity.
        total: The total amount, if known.
        unit: ``B`` for bytes, shown with units of 1024, or a noun.
    """
    nbytes = unit == "B"
    return tqdm.tqdm(
        desc=what,
        total=total,
        unit=unit if nbytes else f" {unit}",
        unit_scale=nbytes,
        unit_divisor=1024 if nbytes else 1000,
        disable=None,
        leave=False,
        file=sys.stderr,
    )
