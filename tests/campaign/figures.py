"""The counts of a part of the campaign, and whether it has failed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass
class Figures:
    """The counts of one part; those that must be zero come last."""

    trials: int = 0  #: kills, damaged files, removals, rounds
    committed: int = 0  #: blocks that a store reported as committed
    visible: int = 0  #: blocks that a lookup promised, to fresh processes unless the part says otherwise
    loaded: int = 0  #: blocks that were loaded correctly
    refused: int = 0  #: operations on blocks that failed as they should: counted, and recomputed by an engine
    left_by_faults: int = 0  #: temporary files before the cleanup

    corrupt_hits: int = 0  #: found but incomplete without injected damage, or found again although known as damaged
    wrong_bytes: int = 0  #: loads that reported success with other bytes
    lost: int = 0  #: committed, not deleted, and gone; or leased, and not for so long
    stuck: int = 0  #: stores that did not work again after the fault was over
    left_over: int = 0  #: temporary files that are still there after reopening
    crashes: int = 0  #: processes or threads that ended unexpectedly
    immortal: int = 0  #: blocks with a lease that nobody asked for, as its end is too late
    oversized: int = 0  #: directories that hold more than they may

    notes: list[str] = field(default_factory=list)  #: further results, in sentences

    def add(self, other: Figures) -> None:
        """Add another part's counts and notes."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.notes += [note for note in other.notes if note not in self.notes]

    @property
    def failed(self) -> bool:
        """Whether a count that must be zero is not."""
        return any(getattr(self, name) for name in MUST_BE_ZERO)

    def as_data(self) -> dict[str, Any]:
        """Return the counts for a program."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Figures:
        """Return the counts from the result of ``as_data``."""
        return cls(**data)


COUNTS = tuple(f.name for f in fields(Figures) if f.name != "notes")
MUST_BE_ZERO = COUNTS[COUNTS.index("corrupt_hits") :]


def table(parts: Mapping[str, Figures]) -> str:
    """Return the counts of all parts, one line each, and their notes."""
    total = Figures()
    for figures in parts.values():
        total.add(figures)
    rows = [["", *(name.replace("_", " ") for name in COUNTS)]]
    rows += [[part, *_counts(figures)] for part, figures in {**parts, "in all": total}.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{cell:>{w}}" for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    return "\n".join([*lines, *_notes(parts)])


def _counts(figures: Figures) -> Sequence[str]:
    return [f"{getattr(figures, name):,}" for name in COUNTS]


def _notes(parts: Mapping[str, Figures]) -> list[str]:
    return [f"{part}: {note}" for part, figures in parts.items() for note in figures.notes]
