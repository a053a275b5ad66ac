"""All packages that the build, the runtime and the tests install have permissive licences.

The Mozilla Public License is among them: it binds changes to the licensed files themselves, and we change none.
"""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]

PERMISSIVE = re.compile(
    r"MIT|BSD|Apache|ISC|PSF|Python Software Foundation|Mozilla|MPL-2\.0|Zlib|CC0|Unlicense", re.IGNORECASE
)
COPYLEFT = re.compile(r"\b[AL]?GPL|General Public Licen[cs]e|SSPL|EUPL|\bBUSL", re.IGNORECASE)


def needed() -> dict[str, Distribution]:
    """Return the installed distributions that our dependency groups need, directly or indirectly, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    waiting = [entry for group in project["dependency-groups"].values() for entry in group if isinstance(entry, str)]
    found: dict[str, Distribution] = {}
    while waiting:
        name = canonicalize_name(Requirement(waiting.pop()).name)
        if name not in found:
            try:
                found[name] = distribution(name)
            except PackageNotFoundError:  # it is in another group, or for another system
                continue
            waiting += found[name].requires or ()
    return found


def said(found: Distribution) -> str:
    """Return a distribution's licence: its expression, else its classifiers, else the first line of the text."""
    metadata = found.metadata
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classifiers = [name for name in metadata.get_all("Classifier", []) if name.startswith("License :: ")]
    if classifiers or "License" not in metadata:
        return "; ".join(classifiers)
    return metadata["License"].strip().partition("\n")[0]


def problem(licence: str) -> str | None:
    """Return the problem with a licence, or None."""
    if COPYLEFT.search(licence):
        return f"{licence} is not permissive"
    return None if PERMISSIVE.search(licence) else f"the licence is not known: {licence!r}"


def test_every_installed_package_is_permissive() -> None:
    found = needed()
    assert {"numpy", "packaging", "pytest"} <= found.keys()
    problems = {name: problem(said(one)) for name, one in found.items()}
    assert {name: told for name, told in problems.items() if told} == {}


@pytest.mark.parametrize("licence", ["GPL-2.0-or-later", "License :: OSI Approved :: GNU General Public License", ""])
def test_others_are_refused(licence: str) -> None:
    assert problem(licence)
