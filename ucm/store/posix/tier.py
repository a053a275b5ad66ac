"""Store blocks as files: one per block, in one or several directories that fail and recover independently."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, ClassVar, NoReturn

from ucm.errors import ConfigError
from ucm.store.base import (
    BlockCorruptError,
    BlockForeignError,
    BlockUnreadableError,
    StoreError,
    StoreTimeoutError,
)
from ucm.store.format import known_codec, nbytes_of
from ucm.store.health import RefusableJob
from ucm.store.posix.directory import Directory
from ucm.store.posix.files import quarantine
from ucm.store.posix.layout import check_namespace, key_of
from ucm.store.posix.paths import touch, unlink
from ucm.store.posix.space import close_evictors
from ucm.store.tier import (
    CompressingOptions,
    Leased,
    Tier,
    kept_until,
    lease_end,
    pinned_until,
    used_until,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ucm.clock import Event
    from ucm.store.base import BlockKey, BlockTransfer, Buffer, TierStats
    from ucm.store.tier import Outcome, TierOptions, TierPlace

#: How often a tool tries to lease a file that another process holds, for microseconds, and the seconds in between.
TOUCH_TRIES, TOUCH_SECONDS = 20, 0.005
#: The number of hash slots, by a key's last two bytes, that are spread over the directories.
_SLOTS = 4096
#: Errors of one block rather than of the medium.
_OF_THE_BLOCK = (BlockCorruptError, BlockForeignError, BlockUnreadableError)
#: The coarsest times of files, in nanoseconds: some file systems keep whole seconds.
_COARSEST = 1_000_000_000
#: The most blocks that are remembered as renewed; then some are renewed again.
_MOST_RENEWED = 1 << 17


class PosixTier(Tier):
    """A tier that stores blocks as files.

    Args:
        options: Whether blocks are compressed.
        place: The namespace and geometry to open.

    Raises:
        ConfigError: A directory is missing or unusable, the namespace is invalid, or a package is missing.
    """

    Options: ClassVar[type[TierOptions]] = CompressingOptions
    rests_by_itself = True
    batch_nbytes = 4 << 20  # a thread that gets more at a time ends later than the others
    first_wave = 4  # on a network file system, each name is a request
    authenticates = True
    leases = True

    def __init__(self, options: CompressingOptions, place: TierPlace) -> None:
        options.require_packages(place.name)
        config, roots = place.config, place.config.directories
        super().__init__("posix", timeout=config.stuck_seconds, clock=place.clock)
        self.lanes = len(roots)
        if not roots or len(set(roots)) != len(roots):
            raise ConfigError(
                "the Posix tier needs one or more directories, each named once",
                where="store: directories",
                fix="name directories that exist and are this user's own",
            )
        check_namespace(place.namespace)
        self._directories = [
            Directory(root, place.namespace, config, self._note_eviction, clock=place.clock) for root in roots
        ]
        self._evictors = [directory.evictor for directory in self._directories]
        self._slots = _slots(tuple(roots))
        self._codec, self._geometry, self._authenticator = place.codec, place.geometry, place.authenticator
        self._config = config
        self._compresses = options.compression != "none"
        self._evicts = False
        self._renewed: set[BlockKey] = set()  # the blocks that this tier has renewed in the current span
        self._until = 0  # the end of that span

    def lane(self, key: BlockKey) -> int:
        """Return the index of the directory that stores a block."""
        return 0 if self.lanes == 1 else self._slots[(key[-2] << 8 | key[-1]) % _SLOTS]

    @property
    def resting(self) -> float:
        """The share of the directories that rest from reads or writes, 0 to 1."""
        resting = [directory.reads.rests or directory.writes.rests for directory in self._directories]
        return resting.count(True) / len(resting)

    def contains(self, keys: Sequence[BlockKey], deadline: float) -> list[bool]:
        """Test one directory entry per key, on threads of each directory, which the system may block for ever."""
        by_lane: defaultdict[int, list[int]] = defaultdict(list)
        for place, key in enumerate(keys):
            by_lane[self.lane(key)].append(place)
        found: list[bool | None] = [None] * len(keys)

        def look(directory: Directory, places: Sequence[int], ended: Event) -> None:
            try:
                for place in places:
                    found[place] = directory.holds(keys[place])
                    if self.clock.monotonic() >= deadline:
                        break
            finally:
                ended.set()

        asked = []
        for lane, places in by_lane.items():
            directory, ended = self._directories[lane], self.clock.event()
            if not directory.reads.rests:
                directory.lookups.submit([RefusableJob(partial(look, directory, places, ended), ended.set)])
                asked.append((directory, places, ended))
        for directory, places, ended in asked:
            if not ended.wait(max(0.0, deadline - self.clock.monotonic())) and found[places[0]] is None:
                error = StoreTimeoutError("it does not answer", where=directory.layout.root)
                directory.reads.failed(error)
                self.counters.failed("lookup", error)
        return [bool(there) for there in found]

    def read_many(self, blocks: Sequence[BlockTransfer], deadline: float) -> list[Outcome]:
        """Read one file after the other."""
        del deadline
        outcomes: list[Outcome] = []
        for block in blocks:
            try:
                outcomes.append(self.read(block))
            except StoreError as error:
                outcomes.append(error)
        return outcomes

    def read(self, block: BlockTransfer) -> bool:
        """Load a block's layer slices.

        Returns:
            Whether the block's time of last use was old.
        """
        self._start_evictors()
        directory = self._directory(block.key)
        try:
            used = directory.read(known_codec(self._codec), block)
        except StoreError as error:
            self._fail(directory, block.key, error)
        now = self.clock.time()
        until = used_until(now, self._config.touch_seconds, block.depth)
        is_old = used < until and used != until // _COARSEST * _COARSEST
        return is_old and self._use(block.key, block.depth, now)

    def renew(self, depths: Mapping[BlockKey, int], *, is_new: bool = False) -> None:
        """Renew times of last use in the background."""
        self._start_evictors()
        if self._is_private:
            return
        now = self.clock.time()
        for key, depth in depths.items():
            if is_new:
                self._renewed.discard(key)
            self._use(key, depth, now)

    def _use(self, key: BlockKey, depth: int, now: float) -> bool:
        """Renew a block's time of last use soon; return False if this tier does so, or has, in the current span."""
        done = self._renewed_until(used_until(now, self._config.touch_seconds, 0))
        if key in done:
            return False
        done.add(key)
        directory, until = self._directory(key), used_until(now, self._config.touch_seconds, depth)
        directory.evictor.touch(directory.layout.block(key), until, failed=partial(done.discard, key))
        return True

    def retain(self, depths: Mapping[BlockKey, int], until: float, *, pinned: bool = False) -> None:
        """Set times of last use in the background; see ``kept_until``."""
        self._start_evictors()
        until = lease_end(until, self.clock.time(), self._config)
        for key, depth in depths.items() if until and not self._is_private else ():
            directory, stamp = self._directory(key), kept_until(until, depth)
            directory.evictor.lease(directory.layout.block(key), pinned_until(stamp) if pinned else stamp)

    def lease(self, depths: Mapping[BlockKey, int], until: float, *, pinned: bool) -> Leased:
        """Set times of last use in every directory; a file system with whole seconds drops the mark of a pin."""
        now = self.clock.time()
        leased, stored, refused = 0, 0, list[OSError]()
        for directory in self._directories:
            rules = directory.evictor.leases
            for key, depth in depths.items():
                if until:
                    stamp = pinned_until(kept_until(until, depth)) if pinned else kept_until(until, depth)
                    change = partial(rules.joined, new=stamp, now=int(now * 1e9))
                else:
                    change = partial(min, used_until(now, self._config.touch_seconds, depth))
                path = directory.layout.block(key)
                try:
                    kept = self._touch_when_free(path, change)
                    leased += rules.is_pinned(kept, int(now * 1e9)) or not pinned
                except FileNotFoundError:
                    continue
                except OSError as error:
                    refused.append(error)
                stored += 1
        return Leased(stored, leased, refused)

    def _touch_when_free(self, path: str, change: Callable[[int], int]) -> int:
        """Call `touch`, again if an engine touches the file at this moment."""
        for _ in range(TOUCH_TRIES):
            with suppress(BlockingIOError):
                return touch(path, change)
            self.clock.sleep(TOUCH_SECONDS)
        return touch(path, change)

    def drop(self, keys: Sequence[BlockKey]) -> int:
        """Delete the blocks' files from every directory, and damaged copies from quarantine, which count as well."""
        dropped, refused = 0, list[OSError]()
        for layout in (directory.layout for directory in self._directories):
            dropped += _delete([layout.block(key) for key in keys], refused)
            try:  # an engine that meets damage meanwhile has moved the block there by now
                damaged = layout.quarantined(keys)
            except OSError as error:
                refused.append(error)
            else:
                dropped += _delete(damaged, refused)
        if refused:
            raise StoreError(f"{dropped:,} blocks deleted, and {len(refused):,} not: {refused[0]}")
        return dropped

    def read_file(self, key: BlockKey, deadline: float) -> Buffer:
        """Return the whole file, verified by its own header."""
        del deadline
        directory = self._directory(key)
        try:
            return directory.read_file(key, self._geometry, self._authenticator)
        except StoreError as error:
            self._fail(directory, key, error)

    def has(self, key: BlockKey) -> bool:
        """Return whether a block exists, judged by its name."""
        return self._directory(key).holds(key)

    def put(self, key: BlockKey, pieces: Sequence[Buffer | bytearray], deadline: float) -> None:
        """Write a block's file, compressed if that is configured."""
        del deadline
        directory = self._directory(key)
        self._start_evictors()
        stored = known_codec(self._codec).pack(pieces) if self._compresses else pieces
        directory.write(key, stored)
        if self._compresses:
            self.counters.compressed(nbytes_of(stored))
        self._renewed.discard(key)
        directory.evictor.wrote()

    def stats(self) -> TierStats:
        """Return the counters and the bytes used."""
        used = _sum_of_known([one.used_bytes for one in self._evictors])
        found = self.counters.snapshot(used, self._config.posix_capacity_bytes)
        found.leased_bytes = _sum_of_known([one.leased_bytes for one in self._evictors])
        held = [one.held_of for one in self._evictors]
        found.bytes_of = {account: sum(one.get(account, 0) for one in held) for account in set().union(*held)}
        return found

    def close(self) -> None:
        """End the threads; threads that are stuck in a directory are abandoned."""
        for directory in self._directories:
            directory.lookups.close()
        close_evictors(self._evictors, clock=self.clock)

    @property
    def _is_private(self) -> bool:
        """Whether the blocks are of running requests, and so never evicted."""
        return self._directories[0].layout.is_private

    def _renewed_until(self, until: int) -> set[BlockKey]:
        """Return the blocks that this tier has renewed until the end of the current span."""
        if until != self._until or len(self._renewed) > _MOST_RENEWED:
            self._renewed, self._until = set(), until
        return self._renewed

    def _start_evictors(self) -> None:
        """Start those of all directories: also one that this process never uses may hold what dead ones left."""
        if not self._evicts:
            self._evicts = True
            for one in self._evictors:
                one.start()

    def _directory(self, key: BlockKey) -> Directory:
        return self._directories[self.lane(key)]

    def _note_eviction(self, path: str) -> None:
        key = key_of(*path.rsplit("/", 2)[-2:])
        self.counters.evicted(1, () if key is None else (key,))
        if key is not None:
            self._renewed.discard(key)

    def _fail(self, directory: Directory, key: BlockKey, error: StoreError) -> NoReturn:
        """Quarantine an unusable block, and raise the error for its reader.

        A medium that neither reads a file nor lets it be moved counts as failing.
        """
        self._renewed.discard(key)
        if isinstance(error, _OF_THE_BLOCK):
            if quarantine(directory.layout, key, error, self._config.quarantine_keep):
                self.counters.quarantined()
                directory.reads.succeeded()
            elif isinstance(error.__cause__, OSError):
                raise directory.read_failed(error.__cause__, error.where)
        raise error


def _sum_of_known(figures: Sequence[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None


@cache
def _slots(roots: tuple[str, ...]) -> tuple[int, ...]:
    """Assign slots to directories by rendezvous hashing: a new directory takes keys from all, other keys stay.

    A process opens a store for each rank and KV-cache group in the same directories, and the hashes take 20 ms.
    """
    if len(roots) == 1:
        return ()
    weights = [hashlib.blake2b(root.encode(), digest_size=8).digest() for root in roots]
    return tuple(
        max(
            range(len(roots)),
            key=lambda i: hashlib.blake2b(slot.to_bytes(2, "little"), key=weights[i], digest_size=8).digest(),
        )
        for slot in range(_SLOTS)
    )


def _delete(paths: Iterable[str], refused: list[OSError]) -> int:
    """Delete files; return how many there were, and add what was refused."""
    deleted = 0
    for path in paths:
        try:
            unlink(path)
            deleted += 1
        except FileNotFoundError:
            continue
        except OSError as error:
            refused.append(error)
    return deleted
