"""Read single files out of a published wheel, by HTTP range or from disk, each checked against the wheel's RECORD."""

from __future__ import annotations

import base64
import csv
import io
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from transforms.pipeline.sources.tree import Artefact, SourceError, is_python_of, sha256
from transforms.registry import VLLM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transforms.engine.registry import Package
    from transforms.pipeline.sources.cache import Cache
    from transforms.pipeline.sources.pip_config import PipConfig
    from transforms.pipeline.sources.tree import Archive


#: The most bytes between two wanted members that are cheaper to read than to skip with another request.
NEAR = 256 * 1024
DAMAGED = "the archive or the mirror that serves it is damaged: use another index, or --from PATH"
#: An archive, and the settings to reach it.
Place = tuple["Archive", "PipConfig | None"]


class WheelTree:
    """A release read from a wheel: the cache first, then the archive.

    Args:
        release: The release.
        artefact: The wheel.
        cache: The cache of its files.
        record: The content of its RECORD.
        place: Returns the wheel's location and pip's settings; called only for files that are not cached.
        package: The package of the release.
    """

    def __init__(
        self,
        release: str,
        artefact: Artefact,
        cache: Cache,
        record: bytes,
        place: Callable[[], Place],
        package: Package = VLLM,
    ) -> None:
        self.release = release
        self._package = package
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
                raise SourceError(f"{self._package.title} {self.release} has no {path}", where=self.artefact.name)
            data = self._cache.blob(self._hashes[path])
            if data is not None:
                found[path] = data
        for path, data in self._fetch([path for path in paths if path not in found]):
            self._cache.add_blob(data)
            found[path] = data
        return found

    def python_files(self) -> dict[str, str]:
        return {path: digest for path, digest in self._hashes.items() if is_python_of(self._package.name, path)}

    def read_package(self) -> Iterator[tuple[str, bytes]]:
        missing = []
        for path, digest in self.python_files().items():
            data = self._cache.blob(digest)
            if data is None:
                missing.append(path)
            else:
                yield path, data
        yield from self._fetch(missing)

    def _fetch(self, paths: list[str]) -> Iterator[tuple[str, bytes]]:
        """Yield files from the archive, each checked against the record, in the archive's order."""
        if not paths:
            return
        with open_wheel(*self._place()) as wheel:
            for path, data in _read_in_runs(wheel, paths):
                if sha256(data) != self._hashes[path]:
                    raise SourceError(
                        f"{path} does not match the hash in the wheel's own RECORD",
                        where=self.artefact.name,
                        fix=DAMAGED,
                    )
                yield path, data


def _read_in_runs(wheel: zipfile.ZipFile, paths: list[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the contents of members; nearby members of a remote archive are read in one request."""
    wanted = sorted((wheel.getinfo(path) for path in paths), key=lambda member: member.header_offset)
    if type(wheel) is not zipfile.ZipFile:
        remote: Any = wheel.fp
        remote.set_position_to_size(_runs(wheel, wanted))
    for member in wanted:
        yield member.filename, wheel.read(member)


def _runs(wheel: zipfile.ZipFile, wanted: list[zipfile.ZipInfo]) -> dict[int, int]:
    """Return the ranges to request, first byte to length, for members in the archive's order."""
    starts = sorted(member.header_offset for member in wheel.infolist())
    ends = dict(zip(starts, [*starts[1:], wheel.start_dir], strict=True))
    runs: dict[int, int] = {}
    first = last = -NEAR - 1
    for member in wanted:
        if member.header_offset - last > NEAR:
            first = member.header_offset
        last = ends[member.header_offset]
        runs[first] = last - first
    return runs


def read_record(archive: Archive, config: PipConfig | None) -> bytes:
    """Return the content of a wheel's RECORD.

    Raises:
        SourceError: The RECORD cannot be read or does not exist.
    """
    with open_wheel(archive, config) as wheel:
        name = next((n for n in wheel.namelist() if n.endswith(".dist-info/RECORD")), None)
        if name is None:
            raise SourceError("the wheel has no RECORD, so its files cannot be checked", where=archive.filename)
        return wheel.read(name)


def parse_record(record: bytes, wheel: str) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of every file that a wheel's RECORD lists.

    Raises:
        SourceError: The content is not a valid RECORD.
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
    """Open an archive as a zip file; a remote one is read in ranges.

    Raises:
        SourceError: The archive cannot be opened, or its server does not serve ranges.
    """
    parts = urlsplit(archive.url)
    try:
        if parts.scheme in {"", "file"}:
            with zipfile.ZipFile(Path(url2pathname(parts.path))) as wheel:
                yield wheel
        else:
            from transforms.pipeline.sources.session import remote_wheel  # noqa: PLC0415 - as in `open_sources`

            with remote_wheel(archive.url, config) as wheel:
                yield wheel
    except (zipfile.BadZipFile, zlib.error, KeyError, OSError) as error:
        raise SourceError(
            f"{archive.filename} could not be read: {error}",
            fix="run it again; if the index does not serve byte ranges, download the archive and use --from PATH",
        ) from error
