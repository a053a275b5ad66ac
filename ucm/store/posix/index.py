"""What a root holds: the index of block names, the log of removals that keeps it current, scans.

A test of a directory entry takes microseconds, and in a store of a million blocks several. So once enough keys have
been tested one by one, a thread lists the names, and from then on only keys that are not among them are tested. A key
whose file was deleted by hand is found missing when it is loaded, or when the names are listed again.

A namespace's log of removals, ``REMOVED``, holds a random mark of 8 bytes and then, for every block that was evicted or
quarantined, the first 8 bytes of its key. It is only ever appended to, by single calls; when it has grown long, a new
one with another mark takes its place, and readers begin anew. The log is advisory: a block whose removal was not logged
fails to load, as one that is removed between a lookup and the load does.

Keys are digests, so the blocks of one bucket are a fair sample of its namespace's. A scan visits a namespace bucket by
bucket in random order until it has seen enough blocks, and takes the rest to be like them. Small stores are visited
whole, and their figures are exact.
"""

from __future__ import annotations

import os
import random
import stat
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ucm.background import enter_background
from ucm.store.posix.layout import buckets, is_quarantined, is_stale, key_of, namespaces, owner_name, unlink_private
from ucm.store.posix.paths import (
    NotAFileError,
    list_directory,
    names_in,
    open_directory,
    open_file,
    rename,
    status_of,
    unlink,
    unlink_unused,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Self

    from ucm.store.base import BlockKey
    from ucm.store.posix.layout import Layout

    Prefixes = np.ndarray[tuple[int], np.dtype[np.uint64]]

REMOVALS = "REMOVED"
PREFIX_BYTES = 8
#: About a million removals.
_LONGEST = 8 << 20
_APPEND = os.O_WRONLY | os.O_APPEND


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reader has read: up to a length of the log with an inode and a mark; as below if there is none."""

    inode: int = 0
    mark: bytes = b""
    nbytes: int = 0


def removals_path(layout: Layout) -> str:
    """Where a namespace's log is."""
    return f"{layout.base}/{REMOVALS}"


def log_removals(layout: Layout, keys: Iterable[BlockKey]) -> None:
    """Tell of blocks that are gone. Never raises: what cannot be logged is found out by loading."""
    record = b"".join([key[:PREFIX_BYTES] for key in keys])
    path = removals_path(layout)
    with suppress(OSError):
        try:
            descriptor, _ = open_file(path, _APPEND)
        except (FileNotFoundError, NotAFileError):
            _begin(layout)
            descriptor, _ = open_file(path, _APPEND)
        try:
            os.write(descriptor, record)
            long = os.fstat(descriptor).st_size > _LONGEST
        finally:
            os.close(descriptor)
        if long:
            _begin(layout)


def _begin(layout: Layout) -> None:
    private = f"{layout.temporary}/{owner_name()}"
    descriptor = layout.new_file(private)
    try:
        try:
            os.write(descriptor, os.urandom(PREFIX_BYTES))
        finally:
            os.close(descriptor)
        rename(private, removals_path(layout))
    except OSError:
        unlink_private(private)
        raise


def read_removals(layout: Layout, since: Position | None) -> tuple[Position, Prefixes | None]:
    """What was removed since a position.

    Args:
        layout: The namespace.
        since: Where the last reading ended; None to begin at the end.

    Returns:
        Where this reading ended, and the first 8 bytes of each key; None in their place if nothing that was known
        before is to be relied on.

    Raises:
        OSError: The namespace cannot be reached, or is not there.
    """
    path = removals_path(layout)
    try:
        status = status_of(path)
        if since is not None and (since.inode, since.nbytes) == (status.st_ino, status.st_size):
            return since, _NONE
        descriptor, status = open_file(path, os.O_RDONLY)
    except (FileNotFoundError, NotAFileError):
        os.close(open_directory(layout.base))
        now = Position()
        return now, _NONE if since in (None, now) else None
    try:
        mark = os.pread(descriptor, PREFIX_BYTES, 0)
        now = Position(status.st_ino, mark, status.st_size - status.st_size % PREFIX_BYTES)
        if since is None:
            return now, _NONE
        if (since.inode, since.mark) != (now.inode, mark) or now.nbytes - since.nbytes > 2 * _LONGEST:
            return now, None
        content = os.pread(descriptor, max(0, now.nbytes - since.nbytes), since.nbytes)
    finally:
        os.close(descriptor)
    return now, np.frombuffer(content[: len(content) - len(content) % PREFIX_BYTES], dtype=np.uint64)


_NONE: Prefixes = np.empty(0, dtype=np.uint64)


INDEX_THREAD = "ucm-index"
#: After so many tests of directory entries, listing the names is worth it.
WORTH = 2_000
#: How many keys are kept apart before they are merged into the sorted names.
_APART = 65_536
#: After so many seconds the names are listed again: somebody may have deleted files by hand.
_LISTED_SECONDS = 600.0
#: How long the end waits for a listing that is under way.
CLOSE_SECONDS = 5.0


class NameIndex:
    """The names of the blocks of one namespace in one directory.

    Args:
        layout: Where they are.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._names: Prefixes | None = None  # sorted; the first 8 bytes of each key
        self._position = Position()
        self._added: set[bytes] = set()
        self._dropped: set[bytes] = set()
        self._tests = 0
        self._listed = 0.0
        self._thread: threading.Thread | None = None
        self._closed = False

    def known(self, keys: Sequence[BlockKey]) -> list[bool] | None:
        """Whether each block is known to be there; None as long as nothing is known."""
        if self._names is None or (names := self._catch_up()) is None:
            return None
        if time.monotonic() - self._listed > _LISTED_SECONDS:
            self._start()
        wanted = np.frombuffer(b"".join([key[:PREFIX_BYTES] for key in keys]), dtype=np.uint64)
        found = _among(names, wanted)
        if self._added:
            for index in np.flatnonzero(~found).tolist():
                found[index] = keys[index][:PREFIX_BYTES] in self._added
        if self._dropped:
            for index in np.flatnonzero(found).tolist():
                found[index] = keys[index][:PREFIX_BYTES] not in self._dropped
        result: list[bool] = found.tolist()
        return result

    def add(self, keys: Sequence[BlockKey]) -> None:
        """Note blocks that are there."""
        if self._names is None:
            return
        with self._lock:
            prefixes = [key[:PREFIX_BYTES] for key in keys]
            self._added.update(prefixes)
            self._dropped.difference_update(prefixes)
            if len(self._added) > _APART:
                self._merge()

    def drop(self, key: BlockKey) -> None:
        """Note a block that is gone, or damaged."""
        if self._names is None:
            return
        with self._lock:
            self._added.discard(key[:PREFIX_BYTES])
            self._dropped.add(key[:PREFIX_BYTES])
            if len(self._dropped) > _APART:
                self._merge()

    def tested(self, keys: int) -> None:
        """Count keys that had to be asked for; the names are listed once there were many."""
        if self._names is None:
            self._tests += keys
            if self._tests >= WORTH:
                self._start()

    def forget(self) -> None:
        """Know nothing any more, until many keys have been asked for again."""
        with self._lock:
            self._names = None
            self._added, self._dropped = set(), set()
            self._tests = 0

    def close(self) -> None:
        """End the listing, should it be under way; one that the directory keeps is left to it."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join(CLOSE_SECONDS)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._list, name=INDEX_THREAD, daemon=True)
                self._thread.start()

    def _catch_up(self) -> Prefixes | None:
        """Read the log: the names that are left, None if all is to be forgotten."""
        try:
            position, removed = read_removals(self._layout, self._position)
        except OSError:
            removed = None
        if removed is None:
            self.forget()
            return None
        with self._lock:
            self._position = position
            if removed.size:
                prefixes = [prefix.tobytes() for prefix in removed]
                self._added.difference_update(prefixes)
                self._dropped.update(prefixes)
            if len(self._dropped) > _APART:
                self._merge()
            return self._names

    def _merge(self) -> None:
        if self._names is None:
            return
        names = np.concatenate([self._names, _array(self._added)])
        names.sort()
        if self._dropped:
            names = names[~_among(np.sort(_array(self._dropped)), names)]
        self._names = names
        self._added, self._dropped = set(), set()

    def _list(self) -> None:
        """List all names, in a thread of its own; half of the time is left to others."""
        enter_background()
        try:
            position = read_removals(self._layout, None)[0]
            parts: list[Prefixes] = []
            names: Prefixes | None
            for bucket in buckets(self._layout):
                if self._closed:
                    return  # and leave the thread to be joined
                began = time.monotonic()
                parts.append(_names_in(bucket))
                time.sleep(time.monotonic() - began)
            names = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)
            names.sort()
        except OSError:
            names = None  # a directory that cannot be listed now may be when many keys have been asked for again
        with self._lock:
            self._thread = None
            self._tests = 0
            if names is not None:
                self._listed = time.monotonic()
                self._added = set()
                self._position = position
                self._names = names


