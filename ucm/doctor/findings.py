"""What a check says."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Status(enum.Enum):
    """How good it is; the order is that of gravity."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """The answer of one check.

    Attributes:
        check: What was looked at, in a word or two.
        status: How good it is.
        what: What was found, in one sentence.
        details: Lines that show it.
        todo: What to do next, a command where there is one.
    """

    check: str
    status: Status
    what: str
    details: tuple[str, ...] = ()
    todo: tuple[str, ...] = ()


def worst(findings: Iterable[Finding]) -> Status:
    """The gravest status."""
    order = list(Status)
    return max((finding.status for finding in findings), key=order.index, default=Status.OK)


def has_error(findings: Iterable[Finding]) -> bool:
    """Whether any finding is an error."""
    return worst(findings) is Status.ERROR
