"""Format the commands' output: times, amounts, progress bars."""

from __future__ import annotations

import datetime as dt
import sys
import time
from typing import Any

import tqdm

from ucm.commands.options import many
from ucm.config.settings import format_size

#: The description of an empty directory.
NO_STORE = "no store here: none was written yet, this is another directory, or its file system is not mounted"
_STEPS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
#: A block in use has a time that is so far ahead, with the usual ``store.touch_seconds``.
_IN_USE_SECONDS = 120.0


def ago(moment: float | None) -> str:
    """Return how long ago a block was last used, or how long it is kept.

    Args:
        moment: Its time of last use, in seconds since the epoch, or None; that of a leased block is ahead.
    """
    if moment is None:
        return "never"
    age = time.time() - moment
    for length, unit in _STEPS if not -_IN_USE_SECONDS < age < 0 else ():
        if abs(age) >= 2 * length:
            return f"{age / length:.0f} {unit} ago" if age > 0 else f"kept {-age / length:.0f} {unit}"
    return "just now"


def iso(moment: float | None) -> str | None:
    """Return a moment in ISO 8601; None if there is none, or it is out of range."""
    if moment is None:
        return None
    try:
        return dt.datetime.fromtimestamp(moment, dt.timezone.utc).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return None


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
