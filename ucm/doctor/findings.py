"""The findings of checks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucm.errors import UcmError
    from ucm.overlay.errors import OverlayImportError


class Status(enum.Enum):
    """The status of a finding, in ascending order of severity."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: The subject of the check, in a word or two.
        status: The status.
        what: The result, in one sentence.
        details: Lines of evidence.
        todo: The next steps, as commands where possible.
    """

    check: str
    status: Status
    what: str
    details: tuple[str, ...] = ()
    todo: tuple[str, ...] = ()

    @classmethod
    def of(cls, check: str, error: UcmError, *details: str, todo: str = "") -> Finding:
        """Return the finding that an error is, with what to do about it if the error does not say."""
        what, *lines = str(error).splitlines()
        return cls(check, Status.ERROR, what, (*details, *lines), tuple(filter(None, [error.fix or todo])))

    @classmethod
    def of_import(cls, check: str, error: OverlayImportError, *details: str) -> Finding:
        """Return the finding that an error is with which a process of vLLM would not start."""
        return cls(check, Status.ERROR, error.what, (*error.details, *details), tuple(error.ways_out))


def worst(findings: Iterable[Finding]) -> Status:
    """Return the most severe status."""
    order = list(Status)
    return max((finding.status for finding in findings), key=order.index, default=Status.OK)


def has_error(findings: Iterable[Finding]) -> bool:
    """Return whether any finding is an error."""
    return worst(findings) is Status.ERROR
