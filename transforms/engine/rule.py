"""What a rule is: an id, a module, a scope, an edit and how often it must match."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transforms.engine.errors import RuleDefinitionError
from transforms.engine.releases import ALL_RELEASES, Absent, Releases

if TYPE_CHECKING:
    from transforms.engine.edits import Edit
    from transforms.engine.scope import Scope


@dataclass(frozen=True)
class ModulePath:
    """A path that a module has, and the releases in which it is known to have it."""

    path: str
    releases: Releases = ALL_RELEASES


@dataclass(frozen=True)
class Module:
    """A vLLM source file under one name, wherever a release keeps it.

    Attributes:
        id: Our name for it.
        group: The unit that can be switched off in a process.
        paths: Where it lies, the newest place first.
        absent: Releases that do not have it.
    """

    id: str
    group: str
    paths: tuple[ModulePath, ...]
    absent: tuple[Absent, ...] = ()

    def candidates(self, release: str) -> list[str]:
        """Its paths, those known for this release first; an unknown release is tried with all."""
        known = [p.path for p in self.paths if release in p.releases]
        return known + [p.path for p in self.paths if p.path not in known]


@dataclass(frozen=True)
class Variant:
    """One form of an anchor.

    Attributes:
        scope: Where to look.
        edit: What to attach to, and what to insert.
        releases: Where this form is known to hold; it is tried everywhere.
        name: What tells it from the rule's other forms; empty where there is one form.
    """

    scope: Scope
    edit: Edit
    releases: Releases = ALL_RELEASES
    name: str = ""


@dataclass(frozen=True)
class Upstreamed:
    """What shows that a release has of itself what the rule would insert.

    Attributes:
        scope: Where to look.
        anchor: A pattern that occurs there; empty where the scope's existence is enough.
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
        never: Patterns that must not occur in the scope: a sign that the code has changed its meaning.
        absent: Releases in which the anchor does not exist.
        upstreamed: What shows that a release does not need the rule any more.
    """

    id: str
    variants: tuple[Variant, ...]
    expect: int = 1
    never: tuple[str, ...] = ()
    absent: tuple[Absent, ...] = field(default=())
    upstreamed: Upstreamed | None = None

    def __post_init__(self) -> None:
        if not self.variants or self.expect < 1:
            raise RuleDefinitionError("a rule needs at least one variant and one match", where=self.id)
        names = [variant.name for variant in self.variants]
        if len(set(names)) != len(names):
            raise RuleDefinitionError("two variants of a rule have one name", where=self.id)

    def absence(self, release: str) -> str | None:
        """Why the anchor does not exist in a release, or None."""
        return next((a.reason for a in self.absent if release in a.releases), None)


def rule(
    id: str,  # noqa: A002 - the field's name
    scope: Scope,
    edit: Edit,
    *,
    expect: int = 1,
    never: tuple[str, ...] = (),
    absent: tuple[Absent, ...] = (),
) -> Rule:
    """A rule whose anchor has one form in all releases."""
    return Rule(id, (Variant(scope, edit),), expect, never, absent)
