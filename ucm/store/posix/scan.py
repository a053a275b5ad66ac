"""Scan a root: estimate what it holds, evict the least recently used blocks, and delete what dead processes left.

Keys are digests, so the blocks of one bucket are a fair sample of their namespace. A scan visits a namespace bucket by
bucket in random order until it has seen enough blocks, and extrapolates to the rest. Small stores are visited
completely, and their figures are exact.
"""

from __future__ import annotations

import random
import stat
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ucm.clock import SYSTEM
from ucm.salts import TAG_BYTES
from ucm.store.posix.layout import buckets, is_owned, is_quarantined, is_stale, key_of, namespaces
from ucm.store.posix.paths import list_directory, unlink, unlink_if
from ucm.store.shares import OTHERS, Shares, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ucm.clock import Clock
    from ucm.store.posix.layout import Layout
    from ucm.store.tier import LeaseRules

#: A sample of n blocks estimates their number with a relative error of 1/sqrt(n).
SAMPLE_BLOCKS = 20_000
_LEAST_SAMPLE = 1_000
_NO_SHARES = Shares()


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The file of a block, or another one of a namespace, such as that of a quarantined block."""

    path: str
    nbytes: int
    used_ns: int  #: its time of last use
    weight: float = 1.0  #: how many files it stands for
    damaged: bool = False  #: whether it is quarantined

    @property
    def tag(self) -> str:
        """The tag of its block's salt."""
        begin = self.path.rindex("/") + 1
        return self.path[begin : begin + 2 * TAG_BYTES]

    @property
    def held(self) -> float:
        """The bytes that it stands for."""
        return self.weight * self.nbytes


@dataclass(slots=True)
class Scan:
    """The result of scanning a root."""

    nbytes: float = 0.0
    blocks: float = 0.0
    exact: bool = True
    files: list[StoredFile] = field(default_factory=list)  #: all files, or a sample

    def by_account(self, shares: Shares) -> Counter[str]:
        """Return the bytes of the blocks of each account."""
        held: Counter[str] = Counter()
        for file in self.files:
            if not file.damaged:
                held[shares.account(file.tag)] += round(file.held)
        return held


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
                found.files.append(replace(file, damaged=True))
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
    root: str,
    found: Scan,
    nbytes: float,
    deleted: Callable[[str], None],
    leases: LeaseRules,
    most_pinned: float,
    *,
    shares: Shares = _NO_SHARES,
    clock: Clock = SYSTEM,
) -> tuple[int, int]:
    """Delete the least recently used files, unless they were used after the scan or are pinned.

    With shares, salts take turns to lose theirs; see ``ucm.store.shares``. Without, an exact scan may be reused until
    none of its files is left, because files written after it were used later.

    Several evictors may work in one directory, often with the same list. Files that another evictor deleted since the
    scan count towards the bytes as well, so that together they delete about as much as one would alone.

    Args:
        root: The directory.
        found: A scan of the directory; processed files are removed from it.
        nbytes: How many bytes to free.
        deleted: Called with the path of each file deleted by this call.
        leases: What files' times mean.
        most_pinned: How many bytes of pinned blocks are kept; see ``lost_pins``.
        shares: Whose files go first.
        clock: The clock by which a long walk sleeps half of the time, and leases end.

    Returns:
        The number of files deleted by this call, and the bytes freed by this call and by other evictors.

    Raises:
        OSError: The directory can no longer be listed.
    """
    count = freed = 0
    for file in _oldest(root, found, nbytes, _Order(found, leases, most_pinned, shares, clock), clock):
        try:
            if not unlink_if(file.path, file.used_ns.__eq__):
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


