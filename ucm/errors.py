"""The errors that are shown to an operator of vLLM: each says what went wrong, where, and what to do."""

from __future__ import annotations

import difflib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: This interpreter's pip, for messages: a bare `pip` may be that of another environment.
PIP = f"{sys.executable} -m pip"


class UcmError(Exception):
    """An error that the user can act on.

    Args:
        what: What went wrong, in one sentence.
        where: The file, setting or module concerned; empty if the sentence says it.
        fix: What to do about it.
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


class ConfigError(UcmError):
    """A setting is unknown, has the wrong type, or names something that does not exist."""


class SparseMethodError(UcmError):
    """A sparse method does not support the configuration or the request."""


def meant(given: str, known: Iterable[str]) -> str:
    """Return a question that names the known word most like a given one, with a space behind it; empty if none is."""
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""
