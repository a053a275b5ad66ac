"""Cache upstream files by content.

``blobs/<sha256>`` holds bytes under their own hash. ``releases/<version>.json``, for packages other than vLLM with the
project's name before the version, says which artefact a release was read from and which blob is its record of files. A
file is written under a temporary name and renamed, so an interrupted run leaves nothing half-written under a hash.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import platformdirs

from transforms.pipeline.sources.tree import SourceError, sha256
from transforms.registry import VLLM

if TYPE_CHECKING:
    from transforms.engine.registry import Package

CACHE_VARIABLE = "UCM_OVERLAY_CACHE"


class Cache:
    """A directory of upstream files, safe for several processes at once."""

    def __init__(self, root: Path | None = None) -> None:
        chosen = root or os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_path("ucm-overlay")
        self.root = Path(chosen)

    def blob(self, digest: str) -> bytes | None:
        """Return the bytes with this hash, or None; drop bytes that no longer match their hash."""
        path = self.root / "blobs" / digest
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if sha256(data) != digest:
            path.unlink(missing_ok=True)
            return None
        return data

    def add_blob(self, data: bytes) -> str:
        """Store bytes and return their hash."""
        digest = sha256(data)
        self.write(self.root / "blobs" / digest, data)
        return digest

    def release(self, version: str, package: Package = VLLM) -> dict[str, Any] | None:
        """Return the known facts of a release, or None."""
        try:
            text = (self.root / "releases" / _name(version, package)).read_text(encoding="utf-8")
            return cast("dict[str, Any]", json.loads(text))
        except (OSError, ValueError):
            return None

    def add_release(self, version: str, known: dict[str, Any], package: Package = VLLM) -> None:
        """Store the known facts of a release."""
        text = json.dumps(known, indent=1, sort_keys=True)
        self.write(self.root / "releases" / _name(version, package), text.encode())

    def archive(self, filename: str, digest: str) -> Path | None:
        """Return the path of a whole archive with this hash, or None."""
        path = self.root / "archives" / filename
        return path if path.is_file() and sha256(path.read_bytes()) == digest else None

    def add_archive(self, filename: str, data: bytes) -> Path:
        """Store a whole archive and return its path."""
        path = self.root / "archives" / filename
        self.write(path, data)
        return path

    def write(self, path: Path, data: bytes) -> None:
        """Write a file below the root; other processes see all of it or nothing.

        Raises:
            SourceError: If it cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".part-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                Path(name).replace(path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise SourceError(
                "the cache of upstream files cannot be written",
                where=f"{self.root}: {error}",
                fix=f"name another directory in {CACHE_VARIABLE}",
            ) from error


def _name(version: str, package: Package) -> str:
    return f"{version}.json" if package == VLLM else f"{package.project}-{version}.json"
