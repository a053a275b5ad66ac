"""How much a root holds, who evicts from it, and what is evicted first.

One file of a root, ``USED``, is both the tally and the lock. It begins with two numbers of 8 bytes, little endian::

    offset  what
         0  bytes held when the tally was empty, signed
         8  the smallest limit that somebody has asked for since the last scan; 0 if nobody has

The rest is the tally: whoever begins to write blocks appends one byte for every 4096 that they will take. Appends are
atomic, so the length of the file says at once what all processes have written, and no writer waits for another one.
Writers keep to the limit by themselves: they wait a little for room, then drop blocks.

The process that holds a lock on the file (``flock``) is the root's evictor, for all tiers of all engines and ranks that
use it. It scans the root now and then, deletes what dead processes left and what was used longest ago, subtracts what
it deleted, and empties the tally when it has grown long. The kernel gives the lock back when its process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.background import enter_background
from ucm.logger import get_logger
from ucm.store.posix.index import Scan, clean_up, evict, scan
from ucm.store.posix.paths import FILE_MODE, SHARED_FILE_MODE, open_file, shared_group, status_of, touch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.store.posix.tier import Directory


USAGE_FILE = "USED"
UNIT = 4096
_HEAD = struct.Struct("<qq")
_LIMIT_AT = 8
#: The tally is emptied when it is longer than this: 4 GiB were written.
_LONGEST = 1 << 20
#: What a file system says that has no locks.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class State:
    """What the file says.

    Args:
        nbytes: What the root holds.
        limit: The smallest limit asked for since the last scan; None if nobody has.
        tally: How long the tally is.
        is_scanned: Whether an evictor has ever set the figure right; at first the root is taken to have been empty.
    """

    nbytes: int
    limit: int | None
    tally: int
    is_scanned: bool = False


class Usage:
    """The file of one root; every method but ``close`` may be called from any thread.

    Args:
        root: The root, without symbolic links.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._path = f"{root}/{USAGE_FILE}"
        self._lock = -1
        self._without_locks = False

    @property
    def is_exclusive(self) -> bool:
        """Whether there is no other evictor while this is one: the file system has locks."""
        return not self._without_locks

    def read(self) -> State | None:
        """What the file says; None if there is none.

        Raises:
            OSError: It cannot be read.
        """
        try:
            descriptor, status = open_file(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return _state(descriptor, status.st_size)
        finally:
            os.close(descriptor)

    def add(self, nbytes: int, limit: float | None) -> State | None:
        """Account for bytes that are going to be written.

        Args:
            nbytes: How many.
            limit: What the root may hold.

        Returns:
            What the file says now; None if the bytes would exceed the limit, and are not accounted for.

        Raises:
            OSError: The root is not there, or its file cannot be written.
        """
        descriptor, status = self._open(os.O_RDWR | os.O_APPEND)
        try:
            state = _state(descriptor, status.st_size)
            if state is None:
                os.write(descriptor, _HEAD.pack(0, 0))
                state = State(0, None, 0)
            units = -(-nbytes // UNIT)
            if limit is not None and state.nbytes + units * UNIT > limit:
                # A root of a few large blocks may be far below its limit and still have no room for one more.
                below = int(limit) - units * UNIT
                if below > 0 and (state.limit is None or state.limit > below):
                    self.ask(below)
                return None
            os.write(descriptor, bytes(units))
            return State(state.nbytes + units * UNIT, state.limit, state.tally + units, state.is_scanned)
        finally:
            os.close(descriptor)

    def ask(self, limit: int) -> None:
        """Have the evictor keep the root below a limit until its next scan.

        Raises:
            OSError: The file is not there, or cannot be written.
        """
        descriptor, _ = open_file(self._path, os.O_RDWR)
        try:
            os.pwrite(descriptor, max(1, limit).to_bytes(8, "little"), _LIMIT_AT)
        finally:
            os.close(descriptor)

    def elect(self) -> bool:
        """Whether this instance is, or from now on is, the one that evicts; never waits.

        Raises:
            OSError: The file cannot be reached.
        """
        try:
            there = status_of(self._path)
        except FileNotFoundError:
            self.close()
            return False
        if self._lock >= 0:
            mine = os.fstat(self._lock)
            if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
                return True
            self.close()  # somebody has deleted the file, or another file system is mounted here
        descriptor, _ = open_file(self._path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            self._warn(error)
        self._lock = descriptor
        return True

    def reset(self, nbytes: float, since: State, limit: float | None) -> None:
        """After a scan by the evictor: say what the root holds.

        Args:
            nbytes: What the scan found.
            since: What the file said when the scan began; what was written after that is added.
            limit: The evictor's own.

        Raises:
            OSError: The file cannot be written.
        """
        head = _HEAD.pack(int(nbytes) - since.tally * UNIT, int(limit or 0))
        os.pwrite(self._lock, head, 0)

    def subtract(self, nbytes: int) -> None:
        """After deleting by the evictor: what is gone; and empty a long tally.

        Raises:
            OSError: The file cannot be written.
        """
        state = _state(self._lock, os.fstat(self._lock).st_size)
        if state is None:
            return
        long = state.tally > _LONGEST
        base = state.nbytes - nbytes - (0 if long else state.tally * UNIT)
        # The other way round, writers would believe for a moment that there is room.
        os.pwrite(self._lock, base.to_bytes(8, "little", signed=True), 0)
        if long:
            os.ftruncate(self._lock, _HEAD.size)

    def close(self) -> None:
        """Let another one evict."""
        if self._lock >= 0:
            descriptor, self._lock = self._lock, -1
            with suppress(OSError):
                os.close(descriptor)

    def _open(self, flags: int) -> tuple[int, os.stat_result]:
        with suppress(FileNotFoundError):
            return open_file(self._path, flags)
        group = shared_group(self._root)
        mode = FILE_MODE if group is None else SHARED_FILE_MODE
        return open_file(self._path, flags | os.O_CREAT, mode, group)

    def _warn(self, error: OSError) -> None:
        if not self._without_locks:
            self._without_locks = True
            get_logger(__name__).warning(
                "[UCM.Store] %s has no locks (%s): every engine evicts for itself", self._root, error.strerror
            )


def _state(descriptor: int, nbytes: int) -> State | None:
    if nbytes < _HEAD.size:
        return None
    base, limit = _HEAD.unpack(os.pread(descriptor, _HEAD.size, 0))
    tally = nbytes - _HEAD.size
    return State(max(0, base + tally * UNIT), limit if limit > 0 else None, tally, is_scanned=base != 0)


#: From which part of the capacity on blocks are deleted, and down to which: the rest is room for writers meanwhile.
_EVICT_FROM, _EVICT_TO = 0.98, 0.95
#: A root that is being written to is scanned again after so many seconds, as other hosts write too and people delete
#: files by hand; any other one seldom.
_SCAN_SECONDS = 60.0
_IDLE_SECONDS = 600.0
#: The first scan of a root of which it is known how much it holds waits until an engine that starts is through with its
#: first requests.
_FIRST_SECONDS = 5.0
#: How often the evictor looks how much was written, at most and at least.
_LOOK_SECONDS = 0.01, 1.0
#: How often another process tries to become the evictor.
_ELECTION_SECONDS = 5.0
_NICEST = 10


#: How long the end waits for evictors, all of them together.
CLOSE_SECONDS = 5.0


class Evictor:
    """One thread for one directory, so that one that does not answer stops eviction in no other.

    Args:
        directory: The directory.
        stale_seconds: See ``StoreConfig``.
        evicted: Called with the path of each block that was deleted to make room.
    """

    def __init__(self, directory: Directory, stale_seconds: float, evicted: Callable[[str], None]) -> None:
        self._directory = directory
        self._root = _Root(directory, stale_seconds, evicted)
        self._lock = threading.Lock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._busy_since: float | None = None  # None while it waits for the next look
        self._touches: deque[str] = deque()

    def start(self) -> None:
        """Begin, unless it has."""
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._run, name="ucm-evictor", daemon=True)
                    self._thread.start()

    def touch(self, path: str) -> None:
        """Note that a block was used; its time is renewed soon."""
        self._touches.append(path)

    def wrote(self) -> None:
        """Note that a block became visible."""
        directory = self._directory
        if directory.share is not None and (directory.used_bytes or 0) > directory.share * _EVICT_FROM:
            self._wake.set()

    def behind(self) -> None:
        """Note that a block was not written for want of room within the capacity."""
        self._wake.set()

    def full(self) -> None:
        """Note that the medium has no room although the capacity is not used up."""
        directory = self._directory
        if directory.share is not None and directory.used_bytes is not None:
            with suppress(OSError):
                directory.usage.ask(directory.used_bytes)
            self._wake.set()

    def stop(self) -> None:
        """Have the thread renew the last times, and end."""
        with self._lock:
            self._closed = True
        self._stop.set()
        self._wake.set()

    def join(self, until: float) -> None:
        """Wait for the thread to end, unless its current look has taken longer than ``CLOSE_SECONDS`` already.

        Args:
            until: Of ``time.monotonic()``.
        """
        thread, since = self._thread, self._busy_since
        if thread is None:
            self._root.close()
            return
        if since is not None:
            until = min(until, since + CLOSE_SECONDS)
        thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        enter_background(_NICEST)
        while not self._stop.is_set():
            self._wake.clear()
            self._busy_since = time.monotonic()
            self._renew()
            pause = self._look()
            self._busy_since = None
            self._stop.wait(_LOOK_SECONDS[0])
            self._wake.wait(pause)
        self._busy_since = time.monotonic()
        self._renew()
        self._root.close()

    def _look(self) -> float:
        try:
            return self._root.look(time.monotonic())
        except OSError:
            return _LOOK_SECONDS[1]  # what cannot be reached now may be next time
        except Exception:  # noqa: BLE001 - an evictor that ends would let the store fill up
            get_logger(__name__).exception("[UCM.Store] the evictor failed unexpectedly")
            return _ELECTION_SECONDS

    def _renew(self) -> None:
        while self._touches:
            with suppress(OSError):
                touch(self._touches.popleft())


def close_evictors(evictors: Sequence[Evictor]) -> None:
    """End some; those that a directory keeps are left to it."""
    for evictor in evictors:
        evictor.stop()
    until = time.monotonic() + CLOSE_SECONDS
    for evictor in evictors:
        evictor.join(until)


@dataclass(slots=True)
class _Seen:
    """How long the tally was at a look, and when that was."""

    tally: int
    moment: float


class _Root:
    """One directory, and what its evictor knows."""

    def __init__(self, directory: Directory, stale_seconds: float, evicted: Callable[[str], None]) -> None:
        self._directory = directory
        self._usage = directory.usage
        self._stale_seconds = stale_seconds
        self._evicted = evicted
        self._elected = False
        self._seen: _Seen | None = None
        self._scanned = _Seen(0, 0.0)
        self._next_mend: float | None = None
        self._next_cleanup = 0.0
        self._found = Scan()  # those of its files that are left can be deleted, oldest first

    def close(self) -> None:
        self._directory.let_go()
        self._usage.close()

    def look(self, now: float) -> float:
        """Do what is due: the seconds until the next look.

        Raises:
            OSError: The root cannot be reached.
        """
        self._directory.let_go(old=True)
        if self._next_mend is None:
            self._next_mend = now + _FIRST_SECONDS
        if now >= self._next_mend:
            self._next_mend = now + _IDLE_SECONDS
            # Without its marker, a namespace is neither cleaned up nor scanned.
            self._directory.layout.mend()
        if not self._usage.elect():
            self._elected = False
            return _LOOK_SECONDS[1] if self._read() is None else _ELECTION_SECONDS
        if not self._elected:
            self._elected = True
            self._seen = None
            self._next_cleanup = now + _FIRST_SECONDS
        state = self._read()
        if state is None:
            return _LOOK_SECONDS[1]
        if self._seen is None:
            due = now if self._limit(state) is not None and not state.is_scanned else now + _FIRST_SECONDS
            self._scanned = _Seen(-1, due - _SCAN_SECONDS)
            self._seen = _Seen(state.tally, now)
        if now >= self._next_cleanup:
            clean_up(self._directory.layout.root, self._stale_seconds)
            self._next_cleanup = now + _IDLE_SECONDS
        idle = state.tally == self._scanned.tally
        if now >= self._scanned.moment + (_IDLE_SECONDS if idle else _SCAN_SECONDS) or (
            self._crowded(state) is not None and not self._found.files
        ):
            state = self._scan(state)
        elif (limit := self._crowded(state)) is not None:
            state = self._make_room(state, self._found, limit)
        else:
            self._usage.subtract(0)
        return self._pause(state, now)

    def _read(self) -> State | None:
        state = self._usage.read()
        self._directory.tallied_bytes = None if state is None else state.nbytes
        return state

    def _limit(self, state: State) -> float | None:
        limits = [limit for limit in (self._directory.share, state.limit) if limit is not None]
        return min(limits) if limits else None

    def _crowded(self, state: State) -> float | None:
        """The limit, if it is nearly reached."""
        limit = self._limit(state)
        return limit if limit is not None and state.nbytes > limit * _EVICT_FROM else None

    def _scan(self, before: State) -> State:
        """Take stock, and delete what is too much."""
        found = scan(self._directory.layout.root)
        limit = self._limit(before)
        self._usage.reset(found.nbytes, before, self._directory.share)
        # The files of an exact scan last for many looks. A sample names too few, and what several evictors delete from
        # lists of their own is subtracted more than once, until the next scan.
        self._found = found if found.exact and limit is not None and self._usage.is_exclusive else Scan()
        state = self._read() or before
        if limit is not None and state.nbytes > limit * _EVICT_FROM:
            state = self._make_room(state, found, limit)
        self._scanned = self._seen = _Seen(state.tally, time.monotonic())
        return state

    def _make_room(self, state: State, found: Scan, limit: float) -> State:
        """Delete what was used longest ago."""
        root = self._directory.layout.root
        count, freed = evict(root, found, state.nbytes - limit * _EVICT_TO, self._evicted)
        self._usage.subtract(freed)
        get_logger(__name__).debug("[UCM.Store] %d blocks evicted from %s, which lost %d bytes", count, root, freed)
        return self._read() or state

    def _pause(self, state: State, now: float) -> float:
        """Until about half of the room that is left may have been used."""
        seen, self._seen = self._seen, _Seen(state.tally, now)
        limit = self._limit(state)
        if limit is None or seen is None:
            return _LOOK_SECONDS[1]
        written = (state.tally - seen.tally) / max(now - seen.moment, 1e-3)
        room = max(0.0, limit * _EVICT_FROM - state.nbytes) / 4096
        return min(max(0.5 * room / max(written, 1e-9), _LOOK_SECONDS[0]), _LOOK_SECONDS[1])
