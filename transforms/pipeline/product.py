"""Products: a package, and the registries whose rules change it, in a stated order.

Two overlays cannot shadow the same module. One build therefore applies the registries of several owners, each to the
result of the previous one, and the lock names the places where they meet.

On a command line, a product is the prefix of a release: ``ascend-0.23.0`` is Ascend's, ``ucm+acme-0.32.0`` has UCM's
rules and then Acme's, and ``0.32.0`` alone is UCM's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from itertools import combinations
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from transforms import registry
from transforms.ascend.registry import REGISTRY as ASCEND
from transforms.engine.errors import OverlayError
from transforms.engine.registry import Registry

if TYPE_CHECKING:
    from pathlib import Path

    from transforms.engine.census import Census
    from transforms.engine.registry import Package
    from transforms.engine.transform import Transform

#: The entry-point group under which other projects publish their registries.
GROUP = "ucm.transforms"
JOIN = "+"
OWN: tuple[Registry, ...] = (registry.REGISTRY, ASCEND)


class ProductError(OverlayError):
    """The registries of a build cannot be combined, or a registry does not exist."""


@dataclass(frozen=True)
class Product:
    """A package and the registries whose rules change it.

    Attributes:
        registries: In the order in which their rules are applied. The owner of the last one publishes the overlay.
        overlays: The directory of its locks.
    """

    registries: tuple[Registry, ...]
    overlays: Path

    @property
    def publisher(self) -> Registry:
        """The registry whose owner publishes the overlay."""
        return self.registries[-1]

    @property
    def package(self) -> Package:
        """The package to rewrite."""
        return self.publisher.package

    @property
    def owners(self) -> tuple[str, ...]:
        """The owners, in the order in which their rules are applied."""
        return tuple(one.owner for one in self.registries)

    @property
    def others(self) -> tuple[str, ...]:
        """The owners other than the publisher."""
        return self.owners[:-1]

    @cached_property
    def transforms(self) -> tuple[Transform, ...]:
        """The transforms of all owners, in order."""
        return tuple(transform for one in self.registries for transform in one.transforms)

    @cached_property
    def censuses(self) -> tuple[Census, ...]:
        """The censuses of all transforms, then those of the owners."""
        of_transforms = (census for transform in self.transforms for census in transform.census)
        return (*of_transforms, *(census for one in self.registries for census in one.census))

    @property
    def module(self) -> str:
        """The name of the package in a wheel."""
        return self.publisher.distribution.replace("-", "_")

    def owner_of(self, rule: str) -> Registry:
        """Return the owner's registry of a rule or transform."""
        bare = next((one for one in self.registries if one.has_bare_ids), self.publisher)
        return next((one for one in self.registries if rule.startswith(f"{one.owner}.")), bare)

    @property
    def is_default(self) -> bool:
        """Whether a command line selects it by default."""
        return self.owners == (registry.REGISTRY.owner,)

    def named(self, release: str) -> str:
        """Return the command-line name of this product's overlay of a release."""
        return release if self.is_default else f"{JOIN.join(self.owners)}-{release}"

    def directory(self, release: str) -> Path:
        """Return the directory of a release's reviewed overlay."""
        return self.overlays / f"{self.package.project}-{release}"

    def reviewed(self) -> list[str]:
        """Return the releases with a lock, oldest first."""
        prefix = f"{self.package.project}-"
        names = (path.parent.name.removeprefix(prefix) for path in self.overlays.glob(f"{prefix}*/lock.json"))
        return sorted(filter(_is_version, names), key=Version)