class _Order:
    """The order in which the files of a scan go; it sorts them, the first to go last.

    Args:
        found: The scan.
        leases: What files' times mean.
        most_pinned: As for ``evict``.
        shares: Whose files go first.
        clock: Tells which leases have ended.
    """

    def __init__(self, found: Scan, leases: LeaseRules, most_pinned: float, shares: Shares, clock: Clock) -> None:
        self._now = int(clock.time() * 1e9)
        self._leases, self.shares = leases, shares
        self._old = shares.old(self._now)
        found.files.sort(key=lambda file: (self.rank(file), file.path), reverse=True)
        pinned = [file for file in found.files if self._is_pinned(file)]
        #: The last pin that each account loses.
        self._lost = {account: (one.used_ns, one.path) for account, one in lost_pins(pinned, most_pinned, shares)}

    def rank(self, file: StoredFile) -> int:
        """Return what orders the files of one salt; the smallest goes first."""
        found = self._leases.rank(file.used_ns, self._now)
        return min(found, self._now) if file.damaged else found  # a damaged block's lease has ended

    def may_go(self, file: StoredFile) -> bool:
        """Return whether a file may be deleted at all."""
        if not self._is_pinned(file):
            return True
        last = self._lost.get(self.shares.account(file.tag))
        return last is not None and (file.used_ns, file.path) <= last

    def _is_pinned(self, file: StoredFile) -> bool:
        return not file.damaged and self._leases.is_pinned(file.used_ns, self._now)

    def account(self, file: StoredFile) -> str:
        """Return the account that a file counts for; empty for what is in nobody's share any more."""
        if not self.shares.seconds:
            return OTHERS
        is_old = file.damaged or self.rank(file) < self._old
        return "" if is_old else self.shares.account(file.tag)

    def turns(self, files: list[StoredFile]) -> Iterator[tuple[str, StoredFile]]:
        """Yield files that may go, with their accounts, in turn."""
        turns: Turns[StoredFile] = Turns(self.shares)
        for file in files:
            turns.add(self.account(file), file, file.held, may_go=self.may_go(file))
        return iter(turns)


def _oldest(root: str, found: Scan, nbytes: float, order: _Order, clock: Clock) -> Iterator[StoredFile]:
    """Yield files that may be deleted to free ``nbytes``; an exact scan yields them in order."""
    if found.exact and not order.shares.seconds:
        while found.files:
            if order.may_go(file := found.files.pop()):
                yield file
        return
    if found.exact:
        yield from (file for _, file in order.turns(found.files))
        return
    reached = 0.0
    last: dict[str, int] = {}
    for account, file in order.turns(found.files):
        reached += 0 if file.damaged else file.held  # the walk leaves those in quarantine
        last[account] = order.rank(file)
        if reached >= nbytes:
            break
    yield from (
        file
        for file in _all_blocks(root, clock)
        if order.may_go(file) and order.rank(file) <= last.get(order.account(file), -1)
    )


def lost_pins(pinned: Sequence[StoredFile], most: float, shares: Shares) -> Iterator[tuple[str, StoredFile]]:
    """Yield pinned blocks beyond a limit, with their accounts, which are only retained.

    As with shares, who has pinned the most for its weight loses a pin, the first to end. So nobody's pins take the room
    of others, and what one does not pin, others may. Many may end at one moment, so then the path decides.

    Args:
        pinned: The pinned blocks, in any order.
        most: How many bytes stay pinned.
        shares: The accounts and their weights.
    """
    held, turns = 0.0, Turns[StoredFile](shares)
    for file in sorted(pinned, key=lambda file: (file.used_ns, file.path), reverse=True):
        turns.add(shares.account(file.tag), file, file.held)
        held += file.held
    for account, file in turns:
        if held <= most:
            break
        held -= file.held
        yield account, file


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
    for layout in namespaces(root):
        with suppress(OSError):
            for file in stale_files(layout, stale_seconds, clock=clock):
                with suppress(OSError):
                    unlink(file.path)
                    count += 1
    return count


def stale_files(layout: Layout, stale_seconds: float, *, clock: Clock = SYSTEM) -> list[StoredFile]:
    """Return a namespace's unfinished files whose owners are gone; see ``clean_up``.

    Raises:
        OSError: The namespace cannot be listed.
    """
    now = clock.time()
    return [
        file
        for directory in (layout.temporary, layout.quarantine)
        for file in side_files(directory)
        if is_stale(file.path.rpartition("/")[2], now - file.used_ns / 1e9, stale_seconds)
    ]


def side_files(directory: str) -> list[StoredFile]:
    """Return our files in one of a namespace's directories for temporary or damaged blocks; empty if it is missing.

    Raises:
        OSError: The directory cannot be listed.
    """
    return [
        StoredFile(f"{directory}/{name}", status.st_size if stat.S_ISREG(status.st_mode) else 0, status.st_mtime_ns)
        for name, status in list_directory(directory)
        if is_owned(name) or is_quarantined(name)
    ]


def _all_blocks(root: str, clock: Clock) -> Iterator[StoredFile]:
    """Yield the blocks of all engines' namespaces; sleep half of the time, because the root is big."""
    paths = [path for layout in namespaces(root) if not layout.is_private for path in buckets(layout)]
    random.shuffle(paths)
    for path in paths:
        began = clock.monotonic()
        yield from _blocks(path)
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
