"""The outcome of a rule: its status, and the details needed to act on it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """The result of trying a rule on a module."""

    APPLIED = "applied"
    PRESENT = "present"
    MISSING = "missing"
    ENDED = "ended"  #: the rule's file or class is gone
    AMBIGUOUS = "ambiguous"
    FORBIDDEN = "forbidden"
    UPSTREAMED = "upstreamed"
    NOT_APPLICABLE = "not applicable"

    @property
    def failed(self) -> bool:
        """Whether this outcome fails the build."""
        return self in {Status.MISSING, Status.ENDED, Status.AMBIGUOUS, Status.FORBIDDEN}


@dataclass(frozen=True)
class Candidate:
    """A place that resembles what a rule looked for."""

    line: int
    code: str


@dataclass(frozen=True)
class Outcome:
    """The status of one rule in one module.

    Attributes:
        rule: The rule's id.
        status: The outcome.
        path: The module's path in the release; empty if the release lacks the module.
        scope: The region that was searched.
        variant: The variant that fitted, if the rule has several.
        hits: How often the anchor matched.
        detail: The reason, for every status except applied and present.
        candidates: The nearest places, for a rule with too few or too many matches.
    """

    rule: str
    status: Status
    path: str
    scope: str = ""
    variant: str = ""
    hits: int = 0
    detail: str = ""
    candidates: tuple[Candidate, ...] = ()

    def describe(self) -> str:
        """The outcome as lines of text."""
        head = f"{self.status.value}: {self.rule} in {self.path or 'no module'}"
        lines = [head + (f" ({self.scope})" if self.scope else "")]
        if self.detail:
            lines.append(f"    {self.detail}")
        lines += [f"    nearest: line {c.line}: {c.code}" for c in self.candidates]
        return "\n".join(lines)
