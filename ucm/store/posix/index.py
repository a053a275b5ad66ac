"""Track the contents of a root: the index of block names, the log of removals that keeps it current, and scans.

Testing one directory entry takes microseconds, several in a store of a million blocks. So once enough keys have been
tested one by one, a thread lists the names, and from then on only keys missing from that list are tested. A key whose
file was deleted by hand is found missing when it is loaded, or when the names are listed again.

A namespace's log of removals, ``REMOVED``, holds a random mark of 8 bytes and then, for every evicted or quarantined
block, the first 8 bytes of its key. Writers only append to it, each record by a single call; a log that has grown long
is replaced by a new one with another mark, and readers start again. The log is advisory: a block whose removal was not
logged fails to load, like a block that is removed between a lookup and the load.

Keys are digests, so the blocks of one bucket are a fair sample of their namespace. A scan visits a namespace bucket by
bucket in random order until it has seen enough blocks, and extrapolates to the rest. Small stores are visited
completely, and their figures are exact.
"""

from __future__ import annotations

import os
import random
import stat
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ucm.background import enter_background
from ucm.clock import SYSTEM
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

    from ucm.clock import Clock, Thread
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
    """How far a reader has read the log: its inode, mark and length; the defaults mean that there is no log."""

    inode: int = 0
    mark: bytes = b""
    nbytes: int = 0


def removals_path(layout: Layout) -> str:
    """Return the path of a namespace's log."""
    return f"{layout.base}/{REMOVALS}"


def log_removals(layout: Layout, keys: Iterable[BlockKey]) -> None:
    """Log removed blocks. Never raises: an unlogged removal is found out when the block is loaded."""
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
    """Return what was removed since a position.

    Args:
        layout: The namespace.
        since: Where the last call ended; None to start at the end of the log.

    Returns:
        The new position, and the first 8 bytes of each removed key as uint64; None instead of the keys if earlier
        knowledge of the namespace is no longer valid.

    Raises:
        OSError: The namespace cannot be reached or does not exist.
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
#: The number of directory entries tested after which listing the names pays off.
WORTH = 2_000
#: The most keys kept outside the sorted array before they are merged into it.
_APART = 65_536
#: Seconds after which the names are listed again, in case files were deleted by hand.
_LISTED_SECONDS = 600.0
#: How many seconds ``close_indices`` waits for listings in progress.
CLOSE_SECONDS = 5.0


class NameIndex:
    """An index of the block names of one namespace in one directory.

    Args:
        layout: The namespace.
        clock: The store's clock.
    """

    def __init__(self, layout: Layout, *, clock: Clock = SYSTEM) -> None:
        self._layout = layout
        self._clock = clock
        self._lock = clock.lock()
        self._names: Prefixes | None = None  # sorted; the first 8 bytes of each key
        self._position = Position()
        self._added: set[bytes] = set()
        self._dropped: set[bytes] = set()
        self._tests = 0
        self._listed = 0.0
        self._thread: Thread | None = None
        self._closed = False

    def known(self, keys: Sequence[BlockKey]) -> list[bool] | None:
        """Return whether each block is known to exist; None if there is no index yet."""
        if self._names is None or (names := self._catch_up()) is None:
            return None
        if self._clock.monotonic() - self._listed > _LISTED_SECONDS:
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
        """Add existing blocks to the index."""
        if self._names is None:
            return
        with self._lock:
            prefixes = [key[:PREFIX_BYTES] for key in keys]
            self._added.update(prefixes)
            self._dropped.difference_update(prefixes)
            if len(self._added) > _APART:
                self._merge()

    def drop(self, key: BlockKey) -> None:
        """Remove a missing or damaged block from the index."""
        if self._names is None:
            return
        with self._lock:
            self._added.discard(key[:PREFIX_BYTES])
            self._dropped.add(key[:PREFIX_BYTES])
            if len(self._dropped) > _APART:
                self._merge()

    def tested(self, keys: int) -> None:
        """Count keys tested on the file system; list the names once there were many."""
        if self._names is None:
            self._tests += keys
            if self._tests >= WORTH:
                self._start()

    def forget(self) -> None:
        """Discard the index; it is rebuilt after many more tests."""
        with self._lock:
            self._names = None
            self._added, self._dropped = set(), set()
            self._tests = 0

    def stop(self) -> None:
        """Let a listing in progress end, and begin no other."""
        with self._lock:
            self._closed = True

    def join(self, until: float) -> None:
        """Wait for a listing in progress to end, until a ``monotonic()`` of the clock."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, until - self._clock.monotonic()))

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = self._clock.thread(self._list, INDEX_THREAD)
                self._thread.start()

    def _catch_up(self) -> Prefixes | None:
        """Apply new removals from the log; return the names, or None if the index was discarded."""
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
        """List all names in a background thread, which sleeps half of the time."""
        enter_background()
        try:
            position = read_removals(self._layout, None)[0]
            parts: list[Prefixes] = []
            names: Prefixes | None
            for bucket in buckets(self._layout):
                if self._closed:
                    return  # leave the thread to be joined
                began = self._clock.monotonic()
                parts.append(_names_in(bucket))
                self._clock.sleep(self._clock.monotonic() - began)
            names = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)
            names.sort()
        except OSError:
            names = None  # try again after many more tests
        with self._lock:
            self._thread = None
            self._tests = 0
            if names is not None:
                self._listed = self._clock.monotonic()
                self._added = set()
                self._position = position
                self._names = names


def close_indices(indices: Sequence[NameIndex], *, clock: Clock = SYSTEM) -> None:
    """End the listings in progress; abandon those that are stuck in a directory."""
    for index in indices:
        index.stop()
    until = clock.monotonic() + CLOSE_SECONDS
    for index in indices:
        index.join(until)


def _names_in(bucket: str) -> Prefixes:
    names = names_in(bucket)
    start, rest = bucket[-2:], 2 * PREFIX_BYTES - 2
    try:
        joined = bytes.fromhex("".join([start + name[:rest] for name in names]))
    except ValueError:
        joined = b""
    if len(joined) != PREFIX_BYTES * len(names):  # the directory also contains other files
        keys = [key for key in (key_of(bucket, name) for name in names) if key is not None]
        joined = b"".join([key[:PREFIX_BYTES] for key in keys])
    return np.frombuffer(joined, dtype=np.uint64)


def _array(prefixes: set[bytes]) -> Prefixes:
    return np.frombuffer(b"".join(prefixes), dtype=np.uint64)


def _among(names: Prefixes, wanted: Prefixes) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which of ``wanted`` are in ``names``, which is sorted."""
    if not names.size:
        return np.zeros(wanted.size, dtype=np.bool_)
    places = np.minimum(names.searchsorted(wanted), names.size - 1)
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = names[places] == wanted
    return found


#: A sample of n blocks estimates their number with a relative error of 1/sqrt(n).
SAMPLE_BLOCKS = 20_000
_LEAST_SAMPLE = 1_000
_LOGGED_AT_ONCE = 64


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
    with _Removed(root) as removed:
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
                removed.add(file.path)
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


class _Removed:
    """Collects deleted blocks for the logs of their namespaces.

    Args:
        root: The root of the blocks.
    """

    def __init__(self, root: str) -> None:
        self._layouts = {layout.base: layout for layout in namespaces(root)}
        self._keys: dict[str, list[BlockKey]] = {}

    def __enter__(self) -> Self:
        return self

    def add(self, path: str) -> None:
        """Add a deleted file; files are logged in batches."""
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
