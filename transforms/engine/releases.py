"""Ranges of releases."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True)
class Releases:
    """A half-open range of releases.

    Attributes:
        since: The first release in it; empty for no lower end.
        before: The first release past its end; empty for no upper end.
    """

    since: str = ""
    before: str = ""

    def __contains__(self, release: str) -> bool:
        version = Version(release)
        return (not self.since or version >= Version(self.since)) and (
            not self.before or version < Version(self.before)
        )

    def __str__(self) -> str:
        if not self.since and not self.before:
            return "all releases"
        if not self.before:
            return f"since {self.since}"
        if not self.since:
            return f"before {self.before}"
        return f"{self.since} up to, but not including, {self.before}"


ALL_RELEASES = Releases()


@dataclass(frozen=True)
class Absent:
    """Releases that lack something, and why it is not needed there.

    Attributes:
        releases: The range.
        reason: What vLLM does instead.
    """

    releases: Releases
    reason: str
