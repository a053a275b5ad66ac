"""Account for the space of a root, elect its evictor, and evict the least recently used blocks.

One file of a root, ``USED``, is both the tally and the lock. It begins with two numbers of 8 bytes, little endian::

    offset  content
         0  bytes held when the tally was empty, signed
         8  the smallest limit requested since the last scan; 0 for none

The rest is the tally: before writing blocks, a process appends one byte for every 4096 bytes of the blocks. Appends are
atomic, so the file's length shows what all processes have written, and no writer waits for another one. Writers enforce
the limit themselves: they wait briefly for room and then drop blocks.

The process that holds a lock on the file (``flock``) is the root's evictor, for all tiers of all engines and ranks that
use it. It scans the root from time to time, deletes files of dead processes and the least recently used blocks, and
subtracts the deleted bytes. Before a scan it empties a tally that has grown long, to 4 GiB of writes: what is appended
within the microseconds of that is found by the scan. The kernel releases the lock when the process ends.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ucm.background import enter_background
from ucm.clock import SYSTEM
from ucm.logger import get_logger
from ucm.store.base import StoreFullError
from ucm.store.posix.paths import (
    FILE_MODE,
    NO_LOCKS,
    SHARED_FILE_MODE,
    open_file,
    shared_group,
    status_of,
    touch,
)
from ucm.store.posix.scan import Scan, clean_up, evict, scan
from ucm.store.shares import OTHERS, Shares
from ucm.store.tier import LeaseRules, used_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.clock import Clock, Thread
    from ucm.store.config import StoreConfig
    from ucm.store.posix.layout import Layout


USAGE_FILE = "USED"
UNIT = 4096
_HEAD = struct.Struct("<qq")
_LIMIT_AT = 8
#: The length in bytes above which the tally is emptied, after 4 GiB of writes.
_LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class State:
    """The content of the file.

    Args:
        nbytes: The bytes that the root holds.
        limit: The smallest limit requested since the last scan; None for none.
        tally: The length of the tally.
        is_scanned: Whether an evictor has ever corrected the figure; before that the root counts as initially empty.
    """

    nbytes: int
    limit: int | None
    tally: int
    is_scanned: bool = False


class Usage:
    """The usage file of one root; every method but ``close`` may be called from any thread.

    Args:
        root: The root, without symbolic links.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._path = f"{root}/{USAGE_FILE}"
        self._lock = -1
        self.is_exclusive = True  #: whether this evictor is the only one, because the file system has locks

    def read(self) -> State | None:
        """Return the content of the file; None if it is missing or empty.

        Raises:
            OSError: The file cannot be read.
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
        """Account for bytes before they are written.

        Args:
            nbytes: The number of bytes.
            limit: The most bytes that the root may hold; None: no limit.

        Returns:
            The new content of the file; None if the bytes would exceed the limit. Then they were not added, or count
            until the next scan, if others were faster at this moment.

        Raises:
            OSError: The root is missing, or its file cannot be written.
        """
        descriptor, status = self._open(os.O_RDWR | os.O_APPEND)
        try:
            state = _state(descriptor, status.st_size)
            if state is None:
                os.write(descriptor, _HEAD.pack(0, 0))
                state = State(0, None, 0)
            units = -(-nbytes // UNIT)
            most = float("inf") if limit is None else limit
            if state.nbytes + units * UNIT <= most:
                os.write(descriptor, bytes(units))
                # Others may have appended meanwhile: what counts is where this process's bytes have come to lie.
                state = _state(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR)) or state
                if state.nbytes <= most:
                    return state
            # A root with few large blocks may be far below its limit and still have no room for one more.
            below = int(most) - units * UNIT
            if below > 0 and (state.limit is None or state.limit > below):
                self.ask(below)
            return None
        finally:
            os.close(descriptor)

    def ask(self, limit: int) -> None:
        """Let the evictor keep the root below a limit until its next scan.

        Raises:
            OSError: The file is missing or cannot be written.
        """
        descriptor, _ = open_file(self._path, os.O_RDWR)
        try:
            os.pwrite(descriptor, max(1, limit).to_bytes(8, "little"), _LIMIT_AT)
        finally:
            os.close(descriptor)

    def elect(self) -> bool:
        """Return whether this instance is, or has now become, the evictor; never wait.

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
            self.close()  # the file was deleted, or another file system was mounted here
        descriptor, _ = open_file(self._path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(descriptor)
                raise
            self._warn(error)
        self._lock = descriptor
        return True

    def reset(self, nbytes: float, since: State, limit: float | None) -> None:
        """Set the bytes that the root holds, after a scan by the evictor.

        Args:
            nbytes: The result of the scan.
            since: The content of the file when the scan began; later writes are added to the result.
            limit: The evictor's own limit.

        Raises:
            OSError: The file cannot be written.
        """
        head = _HEAD.pack(int(nbytes) - since.tally * UNIT, int(limit or 0))
        os.pwrite(self._lock, head, 0)

    def subtract(self, nbytes: int) -> None:
        """Subtract bytes that the evictor has deleted.

        Raises:
            OSError: The file cannot be written.
        """
        state = _state(self._lock, os.fstat(self._lock).st_size)
        if state is not None:
            self._set_base(state.nbytes - nbytes - state.tally * UNIT)

    def empty(self) -> None:
        """Empty a long tally, before a scan that finds what is appended meanwhile.

        Raises:
            OSError: The file cannot be written.
        """
        state = _state(self._lock, os.fstat(self._lock).st_size)
        if state is not None and state.tally > _LONGEST:
            # In the opposite order, writers would see too much room for a moment.
            self._set_base(state.nbytes)
            os.ftruncate(self._lock, _HEAD.size)

    def _set_base(self, nbytes: int) -> None:
        os.pwrite(self._lock, nbytes.to_bytes(8, "little", signed=True), 0)

    def close(self) -> None:
        """Release the lock, so that another process can evict."""
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
        if self.is_exclusive:
            self.is_exclusive = False
            get_logger(__name__).warning(
                "[UCM.Store] %s has no locks (%s): every engine evicts for itself", self._root, error.strerror
            )


def _state(descriptor: int, nbytes: int) -> State | None:
    if nbytes < _HEAD.size:
        return None
    base, limit = _HEAD.unpack(os.pread(descriptor, _HEAD.size, 0))
    tally = nbytes - _HEAD.size
    return State(max(0, base + tally * UNIT), limit if limit > 0 else None, tally, is_scanned=base != 0)


#: Above the first share of the capacity, blocks are deleted down to the second; the rest is room for writers meanwhile.
_EVICT_FROM, _EVICT_TO = 0.98, 0.95
#: The share of the capacity beyond which pinned blocks are only retained; see ``lost_pins``.
PINNED_SHARE = 0.5
#: A root in use is scanned again after this many seconds, because other hosts write too and files are deleted by hand;
#: an idle one after ``_IDLE_SECONDS``.
_SCAN_SECONDS = 60.0
_IDLE_SECONDS = 600.0
#: The first scan of a root with a known usage waits this many seconds, until a starting engine has served its first
#: requests.
_FIRST_SECONDS = 5.0
#: A crowded root of which nothing more may be deleted, because it holds blocks of running requests or unfinished files,
#: is scanned again after this many seconds.
_VAIN_SECONDS = 1.0
#: The shortest and the longest pause of the evictor between two looks, in seconds.
_LOOK_SECONDS = 0.01, 1.0
#: How many seconds another process waits between two attempts to become the evictor.
_ELECTION_SECONDS = 5.0
_NICEST = 10
#: The most times of last use that wait to be set.
_MOST_TOUCHES = 1 << 19


#: How long a write waits for the evictor at most, and how often it checks, in seconds.
_PATIENCE_SECONDS, _RETRY_SECONDS = 0.5, 0.01
#: How many seconds ``close`` waits for all evictors together.
CLOSE_SECONDS = 5.0


class Evictor:
    """Accounts for what one directory holds, and evicts its blocks in a thread of its own.

    So a stuck directory does not stop eviction in others.

    Args:
        layout: The namespace of this process in the directory.
        config: The store's options.
        evicted: Called with the path of each block deleted to make room.
        clock: The store's clock.
    """

    def __init__(
        self, layout: Layout, config: StoreConfig, evicted: Callable[[str], None], *, clock: Clock = SYSTEM
    ) -> None:
        self._layout, self._config, self._clock = layout, config, clock
        self._usage, self._shares, self.leases = Usage(layout.root), Shares.of(config), LeaseRules.of(config)
        self.share = config.directory_bytes
        self.held_of: dict[str, int] = {}  #: the bytes of each account with a weight at the last scan, likewise
        self.leased_bytes: int | None = None  #: the bytes of leased blocks at the last scan, if this process scans
        #: The bytes held, for all namespaces and all writers, as last read; None if unknown.
        self.used_bytes: int | None = None
        self._taking = clock.lock()  # held while the tally is read
        self._is_patient = True
        self._evicted = evicted
        self._lock = clock.lock()
        self._wake, self._stop = clock.event(), clock.event()
        self._thread: Thread | None = None
        self._closed = False
        self._busy_since: float | None = None  # None between two looks
        self._touches: deque[tuple[str, int, Callable[[], None]]] = deque()
        self._elected = False
        #: The length of the tally and the moment, of the last look and of the last scan.
        self._seen: tuple[int, float] | None = None
        self._scanned = 0, 0.0
        self._next_mend: float | None = None
        self._next_cleanup = 0.0
        self._found = Scan()  # its remaining files can be deleted, oldest first
        self._in_vain = False  # the last scan found too few files that may be deleted

    def start(self) -> None:
        """Start the thread, unless it has started."""
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed:
                    self._thread = self._clock.started(self._run, "ucm-evictor")

    def touch(self, path: str, used_ns: int, failed: Callable[[], None] = lambda: None) -> None:
        """Set a block's time of last use soon, unless it is later; see ``LeaseRules.joined``.

        Args:
            path: The block's file.
            used_ns: The time, in nanoseconds since the epoch.
            failed: Called if it cannot be set, for instance because there is no such block.
        """
        if len(self._touches) < _MOST_TOUCHES:
            self._touches.append((path, used_ns, failed))
        else:  # the directory has been stuck for long
            failed()

    def lease(self, path: str, until_ns: int) -> None:
        """Set a block's time of last use like ``touch``, at once: until then it may be the next to go."""
        self.touch(path, until_ns)
        self._wake.set()

    def wrote(self) -> None:
        """Note that a block became visible."""
        if self.share is not None and (self.used_bytes or 0) > self.share * _EVICT_FROM:
            self._wake.set()

    def reserve(self, descriptor: int, nbytes: int) -> None:
        """Give an empty file its size and account for it; what is not written then counts until the next scan.

        If there is no room, wake the evictor and wait briefly; after a failure do not wait again until there is
        room, or writes would queue up.

        The file has its size before it counts: a scan that begins later finds it, and one that began earlier adds what
        was accounted for since. So none misses it, and the directory never holds more than it may.

        Raises:
            StoreFullError: The directory would exceed its share: the evictor is behind.
            OSError: The directory is missing or cannot be written.
        """
        deadline: float | None = None
        while True:
            os.ftruncate(descriptor, nbytes)
            with self._taking:
                state = self._usage.add(nbytes, self.share)
            if state is not None:
                self.used_bytes, self._is_patient = state.nbytes, True
                return
            os.ftruncate(descriptor, 0)
            now = self._clock.monotonic()
            if deadline is None:
                self._wake.set()
                deadline = now + (_PATIENCE_SECONDS if self._is_patient else 0.0)
            if now >= deadline:
                self._is_patient = False
                raise StoreFullError(
                    f"the {self.share:.0f} bytes that the directory may hold are in use",
                    where=self._layout.root,
                    fix="none is needed if this is seldom: the evictor is behind; else raise the capacity",
                )
            self._clock.sleep(_RETRY_SECONDS)

    def full(self) -> None:
        """Note that the medium is full although the capacity is not reached."""
        if self.share is not None and self.used_bytes is not None:
            with suppress(OSError):
                self._usage.ask(self.used_bytes)
            self._wake.set()

    def stop(self) -> None:
        """Let the thread renew the last times of use and end."""
        with self._lock:
            self._closed = True
        self._stop.set()
        self._wake.set()

    def join(self, until: float) -> None:
        """Wait for the thread to end, unless its current look has taken longer than ``CLOSE_SECONDS`` already.

        Args:
            until: The deadline, by the clock's ``monotonic()``.
        """
        thread, since = self._thread, self._busy_since
        if thread is None:
            self._usage.close()
            return
        if since is not None:
            until = min(until, since + CLOSE_SECONDS)
        thread.join(max(0.0, until - self._clock.monotonic()))

    def _run(self) -> None:
        enter_background(_NICEST)
        while not self._stop.is_set():
            self._wake.clear()
            self._busy_since = self._clock.monotonic()
            self._renew()
            pause = self._look()
            self._busy_since = None
            self._stop.wait(_LOOK_SECONDS[0])
            if not self._stop.is_set():  # what `stop` set may have been cleared above
                self._wake.wait(pause)
        self._busy_since = self._clock.monotonic()
        self._renew()
        self._usage.close()

    def _look(self) -> float:
        try:
            return self.look(self._clock.monotonic())
        except OSError:
            return _LOOK_SECONDS[1]  # the root may be reachable next time
        except Exception:  # noqa: BLE001 - without an evictor the store would fill up
            get_logger(__name__).exception("[UCM.Store] the evictor failed unexpectedly")
            return _ELECTION_SECONDS

    def _renew(self) -> None:
        now, rules = int(self._clock.time() * 1e9), self.leases
        for _ in range(len(self._touches)):
            path, used_ns, failed = one = self._touches.popleft()
            try:
                touch(path, partial(rules.joined, new=used_ns, now=now))
            except BlockingIOError:  # held by another process, for microseconds
                self._touches.append(one)
            except OSError:
                failed()

    def look(self, now: float) -> float:
        """Do what is due, and return the seconds until the next call.

        Raises:
            OSError: The root cannot be reached.
        """
        if self._next_mend is None:
            self._next_mend = now + _FIRST_SECONDS
        if now >= self._next_mend:
            self._next_mend = now + _IDLE_SECONDS
            # Without its marker, a namespace is neither cleaned up nor scanned.
            self._layout.mend()
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
            self._scanned = -1, due - _SCAN_SECONDS
            self._seen = state.tally, now
        if now >= self._next_cleanup:
            clean_up(self._layout.root, self._config.stale_seconds, clock=self._clock)
            self._next_cleanup = now + _IDLE_SECONDS
        limit = self._crowded(state)
        if now >= self._scanned[1] + self._between_scans(state):
            state = self._scan(state)
        elif limit is not None and self._found.files:
            state, _ = self._make_room(state, self._found, limit)
        return self._pause(state, now)

    def _between_scans(self, state: State) -> float:
        """Return how many seconds after the last scan the next one is due."""
        if self._crowded(state) is not None and not self._found.files:
            return _VAIN_SECONDS if self._in_vain else 0.0
        return _IDLE_SECONDS if state.tally == self._scanned[0] else _SCAN_SECONDS

    def _read(self) -> State | None:
        state = self._usage.read()
        self.used_bytes = None if state is None else state.nbytes
        return state

    def _limit(self, state: State) -> float | None:
        return smaller(self.share, state.limit)

    def _crowded(self, state: State) -> float | None:
        """Return the limit if it is nearly reached."""
        limit = self._limit(state)
        return limit if limit is not None and state.nbytes > limit * _EVICT_FROM else None

    def _scan(self, before: State) -> State:
        """Scan the root and delete excess blocks."""
        span_ends = used_until(self._clock.time(), self._config.touch_seconds, 0)
        self._usage.empty()
        before = self._read() or before
        found = scan(self._layout.root, clock=self._clock)
        limit = self._limit(before)
        self._in_vain = False
        self._usage.reset(found.nbytes, before, self.share)
        now = int(self._clock.time() * 1e9)
        leased = (file for file in found.files if self.leases.rank(file.used_ns, now) > span_ends)
        self.leased_bytes = int(sum(file.held for file in leased))
        shares = self._shares
        if shares.weights:
            self.held_of = dict.fromkeys((*shares.weights, OTHERS), 0) | found.by_account(shares)
        state = self._read() or before
        if limit is not None and state.nbytes > limit * _EVICT_FROM:
            state, self._in_vain = self._make_room(state, found, limit)
        # The files of an exact scan serve many looks, except for leased ones, which come after those written since. A
        # sample names too few, and without locks several evictors would subtract the same files more than once, until
        # the next scan. Nor does it say who has written since, so that shares need a new scan each time.
        self._found = Scan()
        if found.exact and limit is not None and self._usage.is_exclusive and not shares.seconds:
            self._found.files = [file for file in found.files if file.used_ns <= span_ends]
        self._scanned = self._seen = state.tally, self._clock.monotonic()
        return state

    def _make_room(self, state: State, found: Scan, limit: float) -> tuple[State, bool]:
        """Delete the least recently used blocks; return the new state, and whether there were too few."""
        root = self._layout.root
        excess = state.nbytes - limit * _EVICT_TO
        most_pinned = limit * PINNED_SHARE
        count, freed = evict(
            root,
            found,
            excess,
            self._evicted,
            self.leases,
            most_pinned,
            shares=self._shares,
            clock=self._clock,
        )
        self._usage.subtract(freed)
        get_logger(__name__).debug("[UCM.Store] %d blocks evicted from %s, which lost %d bytes", count, root, freed)
        return self._read() or state, freed < excess

    def _pause(self, state: State, now: float) -> float:
        """Return the time in which about half of the remaining room may be used."""
        seen, self._seen = self._seen, (state.tally, now)
        limit = self._limit(state)
        if limit is None or seen is None:
            return _LOOK_SECONDS[1]
        written = (state.tally - seen[0]) / max(now - seen[1], 1e-3)
        room = max(0.0, limit * _EVICT_FROM - state.nbytes) / 4096
        return min(max(0.5 * room / max(written, 1e-9), _LOOK_SECONDS[0]), _LOOK_SECONDS[1])


def close_evictors(evictors: Sequence[Evictor], *, clock: Clock = SYSTEM) -> None:
    """Close evictors; abandon threads that are stuck in a directory."""
    for evictor in evictors:
        evictor.stop()
    until = clock.monotonic() + CLOSE_SECONDS
    for evictor in evictors:
        evictor.join(until)


def smaller(*limits: float | None) -> float | None:
    """Return the smallest limit; None if there is none."""
    return min((limit for limit in limits if limit is not None), default=None)
