"""Find the installed distributions that provide a package, by their own records."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Provider:
    """A distribution that provides a package.

    Attributes:
        name: Its normalised name.
        version: Its version.
        site: The directory in which it is installed.
    """

    name: str
    version: str
    site: Path


def normalised(name: str) -> str:
    """Return a distribution's normalised name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def providers(package: str) -> list[Provider]:
    """Return the distributions whose records list a package, in the order of ``sys.path``, each location once.

    An editable installation records no files of the package; a distribution of the package's own name counts instead.
    """
    found = []
    for distribution in metadata.distributions():
        name = normalised(distribution.metadata["Name"] or "")
        if name == package or f"\n{package}/__init__.py," in f"\n{distribution.read_text('RECORD') or ''}":
            provider = Provider(name, distribution.version, Path(str(distribution.locate_file(""))).resolve())
            if provider not in found:
                found.append(provider)
    return found


def package_directories(package: str) -> list[Path]:
    """Return every directory of a package's name on ``sys.path``; the one that Python imports comes first."""
    entries = [Path(entry or ".").resolve() / package for entry in sys.path]
    return [entry for entry in dict.fromkeys(entries) if (entry / "__init__.py").is_file()]