def _names_in(bucket: str) -> Prefixes:
    names = names_in(bucket)
    start, rest = bucket[-2:], 2 * PREFIX_BYTES - 2
    try:
        joined = bytes.fromhex("".join([start + name[:rest] for name in names]))
    except ValueError:
        joined = b""
    if len(joined) != PREFIX_BYTES * len(names):  # there is something else among the blocks
        keys = [key for key in (key_of(bucket, name) for name in names) if key is not None]
        joined = b"".join([key[:PREFIX_BYTES] for key in keys])
    return np.frombuffer(joined, dtype=np.uint64)


def _array(prefixes: set[bytes]) -> Prefixes:
    return np.frombuffer(b"".join(prefixes), dtype=np.uint64)


def _among(names: Prefixes, wanted: Prefixes) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which of the wanted are among the names, which are sorted."""
    if not names.size:
        return np.zeros(wanted.size, dtype=np.bool_)
    places = np.minimum(names.searchsorted(wanted), names.size - 1)
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = names[places] == wanted
    return found


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
    weight: float = 1.0  #: how many files it stands for


@dataclass(slots=True)
class Scan:
    """What a root holds."""

    nbytes: float = 0.0
    blocks: float = 0.0
    exact: bool = True
    files: list[StoredFile] = field(default_factory=list)  #: all, or a sample of them


def scan(root: str, sample_blocks: int = SAMPLE_BLOCKS) -> Scan:
    """Look at a root.

    Args:
        root: A configured directory.
        sample_blocks: How many blocks are enough.

    Raises:
        OSError: It cannot be listed.
    """
    found = Scan()
    layouts = list(namespaces(root))
    enough = max(_LEAST_SAMPLE, sample_blocks // max(1, len(layouts)))
    for layout in layouts:
        for file in _files(layout.temporary):
            found.nbytes += file.nbytes
        for file in _files(layout.aside):
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
            began = time.monotonic()
            seen += _blocks(path)
            visited += 1
            if len(seen) > _LEAST_SAMPLE:
                time.sleep(time.monotonic() - began)  # half of the time belongs to others
        weight = len(paths) / visited if visited else 1.0
        found.nbytes += weight * sum(file.nbytes for file in seen)
        found.blocks += weight * len(seen)
        found.exact = found.exact and visited == len(paths)
        if not layout.is_private:
            found.files += seen if visited == len(paths) else [replace(file, weight=weight) for file in seen]
    return found


def evict(root: str, found: Scan, nbytes: float, deleted: Callable[[str], None]) -> tuple[int, int]:
    """Delete what was used longest ago, unless it has been used since the scan.

    An exact scan may be used again until none of its files is left: what was written since then was used later.

    Several evictors may be at work in one directory, often with the same list before them. What another one has deleted
    since the scan counts towards the bytes as well, so that together they delete about as much as one would alone.

    Args:
        root: The directory.
        found: A scan of it, which loses the files that are dealt with.
        nbytes: How much is to go.
        deleted: Called with the path of each file that was deleted here.

    Returns:
        The number of files deleted here, and the bytes that went, here or by others.

    Raises:
        OSError: The directory cannot be listed any more.
    """
    count = freed = 0
    with _Removed(root) as removed:
        for file in _oldest(root, found, nbytes):
            try:
                if not unlink_unused(file.path, file.used_ns):
                    continue
            except FileNotFoundError:
                freed += file.nbytes  # it was in the scan: another evictor was faster
            except OSError:
                continue
            else:
                count += 1
                freed += file.nbytes
                removed.add(file.path)
                deleted(file.path)
            if freed >= nbytes:
                break
    return count, freed


def _oldest(root: str, found: Scan, nbytes: float) -> Iterator[StoredFile]:
    """What may be deleted to gain so many bytes, from the oldest on."""
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
    yield from _older(root, threshold)


def clean_up(root: str, stale_seconds: float) -> int:
    """Delete the unfinished files of owners that are gone, in every namespace.

    Args:
        root: A configured directory.
        stale_seconds: See ``StoreConfig``.

    Returns:
        How many were deleted.

    Raises:
        OSError: The root cannot be listed.
    """
    count = 0
    now = time.time()
    for layout in namespaces(root):
        for file in (*_files(layout.temporary), *_files(layout.aside)):
            if is_stale(file.path.rpartition("/")[2], now - file.used_ns / 1e9, stale_seconds):
                with suppress(OSError):
                    unlink(file.path)
                    count += 1
    return count


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
    paths = [path for layout in namespaces(root) if not layout.is_private for path in buckets(layout)]
    random.shuffle(paths)
    for path in paths:
        began = time.monotonic()
        yield from (file for file in _blocks(path) if file.used_ns <= threshold)
        time.sleep(time.monotonic() - began)


def _blocks(bucket: str) -> list[StoredFile]:
    """The blocks of a directory: not, for instance, what a network file system keeps of deleted ones."""
    return [file for file in _files(bucket) if key_of(bucket, file.path.rpartition("/")[2]) is not None]


def _files(directory: str) -> list[StoredFile]:
    """The files of a directory, if it is there and can be listed."""
    with suppress(OSError):
        return [
            StoredFile(f"{directory}/{name}", status.st_size, status.st_mtime_ns)
            for name, status in list_directory(directory)
            if stat.S_ISREG(status.st_mode)
        ]
    return []
