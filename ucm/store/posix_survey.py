"""How much a directory holds, and what was used longest ago.

Keys are digests, so that the blocks of one bucket are a fair sample of its namespace's. A namespace is visited bucket
by bucket in random order until enough blocks were seen; what was not visited is taken to be like what was. Small
stores are visited whole, and their figures are exact.
"""

from __future__ import annotations

import os
import random
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ucm.store.posix_layout import buckets, key_of, namespaces
from ucm.store.posix_removals import log_removals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from ucm.store.base import BlockKey

#: A sample of n blocks tells their number to one part in sqrt(n).
SAMPLE_BLOCKS = 20_000
_LEAST_SAMPLE = 1_000
_LOGGED_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A block, or a damaged one."""

    path: str
    nbytes: int
    used_ns: int  #: its time of last use
    leased: bool  #: whether it was promised to a reader, and must stay
    weight: float = 1.0  #: how many files it stands for


@dataclass(slots=True)
class Survey:
    """What a root holds."""

    nbytes: float = 0.0
    blocks: float = 0.0
    exact: bool = True
    files: list[StoredFile] = field(default_factory=list)  #: all, or a sample of them


def survey(root: str, sample_blocks: int = SAMPLE_BLOCKS) -> Survey:
    """Look at a root.

    Args:
        root: A configured directory.
        sample_blocks: How many blocks are enough.

    Raises:
        OSError: It cannot be listed.
    """
    found = Survey()
    layouts = list(namespaces(root))
    enough = max(_LEAST_SAMPLE, sample_blocks // max(1, len(layouts)))
    for layout in layouts:
        for file in _files(layout.temporary):
            found.nbytes += file.nbytes
        for file in _files(layout.aside):
            found.nbytes += file.nbytes
            found.files.append(file)
        paths = buckets(layout)
        random.shuffle(paths)
        seen: list[StoredFile] = []
        visited = 0
        for path in paths:
            if len(seen) >= enough:
                break
            began = time.monotonic()
            seen += _blocks(path)
            visited += 1
            if len(seen) > _LEAST_SAMPLE:
                time.sleep(time.monotonic() - began)  # half of the time belongs to others
        weight = len(paths) / visited if visited else 1.0
        found.nbytes += weight * sum(file.nbytes for file in seen)
        found.blocks += weight * len(seen)
        found.exact = found.exact and visited == len(paths)
        found.files += seen if visited == len(paths) else [replace(file, weight=weight) for file in seen]
    return found


def evict(root: str, found: Survey, nbytes: float, deleted: Callable[[str], None]) -> tuple[int, int]:
    """Delete what was used longest ago.

    Several evictors may be at work in one directory, often with the same list before them. What another one has deleted
    since the survey counts towards the bytes as well, so that together they delete about as much as one would alone.

    Args:
        root: The directory.
        found: A survey of it.
        nbytes: How much is to go.
        deleted: Called with the path of each file that was deleted here.

    Returns:
        The number of files deleted here, and the bytes that went, here or by others.

    Raises:
        OSError: The directory cannot be listed any more.
    """
    oldest = sorted(found.files, key=lambda file: file.used_ns)
    victims: Iterator[StoredFile] = iter(oldest)
    if not found.exact:
        reached = 0.0
        threshold = 0
        for file in oldest:
            reached += file.weight * file.nbytes
            threshold = file.used_ns
            if reached >= nbytes:
                break
        victims = _older(root, threshold)
    count = freed = 0
    with _Removed(root) as removed:
        for file in victims:
            if freed >= nbytes:
                break
            if file.leased:
                continue
            try:
                os.unlink(file.path)  # noqa: PTH108 - a Path costs as much as the call
            except FileNotFoundError:
                freed += file.nbytes  # it was in the survey: another evictor was faster
            except OSError:
                continue
            else:
                count += 1
                freed += file.nbytes
                removed.add(file.path)
                deleted(file.path)
    return count, freed


class _Removed:
    """Blocks that were deleted, on their way into the logs of their namespaces.

    Args:
        root: Whose blocks they are.
    """

    def __init__(self, root: str) -> None:
        self._layouts = {layout.base: layout for layout in namespaces(root)}
        self._keys: dict[str, list[BlockKey]] = {}

    def __enter__(self) -> Self:
        return self

    def add(self, path: str) -> None:
        """Note a deleted file; some at a time are logged."""
        base, bucket, name = path.rsplit("/", 2)
        key = key_of(bucket, name)
        if key is not None and base in self._layouts:
            keys = self._keys.setdefault(base, [])
            keys.append(key)
            if len(keys) >= _LOGGED_AT_ONCE:
                log_removals(self._layouts[base], keys)
                keys.clear()

    def __exit__(self, *_: object) -> None:
        for base, keys in self._keys.items():
            if keys:
                log_removals(self._layouts[base], keys)


def _older(root: str, threshold: int) -> Iterator[StoredFile]:
    """All files of a big root last used at this time or before, slowly: half of the time is spent asleep."""
    paths = [path for layout in namespaces(root) for path in buckets(layout)]
    random.shuffle(paths)
    for path in paths:
        began = time.monotonic()
        yield from (file for file in _blocks(path) if file.used_ns <= threshold)
        time.sleep(time.monotonic() - began)


def _blocks(bucket: str) -> list[StoredFile]:
    """The blocks of a directory: not, for instance, what a network file system keeps of deleted ones."""
    return [file for file in _files(bucket) if key_of(bucket, file.path.rpartition("/")[2]) is not None]


def _files(directory: str) -> list[StoredFile]:
    """The files of a directory that is there."""
    found = []
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append(StoredFile(entry.path, status.st_size, status.st_mtime_ns, leased=status.st_nlink > 1))
    return found
