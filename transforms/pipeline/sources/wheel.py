"""Read single files out of a published wheel, by HTTP range or from disk, each checked against the wheel's RECORD."""

from __future__ import annotations

import base64
import csv
import io
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

import requests
from remotezip import RemoteZip, RemoteZipError

from transforms.pipeline.sources.session import open_session
from transforms.pipeline.sources.tree import Artefact, SourceError, sha256

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transforms.pipeline.sources.cache import Cache
    from transforms.pipeline.sources.index import Archive
    from transforms.pipeline.sources.pip_config import PipConfig


DAMAGED = "the archive or the mirror that serves it is damaged: use another index, or --from PATH"
#: An archive, and the settings with which it is reached.
Place = tuple["Archive", "PipConfig | None"]


class WheelTree:
    """A release read from a wheel: the cache first, then the archive.

    Args:
        release: The release.
        artefact: The wheel.
        cache: Where its files are kept.
        record: Its record of files.
        place: Where the wheel lies and how it is reached; only asked for a file that the cache does not have.
    """

    def __init__(
        self, release: str, artefact: Artefact, cache: Cache, record: bytes, place: Callable[[], Place]
    ) -> None:
        self.release = release
        self.artefact = artefact
        self._cache = cache
        self._hashes = parse_record(record, artefact.name)
        self._place = place

    def exists(self, path: str) -> bool:
        return path in self._hashes

    def read(self, path: str) -> bytes:
        return self.read_many([path])[path]

    def read_many(self, paths: list[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for path in paths:
            if path not in self._hashes:
                raise SourceError(f"vLLM {self.release} has no {path}", where=self.artefact.name)
            data = self._cache.blob(self._hashes[path])
            if data is not None:
                found[path] = data
        missing = [path for path in paths if path not in found]
        if missing:
            with open_wheel(*self._place()) as wheel:
                for path in missing:
                    found[path] = self._checked(path, wheel.read(path))
        return found

    def _checked(self, path: str, data: bytes) -> bytes:
        if sha256(data) != self._hashes[path]:
            raise SourceError(
                f"{path} does not match the hash in the wheel's own RECORD",
                where=self.artefact.name,
                fix=DAMAGED,
            )
        self._cache.add_blob(data)
        return data


def read_record(archive: Archive, config: PipConfig | None) -> bytes:
    """A wheel's record of its files.

    Raises:
        SourceError: If it cannot be read, or there is none.
    """
    with open_wheel(archive, config) as wheel:
        name = next((n for n in wheel.namelist() if n.endswith(".dist-info/RECORD")), None)
        if name is None:
            raise SourceError("the wheel has no RECORD, so its files cannot be checked", where=archive.filename)
        return wheel.read(name)


def parse_record(record: bytes, wheel: str) -> dict[str, str]:
    """The hexadecimal SHA-256 of every file that a wheel's RECORD lists.

    Raises:
        SourceError: If it is not what a RECORD is.
    """
    hashes = {}
    try:
        for path, digest, _size in csv.reader(io.StringIO(record.decode())):
            algorithm, _, value = digest.partition("=")
            if algorithm == "sha256":
                hashes[path] = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    except ValueError as error:
        raise SourceError(f"the wheel's RECORD is damaged: {error}", where=wheel, fix=DAMAGED) from error
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
                open_session(config, archive.url) as session,
                RemoteZip(archive.url, session=session, timeout=config.timeout if config else 30.0) as wheel,
            ):
                yield wheel
    except (RemoteZipError, requests.RequestException, zipfile.BadZipFile, zlib.error, KeyError, OSError) as error:
        raise SourceError(
            f"{archive.filename} could not be read: {error}",
            fix="run it again; if the index does not serve byte ranges, download the archive and use --from PATH",
        ) from error
