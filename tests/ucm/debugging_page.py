"""Parse the tables of docs/debugging.md, for tests that check the code and for one that runs an engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
_ROW = re.compile(
    r"^\| (?P<step>[^|]*)\| `(?P<file>[^`]+)` \| (?P<functions>[^|]+) \| (?P<line>[^|]*)\|$", re.MULTILINE
)


@dataclass(frozen=True)
class Row:
    """One row of the ten steps.

    Attributes:
        number: The step; 0 in a continuation row.
        file: The path from the project's root.
        functions: ``function`` or ``Class.method``.
        line: The log line; empty if there is none.
    """

    number: int
    file: str
    functions: tuple[str, ...]
    line: str


def steps() -> list[Row]:
    """Return the rows of the three tables of steps."""
    part = TEXT[TEXT.index("## One request in ten steps") : TEXT.index("## Names in the original UCM")]
    return [
        Row(
            int(re.match(r"\d*", found["step"].strip())[0] or 0),  # type: ignore[index] # it matches always
            found["file"],
            tuple(re.findall(r"`([^`]+)`", found["functions"])),
            found["line"].strip().strip("`"),
        )
        for found in _ROW.finditer(part)
    ]


def names() -> list[tuple[str, str]]:
    """Return our file and name in each row of the table of names."""
    part = TEXT[TEXT.index("## Names in the original UCM") :]
    return re.findall(r"\| `([^`]+)` \| `([^`]+)` \|$", part, re.MULTILINE)
