"""Define the pipeline's view of a source tree, wherever its files come from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from packaging.version import InvalidVersion, Version

from transforms.engine.errors import OverlayError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transforms.engine.registry import Package


class SourceError(OverlayError):
    """The sources of a release could not be found, read or trusted."""


def parse_release(release: str) -> Version:
    """Parse a release's version.

    Raises:
        SourceError: The text is not a version.
    """
    try:
        return Version(release)
    except InvalidVersion:
        raise SourceError(
            f"{release!r} is not a release",
            fix="name a version as the index does, for instance 0.32.0",
        ) from None


def unreadable(path: str, error: BaseException) -> SourceError:
    """Return the error for a module that Python, or LibCST, cannot parse or print."""
    if isinstance(error, RecursionError | MemoryError):
        what, fix = "an upstream module has an expression that is nested too deeply", "split it in the sources"
    else:
        what, fix = "an upstream module does not parse", "check that the sources are complete and as published"
    return SourceError(what, where=f"{path}: {error}", fix=fix)


@dataclass(frozen=True)
class Artefact:
    """The artefact that a source tree was read from.

    Attributes:
        kind: ``wheel``, ``sdist``, ``directory`` or ``installed``.
        name: The archive's file name, or the name of the directory.
        sha256: The archive's hash as the index gives it; empty for a directory.
    """

    kind: str
    name: str
    sha256: str


@dataclass(frozen=True)
class Archive:
    """One published file of a release.

    Attributes:
        filename: The name on the index.
        url: The address, including the index's credentials if the operator configured any.
        sha256: The hash given by the index; empty if it gives none.
        is_wheel: Whether the file is a wheel rather than a source distribution.
    """

    filename: str
    url: str
    sha256: str
    is_wheel: bool


class SourceTree(Protocol):
    """The files of one release of a package, by path (``vllm/v1/request.py``)."""

    @property
    def release(self) -> str:
        """The release's version, as published."""

    @property
    def artefact(self) -> Artefact:
        """The artefact that the files are read from."""

    def exists(self, path: str) -> bool:
        """Return whether the release contains this file."""

    def read(self, path: str) -> bytes:
        """Return the file's bytes, checked against the artefact's own record if it has one.

        Raises:
            SourceError: The file is missing or fails its check.
        """

    def read_many(self, paths: list[str]) -> dict[str, bytes]:
        """Return the bytes of several files; a remote tree fetches them over one connection."""

    def python_files(self) -> dict[str, str]:
        """Return the hexadecimal SHA-256 of every Python file of the package, by path; wheels record it."""

    def read_package(self) -> Iterator[tuple[str, bytes]]:
        """Yield the path and the bytes of every Python file of the package, checked as by `read`, in any order.

        Fetched files are not cached: a package has some 3,000 files, of which an overlay changes a dozen.
        """


class Opener(Protocol):
    """A function that opens the sources of a release."""

    def __call__(self, release: str, *, package: Package) -> SourceTree:
        """Open the source tree of a release of a package."""


def is_python_of(package: str, path: str) -> bool:
    """Return whether a path is that of a Python file of a package, not of its compiled parts or its metadata."""
    return path.startswith(f"{package}/") and path.endswith(".py")


def sha256(data: bytes) -> str:
    """Return the hexadecimal SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()
