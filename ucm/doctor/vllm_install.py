"""Find the vLLM of this environment, and identify its release by its files, without importing it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from ucm.doctor.findings import Finding, Status
from ucm.overlay.finder import sha256_of

FINGERPRINTS = Path(__file__).parents[1] / "overlay" / "fingerprints.json"
CHECK = "vLLM"


@dataclass(frozen=True)
class Vllm:
    """An installed vLLM.

    Attributes:
        directory: The package's directory.
        distribution: The distribution that provides it; empty if there is no metadata.
        version: The version in the metadata; empty if there is none.
        stated: The value of ``VLLM_VERSION``; empty if unset.
        nearest: The known release whose files match best; empty if none matches.
        files: How many files were compared.
        differing: The paths that differ from the nearest release.
    """

    directory: Path
    distribution: str
    version: str
    stated: str
    nearest: str
    files: int
    differing: tuple[str, ...]

    @property
    def release(self) -> str | None:
        """The release that its content identifies; None if it is no known one."""
        return self.nearest if self.nearest and not self.differing else None

    @property
    def agree(self) -> bool | None:
        """Whether metadata (or ``VLLM_VERSION``) and content give the same release; None if either gives none."""
        said = self.stated or self.version
        if not said or self.release is None:
            return None
        return said.removeprefix("v").partition("+")[0] == self.release


def find_vllm() -> Vllm | None:
    """Return the vLLM that this interpreter would import, or None."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.origin:
        return None
    directory = Path(spec.origin).resolve().parent
    own = [p for p in providers("vllm") if p.name == "vllm" or p.site / "vllm" == directory]
    name, version = (own[0].name, own[0].version) if own else ("", "")
    nearest, files, differing = identify(directory)
    return Vllm(directory, name, version, os.environ.get("VLLM_VERSION", ""), nearest, files, differing)


def identify(directory: Path) -> tuple[str, int, tuple[str, ...]]:
    """Return the known release whose files match best, how many were compared, and which differ."""
    known: dict[str, dict[str, str]] = json.loads(FINGERPRINTS.read_text(encoding="utf-8"))
    hash_of = cache(lambda path: sha256_of(directory.parent / path))
    differing = {
        release: tuple(path for path, wanted in files.items() if hash_of(path) != wanted)
        for release, files in known.items()
    }
    nearest = min(known, key=lambda release: len(differing[release]) / len(known[release]))
    if len(differing[nearest]) == len(known[nearest]):
        return "", len(known[nearest]), ()
    return nearest, len(known[nearest]), differing[nearest]


def check_vllm(vllm: Vllm | None, wanted: str | None) -> Finding:
    """Report whether vLLM is installed, and which release.

    Args:
        vllm: The installed vLLM, if any.
        wanted: The release of the installed overlay, if there is one.
    """
    if vllm is None:
        return _not_installed(wanted)
    place = str(vllm.directory)
    said = f"VLLM_VERSION says {vllm.stated}" if vllm.stated else f"{vllm.distribution} says {vllm.version}"
    if vllm.release is None:
        fits = vllm.files - len(vllm.differing)
        what = "its files are of no known release"
        if vllm.nearest:
            what = f"its files are of no known release; {vllm.nearest} is nearest ({fits} of {vllm.files} files)"
        details = (place, *([said] if vllm.stated or vllm.version else []), *(f"differs: {d}" for d in vllm.differing))
        return Finding(CHECK, Status.WARNING, what, details)
    what = f"{vllm.release} by content ({vllm.files} of {vllm.files} files)"
    if vllm.agree is False:
        todo = ("unset VLLM_VERSION, or set it to the release of the files",) if vllm.stated else ()
        return Finding(CHECK, Status.WARNING, f"{what}, but {said}: the overlay decides by content", (place,), todo)
    return Finding(CHECK, Status.OK, what, (place,))


def _not_installed(wanted: str | None) -> Finding:
    package = f"vllm=={wanted}" if wanted else "vllm"
    spec = importlib.util.find_spec("vllm")
    stray = list(spec.submodule_search_locations or []) if spec else []
    if stray:
        return Finding(
            CHECK,
            Status.ERROR,
            "not installed: Python finds only a directory named vllm without an __init__.py",
            tuple(stray),
            ("start in another directory, or remove it from PYTHONPATH", f"{sys.executable} -m pip install {package}"),
        )
    return Finding(
        CHECK,
        Status.ERROR,
        "not installed for this Python",
        (f"searched {len(sys.path)} entries of sys.path of {sys.executable}",),
        (
            f"install it: {sys.executable} -m pip install {package}",
            "or run the doctor with the Python that runs vLLM: /path/to/that/python -m ucm.cli doctor",
        ),
    )


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
