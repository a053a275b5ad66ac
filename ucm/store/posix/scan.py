"""Scan a root: estimate what it holds, evict the least recently used blocks, and delete what dead processes left.

Keys are digests, so the blocks of one bucket are a fair sample of their namespace. A scan visits a namespace bucket by
bucket in random order until it has seen enough blocks, and extrapolates to the rest. Small stores are visited
completely, and their figures are exact.
"""

from __future__ import annotations

import random
import stat
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ucm.clock import SYSTEM
from ucm.store.posix.layout import buckets, is_quarantined, is_stale, key_of, namespaces
from ucm.store.posix.paths import list_directory, unlink, unlink_unused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucm.clock import Clock

#: A sample of n blocks estimates their number with a relative error of 1/sqrt(n).
SAMPLE_BLOCKS = 20_000
_LEAST_SAMPLE = 1_000


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The file of a block or of a quarantined block."""

    path: str
    nbytes: int
    used_ns: int  #: its time of last use
    weight: float = 1.0  #: how many files it stands for


@dataclass(slots=True)
class Scan:
    """The result of scanning a root."""

    nbytes: float = 0.0
    blocks: float = 0.0
    exact: bool = True
    files: list[StoredFile] = field(default_factory=list)  #: all files, or a sample


def scan(root: str, sample_blocks: int = SAMPLE_BLOCKS, *, clock: Clock = SYSTEM) -> Scan:
    """Scan a root.

    Args:
        root: A configured directory.
        sample_blocks: How many blocks are a sufficient sample.
        clock: The clock by which a long scan sleeps half of the time.

    Raises:
        OSError: The root cannot be listed.
    """
    found = Scan()
    layouts = list(namespaces(root))
    enough = max(_LEAST_SAMPLE, sample_blocks // max(1, len(layouts)))
    for layout in layouts:
        for file in _files(layout.temporary):
            found.nbytes += file.nbytes
        for file in _files(layout.quarantine):
            found.nbytes += file.nbytes
            if is_quarantined(file.path.rpartition("/")[2]):
                found.files.append(file)
        paths = buckets(layout)
        random.shuffle(paths)
        seen: list[StoredFile] = []
        visited = 0
        for path in paths:
            if len(seen) >= enough:
                break
            began = clock.monotonic()
            seen += _blocks(path)
            visited += 1
            if len(seen) > _LEAST_SAMPLE:
                clock.sleep(clock.monotonic() - began)  # spend half of the time asleep
        weight = len(paths) / visited if visited else 1.0
        found.nbytes += weight * sum(file.nbytes for file in seen)
        found.blocks += weight * len(seen)
        found.exact = found.exact and visited == len(paths)
        if not layout.is_private:
            found.files += seen if visited == len(paths) else [replace(file, weight=weight) for file in seen]
    return found


def evict(
    root: str, found: Scan, nbytes: float, deleted: Callable[[str], None], *, clock: Clock = SYSTEM
) -> tuple[int, int]:
    """Delete the least recently used files, unless they were used after the scan.

    An exact scan may be reused until none of its files is left, because files written after it were used later.

    Several evictors may work in one directory, often with the same list. Files that another evictor deleted since the
    scan count towards the bytes as well, so that together they delete about as much as one would alone.

    Args:
        root: The directory.
        found: A scan of the directory; processed files are removed from it.
        nbytes: How many bytes to free.
        deleted: Called with the path of each file deleted by this call.
        clock: The clock by which a long walk sleeps half of the time.

    Returns:
        The number of files deleted by this call, and the bytes freed by this call and by other evictors.

    Raises:
        OSError: The directory can no longer be listed.
    """
    count = freed = 0
    for file in _oldest(root, found, nbytes, clock):
        try:
            if not unlink_unused(file.path, file.used_ns):
                continue
        except FileNotFoundError:
            freed += file.nbytes  # the file was in the scan, so another evictor deleted it
        except OSError:
            continue
        else:
            count += 1
            freed += file.nbytes
            deleted(file.path)
        if freed >= nbytes:
            break
    return count, freed


def _oldest(root: str, found: Scan, nbytes: float, clock: Clock) -> Iterator[StoredFile]:
    """Yield files that may be deleted to free ``nbytes``; an exact scan yields the least recently used first."""
    found.files.sort(key=lambda file: -file.used_ns)
    if found.exact:
        while found.files:
            yield found.files.pop()
        return
    reached = 0.0
    threshold = 0
    for file in reversed(found.files):
        reached += file.weight * file.nbytes
        threshold = file.used_ns
        if reached >= nbytes:
            break
    yield from _older(root, threshold, clock)


def clean_up(root: str, stale_seconds: float, *, clock: Clock = SYSTEM) -> int:
    """Delete unfinished files of dead owners in every namespace.

    Args:
        root: A configured directory.
        stale_seconds: See ``StoreConfig``.
        clock: The clock of the files' ages.

    Returns:
        The number of files deleted.

    Raises:
        OSError: The root cannot be listed.
    """
    count = 0
    now = clock.time()
    for layout in namespaces(root):
        for file in (*_files(layout.temporary), *_files(layout.quarantine)):
            if is_stale(file.path.rpartition("/")[2], now - file.used_ns / 1e9, stale_seconds):
                with suppress(OSError):
                    unlink(file.path)
                    count += 1
    return count


def _older(root: str, threshold: int, clock: Clock) -> Iterator[StoredFile]:
    """Yield all files last used at ``threshold`` or before; sleep half of the time, because the root is big."""
    paths = [path for layout in namespaces(root) if not layout.is_private for path in buckets(layout)]
    random.shuffle(paths)
    for path in paths:
        began = clock.monotonic()
        yield from (file for file in _blocks(path) if file.used_ns <= threshold)
        clock.sleep(clock.monotonic() - began)


def _blocks(bucket: str) -> list[StoredFile]:
    """Return a bucket's blocks, but not, for instance, a network file system's remains of deleted files."""
    return [file for file in _files(bucket) if key_of(bucket, file.path.rpartition("/")[2]) is not None]


def _files(directory: str) -> list[StoredFile]:
    """Return the regular files of a directory; none if it is missing or cannot be listed."""
    with suppress(OSError):
        return [
            StoredFile(f"{directory}/{name}", status.st_size, status.st_mtime_ns)
            for name, status in list_directory(directory)
            if stat.S_ISREG(status.st_mode)
        ]
    return []