def compose(*registries: Registry) -> Product:
    """Make the product of some registries; its locks are separate from those of the registries alone.

    Raises:
        ProductError: If they are for different packages, or share an owner or the name of a group.
    """
    packages = {one.package for one in registries}
    if len(packages) != 1:
        raise ProductError(
            "registries for different packages cannot be applied in one build",
            where=", ".join(f"{one.owner}: {one.package}" for one in registries),
            fix="build one overlay of each package, both can be installed; if they mean the same package, import one "
            "`Package`, for instance from transforms.registry or transforms.ascend.registry",
        )
    for one, other in combinations(registries, 2):
        shared = {t.module.group for t in one.transforms} & {t.module.group for t in other.transforms}
        if one.owner == other.owner or one.seam.alias == other.seam.alias or shared:
            raise ProductError(
                "two registries of a build share the name of an owner, of a seam's first package, or of a group",
                where=f"{one.owner} and {other.owner}: {', '.join(sorted(shared)) or one.seam.alias}",
                fix="give each its own; a group's name starts with its owner's",
            )
    last = registries[-1]
    overlays = last.overlays / JOIN.join(one.owner for one in registries) if len(registries) > 1 else last.overlays
    return Product(registries, overlays)


#: UCM's own overlay of vLLM.
UCM = compose(registry.REGISTRY)


def registries() -> dict[str, Registry]:
    """Return the known registries by owner: this repository's, then those of installed projects.

    Raises:
        ProductError: If an entry point is not a registry, or two have the same owner.
    """
    found = {one.owner: one for one in OWN}
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        loaded = _loaded(point)
        if loaded.owner in found:
            raise ProductError(
                f"two registries have the owner {loaded.owner}",
                where=f"the entry point {point.name} = {point.value}",
                fix="give the registry an owner's name of its own",
            )
        found[loaded.owner] = loaded
    return found


def _loaded(point: metadata.EntryPoint) -> Registry:
    try:
        loaded: Any = point.load()
    except OverlayError as error:
        raise ProductError(
            error.what,
            where=", ".join(filter(None, (error.where, f"the entry point {point.name} = {point.value}"))),
            fix=error.fix or "correct the project that installs it, or uninstall it",
        ) from error
    except Exception as error:
        raise ProductError(
            f"a registry cannot be loaded: {error!r}",
            where=f"the entry point {point.name} = {point.value}",
            fix="correct the project that installs it, or uninstall it",
        ) from error
    if not isinstance(loaded, Registry):
        raise ProductError(
            f"an entry point names a {type(loaded).__name__}, not a Registry",
            where=f"{GROUP}: {point.name} = {point.value}",
            fix="name the object that `transforms.engine.registry.Registry(...)` makes",
        )
    return loaded


def parse(named: str) -> tuple[Product, str]:
    """Return the product and the release that a command line names; ``all`` counts as a release.

    Raises:
        ProductError: If an owner has no registry.
    """
    owners, hyphen, release = named.partition("-")
    words = owners.split(JOIN)
    if not hyphen or not all(word.isidentifier() for word in words):
        return UCM, named
    known = registries()
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ProductError(
            f"there is no registry of {', '.join(unknown)}",
            where=f"known: {', '.join(known)}",
            fix=f"install the project that has it, with an entry point `{GROUP}`, in the environment of this command",
        )
    return compose(*(known[word] for word in words)), release


def unpublished(product: Product) -> list[str]:
    """Return the directories and archives from which the projects of a product's seams were installed.

    An overlay's wheel requires these projects, and no package index has them.
    """
    names = [Requirement(one).name for registry in product.registries for one in registry.requires]
    return list(dict.fromkeys(place for name in names if (place := _installed_from(name))))


def _installed_from(name: str) -> str:
    """Return the local path from which a project was installed; empty if there is none."""
    try:
        told = metadata.distribution(name).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return ""
    url = urlsplit(json.loads(told)["url"]) if told else None
    return url2pathname(url.path) if url and url.scheme == "file" else ""


def products() -> list[Product]:
    """Return this repository's own products."""
    return [compose(one) for one in OWN]


def _is_version(name: str) -> bool:
    try:
        return bool(Version(name))
    except InvalidVersion:
        return False
