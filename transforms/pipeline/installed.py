"""Find out what another interpreter has installed, and which reviewed releases these files are.

The interpreter only looks up where the packages are and what their metadata says; it imports neither. The content of
the files then decides, as it does when the overlay is imported: an editable checkout or a local build may state any
version.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from transforms.engine.errors import OverlayError
from transforms.pipeline.lock import read_lock
from transforms.pipeline.product import OWN, UCM, compose
from transforms.pipeline.sources.local import DirectoryTree
from transforms.pipeline.sources.tree import Artefact, sha256

if TYPE_CHECKING:
    from transforms.pipeline.product import Product

#: Seconds until an interpreter has answered; a slow network file system may hold it.
PATIENCE = 120
#: The program that the interpreter runs. Its last line of output is the answer; start-up files may print others.
PROBE = r"""
import importlib.metadata as metadata, importlib.util as util, json, os, re, sys
sys.path = [entry for entry in sys.path if entry]  # not the directory in which the build was started
found = {}
for package in sys.argv[1:]:
    spec = util.find_spec(package)
    if spec is None or not spec.origin:
        continue
    root = os.path.dirname(os.path.dirname(os.path.realpath(spec.origin)))
    stated = []
    for one in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
        record = "\n" + (one.read_text("RECORD") or "")
        if name == package.replace("_", "-") or "\n" + package + "/__init__.py," in record:
            here = os.path.realpath(str(one.locate_file(""))) == root
            stated.append((not here, "\n" + package + "/__init__.py," not in record, name, one.version))
    found[package] = [root, *(min(stated)[2:] if stated else ("", ""))]
print()
print(json.dumps({"packages": found, "pip": util.find_spec("pip") is not None}))
"""


class InstalledError(OverlayError):
    """No overlay can be built for what an interpreter has installed."""


@dataclass(frozen=True)
class Place:
    """A package in an environment.

    Attributes:
        root: The directory that contains the package.
        distribution: The distribution that provides it; empty if there is no metadata.
        version: The version in its metadata; empty if there is none.
    """

    root: Path
    distribution: str
    version: str


@dataclass(frozen=True)
class Python:
    """What an interpreter has installed.

    Attributes:
        executable: The interpreter, as it was named.
        places: The packages that it has, by import name.
        has_pip: Whether it can run pip; environments that uv made cannot.
    """

    executable: Path
    places: dict[str, Place]
    has_pip: bool

    @property
    def install(self) -> str:
        """The command that installs into its environment."""
        return f"{self.executable} -m pip install" if self.has_pip else f"uv pip install --python {self.executable}"


def look(executable: Path) -> Python:
    """Ask an interpreter which of the packages it has that this repository's products change.

    Raises:
        InstalledError: If it cannot be asked.
    """
    fix = "name the interpreter that runs vLLM, for instance --python /path/to/its/venv/bin/python"
    if not executable.is_file():
        what = "a directory is not an interpreter" if executable.is_dir() else "there is no such interpreter"
        raise InstalledError(what, where=f"--python {executable}", fix=fix)
    command = [str(executable.absolute()), "-c", PROBE, *(registry.package.name for registry in OWN)]
    try:
        done = subprocess.run(  # noqa: S603 - the operator names the interpreter
            command, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL, check=False
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        places = {name: Place(Path(root), *stated) for name, (root, *stated) in answer["packages"].items()}
        return Python(executable.absolute(), places, answer["pip"])
    except (OSError, subprocess.SubprocessError) as error:
        raise InstalledError(f"it cannot be run: {error}", where=f"--python {executable}", fix=fix) from error
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise InstalledError(
            f"it is no Python 3.10 or newer: it said {said}", where=str(executable), fix=fix
        ) from error


def installed(python: Python) -> list[tuple[Product, DirectoryTree, str]]:
    """Return the products whose packages an interpreter has, each with its files and a sentence on their release.

    Raises:
        InstalledError: If it has no vLLM, or files of no reviewed release.
    """
    if UCM.package.name not in python.places:
        raise InstalledError(
            f"{UCM.package.title} is not installed there",
            where=str(python.executable),
            fix=f"name the interpreter that runs {UCM.package.title}, or a release: `nox -s build-overlay -- 0.32.0`",
        )
    products = [compose(registry) for registry in OWN if registry.package.name in python.places]
    return [(product, *_reviewed(product, python.places[product.package.name])) for product in products]


def _reviewed(product: Product, place: Place) -> tuple[DirectoryTree, str]:
    title, named = product.package.title, [place.version, _public(place.version)]
    try:
        fitting = [release for release in product.reviewed() if not _differing(release, product, place.root)]
    except OSError as error:
        raise InstalledError(
            f"a file of {title} cannot be read: {error.strerror}",
            where=str(error.filename),
            fix="run this as a user who can read it",
        ) from error
    if not fitting:
        raise _refusal(product, place)
    release = next((name for name in named if name in fitting), fitting[-1])
    stated = f"{place.distribution} {place.version}" if place.version else "no version"
    why = f"{title} {release}, by the content of {place.root / product.package.name} (its metadata: {stated})"
    return DirectoryTree(release, place.root, Artefact("installed", place.root.name, ""), product.package), why


def _differing(release: str, product: Product, root: Path) -> list[str]:
    """Return the files that are not those from which the overlay of a release was made."""
    lock = read_lock(release, product)
    modules = lock["modules"] if lock else []
    files = {module["path"]: root / module["path"] for module in modules}
    return [
        module["path"]
        for module in modules
        if not files[module["path"]].is_file()
        or sha256(files[module["path"]].read_bytes()) != module["upstream_sha256"]
    ]


def _refusal(product: Product, place: Place) -> InstalledError:
    """Return the error for files of no reviewed release."""
    title, where, public = product.package.title, str(place.root / product.package.name), _public(place.version)
    given = f"--from {place.root} --release"
    if public in product.reviewed():
        differing = "".join(f"\n    {path}" for path in _differing(public, product, place.root))
        own = f"nox -s review -- {given} {product.named(public)}+mine"
        return InstalledError(
            f"these files of {title} {place.version} are not those of {title} {public}:{differing}",
            where=where,
            fix="reinstall it if nobody meant to change them; otherwise read the overlay of your own files with "
            f"`{own}`, accept it with `{own} --accept`, and run this again",
        )
    newest = f"the newest reviewed release is {product.reviewed()[-1]}" if product.reviewed() else "none is reviewed"
    stated = f"{title} {place.version} has not been reviewed" if public else f"this {title} states no release"
    name = product.named(public or "X.Y.Z")
    return InstalledError(
        f"{stated}, and its files are those of no reviewed release; {newest}",
        where=where,
        fix=f"try every rule on it with `nox -s drift -- {given} {name}`, read the result with "
        f"`nox -s review -- {given} {name}`, and accept it with --accept (CONTRIBUTING.md, 'Try a new vLLM release')",
    )


def _public(version: str) -> str:
    """Return a version without its local part; empty if it is none."""
    try:
        return Version(version).public
    except InvalidVersion:
        return ""
