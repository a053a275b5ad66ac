"""Rules: an id, a scope, an edit, and how often its anchor must match."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import libcst as cst

from transforms.engine.edits import AtEnd, AtStart, Beside
from transforms.engine.errors import RuleDefinitionError
from transforms.engine.flow import diversions, leaves
from transforms.engine.governance import check_reason
from transforms.engine.members import Keyword
from transforms.engine.releases import ALL_RELEASES, Absent, Releases

if TYPE_CHECKING:
    from transforms.engine.edits import Edit
    from transforms.engine.scope import Scope


@dataclass(frozen=True)
class ModulePath:
    """A module's path, and the releases that are known to have it there."""

    path: str
    releases: Releases = ALL_RELEASES


@dataclass(frozen=True)
class Module:
    """A source file, whose path may differ between releases.

    Attributes:
        id: Its name in this project.
        group: The unit that can be switched off in a process.
        paths: Its paths, newest first.
        absent: Releases that do not have it, or lack what the rules change; where it exists, the rules are tried.
        unused: Releases that have it, in which no rule is tried.
        reads_beside: Whether it reads files next to itself; the overlay's is then loaded under the original's path.
    """

    id: str
    group: str
    paths: tuple[ModulePath, ...]
    absent: tuple[Absent, ...] = ()
    reads_beside: bool = False
    unused: tuple[Absent, ...] = ()

    def candidates(self, release: str) -> list[str]:
        """Return its paths, those known for this release first; an unknown release is tried with all."""
        known = [p.path for p in self.paths if release in p.releases]
        return known + [p.path for p in self.paths if p.path not in known]


@dataclass(frozen=True)
class Variant:
    """One form of a rule's anchor.

    Attributes:
        scope: Where to look.
        edit: What to insert, and where.
        releases: The releases in which this form is known to fit; every release tries it.
        name: Its name among the rule's variants; empty if there is one variant.
    """

    scope: Scope
    edit: Edit
    releases: Releases = ALL_RELEASES
    name: str = ""


@dataclass(frozen=True)
class Upstreamed:
    """Evidence that a release already does what the rule inserts.

    Attributes:
        scope: Where to look.
        anchor: A pattern that occurs there; empty if the scope's existence is enough.
        note: What the release has.
    """

    scope: Scope
    note: str
    anchor: str = ""


@dataclass(frozen=True)
class Rule:
    """One insertion into one module.

    Attributes:
        id: ``<transform>.<what>``; it is the mark on the inserted line and the name in the lock.
        variants: The forms of its anchor; exactly one must fit.
        expect: How often the anchor must match in its scope.
        never: Patterns that must not occur in the scope, because they show that the code's meaning has changed.
        absent: Releases in which the anchor does not exist.
        upstreamed: Evidence that a release no longer needs the rule.
        diverts: Why its insertion may end the function or the pass of a loop early, or loops; empty if it does neither.
    """

    id: str
    variants: tuple[Variant, ...]
    expect: int = 1
    never: tuple[str, ...] = ()
    absent: tuple[Absent, ...] = field(default=())
    upstreamed: Upstreamed | None = None
    diverts: str = ""

    def __post_init__(self) -> None:
        if not self.variants or self.expect < 1:
            raise RuleDefinitionError("a rule needs at least one variant and one match", where=self.id)
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise RuleDefinitionError("two variants of a rule have one name", where=self.id)
        self._check_flow()

    def _check_flow(self) -> None:
        """Refuse insertions after which nothing runs, and those that may leave early without saying why."""
        found: set[str] = set()
        for variant in self.variants:
            if not isinstance(variant.edit, Beside | AtStart | AtEnd | Keyword):
                continue
            inserted = cst.parse_module(variant.edit.code)
            kinds = diversions(inserted)
            if "yield" in kinds:
                raise RuleDefinitionError(
                    "an insertion with `yield` would make a generator of the function", where=self.id
                )
            if any(map(leaves, inserted.body)):
                raise RuleDefinitionError(
                    "an insertion ends its function or loop unconditionally: nothing after it would run, also no "
                    "insertion of others",
                    where=self.id,
                    fix="let upstream's code run, and change its arguments or its result",
                )
            found |= kinds
        if found:
            what = f"an insertion can keep control from what follows it ({', '.join(sorted(found))}); its `diverts`"
            check_reason(self.diverts, what, self.id)
        if self.diverts and not found:
            raise RuleDefinitionError("`diverts` goes with an insertion that jumps or loops", where=self.id)

    def absence(self, release: str) -> str | None:
        """Return why the anchor does not exist in a release, or None."""
        return next((a.reason for a in self.absent if release in a.releases), None)


def rule(
    id: str,  # noqa: A002 - the field's name
    scope: Scope,
    edit: Edit,
    *,
    expect: int = 1,
    never: tuple[str, ...] = (),
    absent: tuple[Absent, ...] = (),
    diverts: str = "",
) -> Rule:
    """Make a rule whose anchor has one form in all releases."""
    return Rule(id, (Variant(scope, edit),), expect, never, absent, diverts=diverts)
