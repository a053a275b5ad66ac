"""A registry: the transforms of one owner for one package.

A project with its own transforms defines a registry and names it as an entry point ``ucm.transforms``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transforms.engine.errors import RuleDefinitionError

if TYPE_CHECKING:
    from pathlib import Path

    from transforms.engine.census import Census
    from transforms.engine.transform import Seam, Transform


@dataclass(frozen=True)
class Package:
    """A Python package whose modules are rewritten.

    Attributes:
        name: The name under which it is imported; its paths start with it.
        project: Its name on a package index.
        title: Its name in prose.
        authors: The copyright holders, for the NOTICE of a wheel.
        rebinds: The directory of the modules that replace functions of vLLM at import; empty if there is none.
        sdist_first: Whether to prefer the source distribution if a release also has a wheel.
    """

    name: str
    project: str
    title: str
    authors: str
    rebinds: str = ""
    sdist_first: bool = False


@dataclass(frozen=True)
class Registry:
    """The transforms of one owner for one package.

    Attributes:
        owner: The maintainer of the rules: one lower-case word; the transforms' ids start with it.
        title: The owner's name in prose.
        package: The package to rewrite.
        transforms: In the order in which the lock and the review list them.
        hooks: The source file of the seam; every inserted call is checked against it.
        overlays: The directory of the locks.
        distribution: The name of the wheels.
        requires: The wheel's requirement that installs the seam.
        has_bare_ids: Whether the transforms' ids omit the owner's name.
        url: Where the users of its wheels find help; their errors name it. Empty if there is no such page.
        census: Searches for places that no rule hooks and that the runtime must know; a transform has its own.
    """

    owner: str
    title: str
    package: Package
    transforms: tuple[Transform, ...]
    hooks: Path
    overlays: Path
    distribution: str
    requires: tuple[str, ...] = ()
    has_bare_ids: bool = False
    url: str = ""
    census: tuple[Census, ...] = ()

    def __post_init__(self) -> None:
        ids, seams = [t.id for t in self.transforms], {t.seam for t in self.transforms}
        paths = Counter(p.path for t in self.transforms for p in t.module.paths)
        counted = Counter(c.id for c in (*(c for t in self.transforms for c in t.census), *self.census))
        problems = {
            "an owner's name is not one lower-case word": [] if self.owner.isidentifier() else [self.owner],
            "a registry has no transforms": [] if ids else [self.owner],
            "a transform's id is used twice": [i for i, n in Counter(ids).items() if n > 1],
            "a transform's id does not start with its owner's name": []
            if self.has_bare_ids
            else [i for i in ids if not i.startswith(f"{self.owner}.")],
            "a census' id is used twice": [i for i, n in counted.items() if n > 1],
            "two transforms are for one module": [path for path, n in paths.items() if n > 1],
            "a module is not one of the package's": [p for p in paths if not p.startswith(f"{self.package.name}/")],
            "the address for help is not an https address": [self.url]
            if self.url and not self.url.startswith("https://")
            else [],
            "the transforms call more than one seam": sorted(s.module for s in seams) if len(seams) > 1 else [],
        }
        for problem, found in problems.items():
            if found:
                raise RuleDefinitionError(problem, where=f"registry {self.owner}: {', '.join(found)}")

    @property
    def seam(self) -> Seam:
        """The module whose functions all inserted calls call."""
        return self.transforms[0].seam
