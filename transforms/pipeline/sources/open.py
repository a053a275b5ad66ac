"""Open the sources of a release, given by name, by path or as the installed package."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from transforms.pipeline.sources.cache import Cache
from transforms.pipeline.sources.local import agreed_release, open_directory, open_installed, open_sdist
from transforms.pipeline.sources.tree import Archive, Artefact, SourceError, SourceTree, parse_release, sha256
from transforms.pipeline.sources.wheel import Place, WheelTree, read_record
from transforms.registry import VLLM

if TYPE_CHECKING:
    from transforms.engine.registry import Package
    from transforms.pipeline.sources.pip_config import PipConfig


def open_sources(
    release: str | None, origin: str | None = None, cache: Cache | None = None, *, package: Package = VLLM
) -> SourceTree:
    """Open the source tree of a release.

    Args:
        release: The release; may be None if ``origin`` states it.
        origin: None for the package index, ``installed``, or a path to a directory, a wheel or an sdist.
        cache: The cache of fetched files; the user's cache directory by default.
        package: The package of the release.

    Raises:
        SourceError: The sources cannot be found or read.
    """
    cache = cache or Cache()
    release = str(parse_release(release)) if release else None
    if origin == "installed":
        return open_installed(release, package)
    if origin is not None:
        return _open_path(Path(origin), release, cache, package)
    if release is None:
        raise SourceError("no release was named", fix="name one, for instance 0.32.0")
    return _open_cached(release, cache, package) or _open_published(release, cache, package)


def _open_cached(release: str, cache: Cache, package: Package) -> SourceTree | None:
    """Open a published release from the cache, without asking the index; return None if it is not cached."""
    known = cache.release(release, package) or {}
    filename, digest, record = (str(known.get(key, "")) for key in ("filename", "sha256", "record"))
    if not filename.endswith(".whl"):
        path = cache.archive(filename, digest) if filename else None
        return open_sdist(path, release, cache, package) if path else None
    data = cache.blob(record) if record else None
    if data is None:
        return None
    place = functools.partial(_published_place, release, filename, package)
    return WheelTree(release, Artefact("wheel", filename, digest), cache, data, place, package)


def _open_published(release: str, cache: Cache, package: Package) -> SourceTree:
    from transforms.pipeline.sources.index import Index  # noqa: PLC0415 - its import takes longer than a cached release

    index = Index(package=package)
    archive = index.archives(release)[0]
    known = {"filename": archive.filename, "sha256": archive.sha256}
    if not archive.is_wheel:
        path = download(archive, cache, index.config)
        cache.add_release(release, known, package)
        return open_sdist(path, release, cache, package)
    record = read_record(archive, index.config)
    cache.add_release(release, {**known, "record": cache.add_blob(record)}, package)
    return _wheel_tree(release, archive, cache, record, package, index.config)


def _wheel_tree(
    release: str, archive: Archive, cache: Cache, record: bytes, package: Package, config: PipConfig | None = None
) -> WheelTree:
    artefact = Artefact("wheel", archive.filename, archive.sha256)
    return WheelTree(release, artefact, cache, record, lambda: (archive, config), package)


def _published_place(release: str, filename: str, package: Package) -> Place:
    """Find a partly cached wheel on the index."""
    from transforms.pipeline.sources.index import Index  # noqa: PLC0415 - as above

    index = Index(package=package)
    for archive in index.archives(release):
        if archive.filename == filename:
            return archive, index.config
    raise SourceError(
        f"the package index no longer has {filename}, and the cache has only a part of it",
        fix="name another index for pip, or build from a copy that you have with --from PATH",
    )


def _open_path(path: Path, release: str | None, cache: Cache, package: Package) -> SourceTree:
    if path.is_dir():
        return open_directory(path, release, package)
    if not path.is_file():
        raise SourceError("there is no such file or directory", where=str(path), fix="name one that exists with --from")
    if path.name.endswith(".tar.gz"):
        return open_sdist(path, release, cache, package)
    try:
        version = str(parse_wheel_filename(path.name)[1])
    except InvalidWheelFilename:
        raise SourceError(
            "this file is neither a wheel nor an sdist",
            where=str(path),
            fix="name a .whl, a .tar.gz or a directory",
        ) from None
    archive = Archive(path.name, path.resolve().as_uri(), sha256(path.read_bytes()), is_wheel=True)
    named = agreed_release(release, version, path, package) if release else version
    return _wheel_tree(named, archive, cache, read_record(archive, None), package)


def download(archive: Archive, cache: Cache, config: PipConfig) -> Path:
    """Fetch a whole archive into the cache and check its hash.

    Raises:
        SourceError: The archive cannot be fetched, or its hash differs from the one on the index.
    """
    from transforms.pipeline.sources.session import open_session  # noqa: PLC0415 - as above

    try:
        with open_session(config, archive.url) as session:
            answer = session.get(archive.url, timeout=config.timeout)
            answer.raise_for_status()
    except OSError as error:  # what requests raises is one
        raise SourceError(f"{archive.filename} could not be fetched: {error}", fix="run it again") from error
    if archive.sha256 and sha256(answer.content) != archive.sha256:
        raise SourceError(f"{archive.filename} is not the file that the index promises: its hash differs")
    return cache.add_archive(archive.filename, answer.content)
