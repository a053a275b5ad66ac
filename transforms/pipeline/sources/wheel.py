"""Read single files out of a published wheel, by HTTP range or from disk, each checked against the wheel's RECORD."""

from __future__ import annotations

import base64
import csv
import io
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

import requests
from remotezip import RemoteIOError, RemoteZip

from transforms.pipeline.sources.tree import Artefact, SourceError, sha256

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transforms.pipeline.sources.cache import Cache
    from transforms.pipeline.sources.index import Archive
    from transforms.pipeline.sources.pip_config import PipConfig


class WheelTree:
    """A release read from a wheel: the cache first, then the archive."""

    def __init__(self, release: str, archive: Archive, cache: Cache, config: PipConfig | None, record: str) -> None:
        self.release = release
        self.artefact = Artefact("wheel", archive.filename, archive.sha256)
        self._archive = archive
        self._cache = cache
        self._config = config
        self._hashes = parse_record(record)

    @classmethod
    def fetch(cls, release: str, archive: Archive, cache: Cache, config: PipConfig | None) -> WheelTree:
        """Read the wheel's record of files and remember it."""
        with open_wheel(archive, config) as wheel:
            name = next((n for n in wheel.namelist() if n.endswith(".dist-info/RECORD")), None)
            if name is None:
                raise SourceError("the wheel has no RECORD, so its files cannot be checked", where=archive.filename)
            record = wheel.read(name)
        cache.add_release(
            release,
            {
                "filename": archive.filename,
                "url": _without_credentials(archive.url),
                "sha256": archive.sha256,
                "record": cache.add_blob(record),
            },
        )
        return cls(release, archive, cache, config, record.decode())

    def exists(self, path: str) -> bool:
        return path in self._hashes

    def read(self, path: str) -> bytes:
        return self.read_many([path])[path]

    def read_many(self, paths: list[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for path in paths:
            if path not in self._hashes:
                raise SourceError(f"vLLM {self.release} has no {path}", where=self._archive.filename)
            data = self._cache.blob(self._hashes[path])
            if data is not None:
                found[path] = data
        missing = [path for path in paths if path not in found]
        if missing:
            with open_wheel(self._archive, self._config) as wheel:
                for path in missing:
                    found[path] = self._checked(path, wheel.read(path))
        return found

    def _checked(self, path: str, data: bytes) -> bytes:
        if sha256(data) != self._hashes[path]:
            raise SourceError(
                f"{path} does not match the hash in the wheel's own RECORD",
                where=self._archive.filename,
                fix="the archive or the mirror that serves it is damaged: use another index, or --from PATH",
            )
        self._cache.add_blob(data)
        return data


def parse_record(record: str) -> dict[str, str]:
    """The hexadecimal SHA-256 of every file that a wheel's RECORD lists."""
    hashes = {}
    for path, digest, _size in csv.reader(io.StringIO(record)):
        algorithm, _, value = digest.partition("=")
        if algorithm == "sha256":
            hashes[path] = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    return hashes


@contextmanager
def open_wheel(archive: Archive, config: PipConfig | None) -> Iterator[zipfile.ZipFile]:
    """The archive as a zip file; a remote one is read in ranges.

    Raises:
        SourceError: If it cannot be opened, or its server does not serve ranges.
    """
    parts = urlsplit(archive.url)
    try:
        if parts.scheme in {"", "file"}:
            with zipfile.ZipFile(Path(url2pathname(parts.path))) as wheel:
                yield wheel
        else:
            with (
                _session(config) as session,
                RemoteZip(archive.url, session=session, timeout=_timeout(config)) as wheel,
            ):
                yield wheel
    except (RemoteIOError, requests.RequestException, zipfile.BadZipFile, OSError) as error:
        raise SourceError(
            f"{archive.filename} could not be read: {error}",
            fix="run it again; if the index does not serve byte ranges, download the archive and use --from PATH",
        ) from error


def _session(config: PipConfig | None) -> requests.Session:
    session = requests.Session()
    if config is None:
        return session
    if config.cert:
        session.verify = config.cert
    if config.client_cert:
        session.cert = config.client_cert
    if config.proxy:
        session.proxies = {"http": config.proxy, "https": config.proxy}
    return session


def _timeout(config: PipConfig | None) -> float:
    return config.timeout if config else 30.0


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
