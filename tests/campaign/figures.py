"""What a part of the campaign counts, and when it has failed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass
class Figures:
    """Counts of one part; those that must be zero stand last."""

    trials: int = 0  #: kills, damaged files, removals, rounds
    committed: int = 0  #: blocks that a store reported as committed
    visible: int = 0  #: blocks that a lookup promised, to fresh processes unless the part says otherwise
    loaded: int = 0  #: blocks that were loaded, and were right
    refused: int = 0  #: operations on blocks that failed as they should: counted, and recomputed by an engine
    left_by_faults: int = 0  #: temporary files that lay about before anybody tidied

    corrupt_hits: int = 0  #: promised and torn though nobody damaged them, or promised again though known as damaged
    wrong_bytes: int = 0  #: loads that reported success and brought other bytes
    lost: int = 0  #: committed, not deleted by anybody, and gone
    stuck: int = 0  #: stores that did not work again after the fault was over
    left_over: int = 0  #: temporary files that are still there after reopening
    crashes: int = 0  #: processes or threads that ended otherwise than they should

    notes: list[str] = field(default_factory=list)  #: what else there is to say, in sentences

    def add(self, other: Figures) -> None:
        """Take another one's counts and notes."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.notes += [note for note in other.notes if note not in self.notes]

    @property
    def failed(self) -> bool:
        """Whether something is not zero that must be."""
        return any(getattr(self, name) for name in MUST_BE_ZERO)

    def as_data(self) -> dict[str, Any]:
        """The counts for a program."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Figures:
        """What ``as_data`` made."""
        return cls(**data)


COUNTS = tuple(f.name for f in fields(Figures) if f.name != "notes")
MUST_BE_ZERO = COUNTS[COUNTS.index("corrupt_hits") :]


def table(parts: Mapping[str, Figures]) -> str:
    """The counts of all parts, one line each, and their notes."""
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
