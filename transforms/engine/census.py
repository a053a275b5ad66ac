"""A census: every place in a package of a kind that matters, and the consequence where no rule hooks it.

A release can do in a second place what a rule hooks in the first; the rule still fits, but misses it. A census finds
all such places. Each one is either hooked by a rule or classified by a person, with a reason; any other fails the
build. A census without rules counts what the runtime must know although nothing is inserted there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase

from transforms.engine.errors import RuleDefinitionError
from transforms.engine.governance import check_reason
from transforms.engine.releases import ALL_RELEASES, Releases
from transforms.engine.sites import site_pattern


class Consequence(Enum):
    """The consequence of a place that no rule hooks."""

    REACHES = "reaches a hook"  #: what runs there also passes a hooked place
    REFUSED = "refused"  #: the runtime refuses to serve with what runs there, and names it
    HARMLESS = "no concern"  #: what happens there does not matter to any hook
    CONTENT = "keyed by content"  #: what it finds follows from what it is computed from
    NAMED = "found by a name"  #: what it finds follows from a name, so the runtime must know what the name stood for
    GAP = "gap"  #: it bypasses the hooks or what watches names, and nothing refuses it


@dataclass(frozen=True)
class Elsewhere:
    """Places that no rule hooks, and the consequence.

    Attributes:
        sites: Patterns ``path:qualified name``, with the wildcards of file names, ``*`` also for ``/``.
        consequence: The consequence.
        reason: The reason, detailed enough for a reviewer to check.
        refused_by: For `Consequence.REFUSED`, the function that refuses: ``package.module:name``.
        releases: The releases in which this is known to hold.
    """

    sites: tuple[str, ...]
    consequence: Consequence
    reason: str
    refused_by: str = ""
    releases: Releases = ALL_RELEASES

    def __post_init__(self) -> None:
        where = ", ".join(self.sites)
        check_reason(self.reason, "the reason of a classification", where)
        if (self.consequence is Consequence.REFUSED) != bool(self.refused_by):
            raise RuleDefinitionError("`refused_by` goes with the consequence REFUSED, and only with it", where=where)
        if not self.sites or any(site.count(":") != 1 for site in self.sites):
            raise RuleDefinitionError("a classification's sites are not written as `path:qualified name`", where=where)

    def patterns_for(self, site: str) -> list[str]:
        """Return its patterns that match a site, ``path:qualified name``."""
        return [pattern for pattern in self.sites if fnmatchcase(site, pattern)]


@dataclass(frozen=True)
class Census:
    """A search for one kind of place.

    Attributes:
        id: ``<transform>.<what>``.
        what: A description of the places.
        patterns: The patterns that match them, see `transforms.engine.sites`.
        rules: The rules that hook such places; each match covers one place in its function.
        elsewhere: The classification of the other places; the first entry that matches a place applies.
    """

    id: str
    what: str
    patterns: tuple[str, ...]
    rules: tuple[str, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()

    def __post_init__(self) -> None:
        for text in self.patterns:
            site_pattern(text)

    def classified(self, site: str, release: str) -> Elsewhere | None:
        """Return the classification of a site, ``path:qualified name``, in a release."""
        return next((e for e in self.elsewhere if release in e.releases and e.patterns_for(site)), None)
