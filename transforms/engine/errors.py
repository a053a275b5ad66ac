"""The errors of the build: each says what went wrong, where, and what to do."""

from __future__ import annotations


class OverlayError(Exception):
    """A failure of the build that the user can act on.

    Args:
        what: What went wrong, in one sentence.
        where: The file, release, rule or setting concerned; empty if the sentence says it.
        fix: What to do about it, in one or two sentences.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  to do: {self.fix}")
        return "\n".join(lines)


class RuleDefinitionError(OverlayError):
    """A transform's definition is wrong: a pattern does not parse, a field is empty, an id is used twice."""
