"""Read releases that the operator has on disk: a directory, the installed package, or an sdist."""

from __future__ import annotations

import email.parser
import importlib.util
import os
import tarfile
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

from packaging.version import InvalidVersion, Version

from transforms.pipeline.sources.tree import Artefact, SourceError, parse_release, sha256
from transforms.registry import VLLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transforms.engine.registry import Package
    from transforms.pipeline.sources.cache import Cache


class DirectoryTree:
    """A directory that holds the package (a checkout, an unpacked archive, ``site-packages``)."""

    def __init__(self, release: str, root: Path, artefact: Artefact, package: Package = VLLM) -> None:
        self._package = package
        self.release = str(parse_release(release))
        self.artefact = artefact
        self._root = root

    def exists(self, path: str) -> bool:
        return (self._root / path).is_file()

    def read(self, path: str) -> bytes:
        try:
            return (self._root / path).read_bytes()
        except OSError as error:
            raise SourceError(
                f"{self._package.title} {self.release} has no readable {path}", where=f"{self._root}: {error}"
            ) from error

    def read_many(self, paths: list[str]) -> dict[str, bytes]:
        return {path: self.read(path) for path in paths}

    def python_files(self) -> dict[str, str]:
        return {path: sha256(data) for path, data in self.read_package()}

    def read_package(self) -> Iterator[tuple[str, bytes]]:
        for file in sorted((self._root / self._package.name).rglob("*.py")):
            path = file.relative_to(self._root).as_posix()
            yield path, self.read(path)


def open_directory(path: Path, release: str | None, package: Package = VLLM) -> DirectoryTree:
    """Open a source tree in a directory: the package, its parent, or an environment where it is installed.

    Raises:
        SourceError: The package is not there, or its release is neither given nor stated there.
    """
    places = [path, *([path.parent] if path.name == package.name else []), *path.glob("lib/python3*/site-packages")]
    root = next((place for place in places if (place / package.name / "__init__.py").is_file()), None)
    if root is None:
        raise SourceError(
            f"this directory does not hold {package.title}",
            where=f"{path} (looked for {package.name}/__init__.py)",
            fix=f"name the directory that contains the package `{package.name}`, the package itself, or the virtual "
            "environment that it is installed in",
        )
    kind = "installed" if root.name == "site-packages" else "directory"
    return DirectoryTree(_release(release, root, package), root, Artefact(kind, root.name, ""), package)


def open_installed(release: str | None, package: Package = VLLM) -> DirectoryTree:
    """Open the package that this interpreter would import, without importing it.

    Raises:
        SourceError: The package is not installed.
    """
    spec = importlib.util.find_spec(package.name)
    if spec is None or spec.origin is None:
        raise SourceError(
            f"no {package.title} is installed in the environment that runs this command",
            where="--from installed",
            fix="name the environment that has it: --from /path/to/its/venv",
        )
    root = Path(spec.origin).parent.parent
    return DirectoryTree(_release(release, root, package), root, Artefact("installed", root.name, ""), package)


def open_sdist(path: Path, release: str | None, cache: Cache, package: Package = VLLM) -> DirectoryTree:
    """Open a source distribution, unpacked once per content beside the cache.

    Raises:
        SourceError: The sdist cannot be read.
    """
    digest = sha256(path.read_bytes())
    target = cache.root / "sdists" / digest
    try:
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=target.parent, suffix=".part") as partial, tarfile.open(path) as archive:
                _unpack(archive, Path(partial, "all"))
                try:
                    Path(partial, "all").rename(target)
                except OSError:
                    if not target.is_dir():  # else another process was first
                        raise
        top = next(entry for entry in target.iterdir() if (entry / package.name).is_dir())
    except (OSError, EOFError, zlib.error, tarfile.TarError, StopIteration) as error:
        raise SourceError(f"this is not a readable {package.title} sdist: {error}", where=str(path)) from error
    return DirectoryTree(_release(release, top, package), top, Artefact("sdist", path.name, digest), package)


def _unpack(archive: tarfile.TarFile, target: Path) -> None:
    """Write the regular files of an archive; others are not read. Python's own filters are not in all releases of 3.11.

    Raises:
        tarfile.TarError: A file would be outside the target.
    """
    root = target.resolve()
    for member in archive:
        if not (member.isfile() and (content := archive.extractfile(member))):
            continue
        path = (root / member.name).resolve()
        if not path.is_relative_to(root):
            raise tarfile.TarError(f"{member.name} leads out of it")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.read())


def _release(given: str | None, root: Path, package: Package) -> str:
    """Return the release of a directory: the given one, unless the directory states another."""
    stated = _stated_release(root, package)
    if given is None:
        return stated or _unknown_release(root)
    return agreed_release(given, stated, root, package)


def agreed_release(given: str, stated: str, place: Path, package: Package = VLLM) -> str:
    """Return the given release, which may add a local part (``0.32.0+mine``) to the stated one.

    Raises:
        SourceError: They are different releases.
    """
    try:
        same = not stated or Version(given).public == Version(stated).public
    except InvalidVersion:  # a custom build may state anything
        return given
    if not same:
        raise SourceError(
            f"these are the sources of {package.title} {stated}, not {given}",
            where=str(place),
            fix=f"name {stated}, or a variant of it that is your own: {Version(stated).public}+mine; "
            "set VLLM_VERSION if what they state is wrong",
        )
    return given


def _stated_release(root: Path, package: Package) -> str:
    """Return ``VLLM_VERSION``, or the version in the metadata beside the package; empty if there is neither."""
    if package == VLLM and os.environ.get("VLLM_VERSION"):
        return os.environ["VLLM_VERSION"]
    builds = (package.name, f"{package.name}_cpu")
    stated = [root / "PKG-INFO", *(path for build in builds for path in root.glob(f"{build}-*.dist-info/METADATA"))]
    for path in stated:
        if path.is_file():
            version = email.parser.HeaderParser().parsestr(path.read_text(encoding="utf-8"))["Version"]
            if version:
                return str(version)
    return ""


def _unknown_release(root: Path) -> NoReturn:
    raise SourceError(
        "the sources in this directory do not state their release",
        where=str(root),
        fix="say which release it is: --release X.Y.Z --from PATH",
    )
