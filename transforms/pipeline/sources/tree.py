"""The one view that the pipeline has of a vLLM source tree, wherever it comes from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from transforms.engine.errors import OverlayError


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
    """The files of one vLLM release, by path (``vllm/v1/request.py``)."""

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


def sha256(data: bytes) -> str:
    """The hexadecimal SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()
