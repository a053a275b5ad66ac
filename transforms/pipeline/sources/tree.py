"""The one view that the pipeline has of a source tree, wherever it comes from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from transforms.engine.errors import OverlayError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transforms.engine.registry import Package


class SourceError(OverlayError):
    """The sources of a release could not be found, read or trusted."""


@dataclass(frozen=True)
class Artefact:
    """What a source tree was read from.

    Attributes:
        kind: ``wheel``, ``sdist``, ``directory`` or ``installed``.
        name: The archive's file name, or the name of the directory.
        sha256: The archive's hash as the index gives it; empty for a directory.
    """

    kind: str
    name: str
    sha256: str


class SourceTree(Protocol):
    """The files of one release of a package, by path (``vllm/v1/request.py``)."""

    @property
    def release(self) -> str:
        """The release's version, as published."""

    @property
    def artefact(self) -> Artefact:
        """What the files are read from."""

    def exists(self, path: str) -> bool:
        """Whether the release holds this file."""

    def read(self, path: str) -> bytes:
        """The file's bytes, checked against the artefact's own record where it has one.

        Raises:
            SourceError: If the file is absent or fails its check.
        """

    def read_many(self, paths: list[str]) -> dict[str, bytes]:
        """The bytes of several files at once; a remote tree fetches them over one connection."""

    def python_files(self) -> dict[str, str]:
        """The hexadecimal SHA-256 of every Python file of the package, by path; a wheel's record tells it unread."""

    def read_package(self) -> Iterator[tuple[str, bytes]]:
        """Every Python file of the package, path and bytes, checked as `read` does, in no order.

        What has to be fetched is not kept: a package has some 3,000 files, of which an overlay changes a dozen.
        """


class Opener(Protocol):
    """What opens the sources of a release."""

    def __call__(self, release: str, *, package: Package) -> SourceTree:
        """The source tree of a release of a package."""


def is_python_of(package: str, path: str) -> bool:
    """Whether a path is that of a Python file of a package, rather than of its compiled parts or its metadata."""
    return path.startswith(f"{package}/") and path.endswith(".py")


def sha256(data: bytes) -> str:
    """The hexadecimal SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()
