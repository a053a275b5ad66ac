"""Open the sources of a release: a name, a path or the installed package in, a source tree out."""

from __future__ import annotations

from pathlib import Path

import requests
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from transforms.pipeline.sources.cache import Cache
from transforms.pipeline.sources.index import Archive, Index, parse_release
from transforms.pipeline.sources.local import open_directory, open_installed, open_sdist
from transforms.pipeline.sources.pip_config import PipConfig, read_pip_config
from transforms.pipeline.sources.tree import SourceError, SourceTree, sha256
from transforms.pipeline.sources.wheel import WheelTree


def open_sources(release: str | None, origin: str | None = None, cache: Cache | None = None) -> SourceTree:
    """The source tree of a release.

    Args:
        release: The release; may be None where ``origin`` tells it.
        origin: None for the package index, ``installed``, or a path to a directory, a wheel or an sdist.
        cache: Where fetched files are kept; the user's cache directory by default.

    Raises:
        SourceError: If the sources cannot be found or read.
    """
    cache = cache or Cache()
    if origin == "installed":
        return open_installed(release)
    if origin is not None:
        return _open_path(Path(origin), release, cache)
    if release is None:
        raise SourceError("no release was named", fix="name one, for instance 0.32.0")
    return _open_published(str(parse_release(release)), cache)


def _open_published(release: str, cache: Cache) -> SourceTree:
    known = cache.release(release)
    record = cache.blob(known["record"]) if known else None
    if known and record is not None:
        archive = Archive(known["filename"], known["url"], known["sha256"], is_wheel=True)
        return WheelTree(release, archive, cache, None, record.decode())
    index = Index()
    archives = index.archives(release)
    if archives[0].is_wheel:
        return WheelTree.fetch(release, archives[0], cache, index.config)
    return open_sdist(download(archives[0], cache, index.config), release, cache)


def _open_path(path: Path, release: str | None, cache: Cache) -> SourceTree:
    if path.is_dir():
        return open_directory(path, release)
    if not path.is_file():
        raise SourceError("there is no such file or directory", where=str(path), fix="name one that exists with --from")
    if path.name.endswith(".tar.gz"):
        return open_sdist(path, release, cache)
    try:
        version = str(parse_wheel_filename(path.name)[1])
    except InvalidWheelFilename:
        raise SourceError(
            "this file is neither a wheel nor an sdist",
            where=str(path),
            fix="name a .whl, a .tar.gz or a directory",
        ) from None
    archive = Archive(path.name, path.resolve().as_uri(), sha256(path.read_bytes()), is_wheel=True)
    return WheelTree.fetch(release or version, archive, cache, None)


def download(archive: Archive, cache: Cache, config: PipConfig | None = None) -> Path:
    """Fetch a whole archive into the cache and check its hash.

    Raises:
        SourceError: If it cannot be fetched or is not what the index promised.
    """
    target = cache.root / "archives" / archive.filename
    if target.is_file() and sha256(target.read_bytes()) == archive.sha256:
        return target
    config = config or read_pip_config()
    proxies = {"http": config.proxy, "https": config.proxy} if config.proxy else None
    try:
        answer = requests.get(
            archive.url, timeout=config.timeout, verify=config.cert or True, cert=config.client_cert, proxies=proxies
        )
        answer.raise_for_status()
    except requests.RequestException as error:
        raise SourceError(f"{archive.filename} could not be fetched: {error}", fix="run it again") from error
    if archive.sha256 and sha256(answer.content) != archive.sha256:
        raise SourceError(f"{archive.filename} is not the file that the index promises: its hash differs")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(answer.content)
    return target
