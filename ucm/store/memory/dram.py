"""Store blocks in memory that all engines of a user on a host share; see ``ucm.store.memory.segment``.

A namespace's writer fills one segment after the other. When the tier holds as much as it may, the segment that was not
used for longest, of any namespace, is emptied and serves as the next one, so that its memory need not be allocated and
cleared again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ucm.store.base import (
    BlockCorruptError,
    BlockForeignError,
    BlockMissingError,
    StoreError,
    StoreFullError,
    StoreTimeoutError,
)
from ucm.store.format import UNIT, gather, known_codec, nbytes_of, scatter
from ucm.store.memory.directory import prepare_dram
from ucm.store.memory.segment import LOCK_FILE, SEGMENTS, Segment, delete_blocks, directory_of, segment_nbytes
from ucm.store.posix.files import store_error
from ucm.store.posix.layout import Layout, check_namespace, namespaces
from ucm.store.posix.paths import (
    distrust,
    list_directory,
    make_directory,
    open_file,
    status_of,
)
from ucm.store.posix.scan import clean_up
from ucm.store.tier import DEEPEST, Leased, LeaseRules, Tier, kept_until, lease_end, used_until

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from ucm.store.base import BlockKey, BlockTransfer, Buffer, TierStats
    from ucm.store.format import HeaderCodec
    from ucm.store.tier import Outcome, TierOptions, TierPlace

#: A segment has about this share of the capacity, and at most so many bytes, or else one block.
_SHARE, _MOST_NBYTES = 64, 1 << 30
#: The share of free slots with which a segment is filled again rather than another one emptied.
_ROOMY = 0.25
#: A directory's time of change may stand still for so long, in nanoseconds.
_TICK = 50_000_000
#: Others may still be copying from a segment that was deleted, but for no longer than this, in seconds.
_COPYING_SECONDS = 30.0
#: The time between attempts to lock the directory, in seconds.
_POLL_SECONDS = 0.005
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})


class DramTier(Tier):
    """A tier in shared memory.

    Args:
        options: None of its own.
        place: The namespace and geometry to open.

    Raises:
        ConfigError: The directory cannot be used, or the namespace is invalid.
    """

    batch_nbytes = 8 << 20
    authenticates = True
    leases = True

    def __init__(self, options: TierOptions, place: TierPlace) -> None:
        del options
        config = place.config
        super().__init__("dram", timeout=config.stuck_seconds, clock=place.clock)
        root, self._capacity = prepare_dram(config)
        self._layout = Layout(root, check_namespace(place.namespace))
        self._layout.keep_identity()
        # Others cannot write to the directory, unless a group is trusted with it, so checksums suffice.
        self._is_private = config.trusted_group is None
        self._authenticator = place.authenticator
        codec = place.codec
        self._codec = codec.in_private_memory() if codec is not None and self._is_private else codec
        self._config, self._leases = config, LeaseRules.of(config)
        self._lock = self.clock.lock()
        self._claiming = (
            self.clock.lock()
        )  # of writers: allocating a segment takes long, and readers must not wait for it
        self._index: dict[BlockKey, tuple[Segment, int]] = {}
        self._segments: dict[int, Segment] = {}  # by inode
        self._listed = -1  # the directory's time of change when it was listed, if that can be relied upon
        self._filling: _Filling | None = None
        self._removed: list[tuple[float, Segment]] = []  # deleted segments, with the time
        self._used: int | None = None
        with suppress(OSError):
            self._used = sum(self._sizes().values())

    def contains(self, keys: Sequence[BlockKey], deadline: float) -> list[bool]:
        """Learn what changed in the tables of all segments, and look the keys up in the index."""
        del deadline
        self._refresh()
        return list(map(self._index.__contains__, keys))

    def read_many(self, blocks: Sequence[BlockTransfer], deadline: float) -> list[Outcome]:
        """Copy layer slices out of the segments and verify the copies."""
        del deadline
        codec, now = known_codec(self._codec), self.clock.time()
        return [
            self._read(codec, block, place, now)
            for block, place in zip(blocks, self._places([block.key for block in blocks]), strict=True)
        ]

    def read_file(self, key: BlockKey, deadline: float) -> Buffer:
        """Return a copy of a stored block, verified by its own header."""
        del deadline
        (place,) = self._places([key])
        if place is None:
            raise self._missing(key)
        segment, number = place
        try:
            return segment.file_of(
                number,
                key,
                None if self._is_private else self._authenticator,
                namespace=self._layout.namespace,
                geometry=self._codec.geometry if self._codec is not None else None,
            )[0]
        except (BlockCorruptError, BlockForeignError, BlockMissingError) as error:
            raise self._refused(place, key, error) from error

    def has(self, key: BlockKey) -> bool:
        """Return whether a block exists; also by what its segment says, so that one just deleted is stored again."""
        return self._places([key])[0] is not None

    def put(self, key: BlockKey, pieces: Sequence[Buffer | bytearray], deadline: float) -> None:
        """Copy a block into a free slot, and make it visible unless another thread stored it meanwhile."""
        del deadline
        nbytes = nbytes_of(pieces)
        filling, number = self._free_slot(nbytes)
        try:
            gather(pieces, filling.segment.slot(number)[:nbytes])
        except BaseException:
            with self._lock:
                filling.done(number)
            raise
        now = self.clock.time()
        with self._lock:
            is_new = self._place(key) is None
            if is_new:
                self._remove(filling.segment, filling.segment.show(number, key))
                filling.segment.renewed[number] = 0
                # For a moment, until `renew` tells its depth.
                filling.segment.use(used_until(now, self._config.touch_seconds, DEEPEST), now, self._leases)
                self._index[key] = filling.segment, number
            filling.done(None if is_new else number)

    def renew(self, depths: Mapping[BlockKey, int], *, is_new: bool = False) -> None:
        """Renew the times of last use of the blocks' segments."""
        del is_new
        now, span = self.clock.time(), self._config.touch_seconds
        self._use(depths, now, lambda depth: used_until(now, span, depth))

    def retain(self, depths: Mapping[BlockKey, int], until: float, *, pinned: bool = False) -> None:
        """Retain the blocks' segments; memory has no pins, because a segment would pin many blocks with one."""
        del pinned
        now = self.clock.time()
        if end := lease_end(until, now, self._config):
            self._use(depths, now, lambda depth: kept_until(end, depth))

    def lease(self, depths: Mapping[BlockKey, int], until: float, *, pinned: bool) -> Leased:
        """Retain the blocks' segments; none is pinned, and no lease is ended, which may be of other blocks as well."""
        there = self.contains(list(depths), self.clock.monotonic()).count(True)
        self.retain(depths, until)
        return Leased(there, there if until and not pinned else 0)

    def drop(self, keys: Sequence[BlockKey]) -> int:
        """Delete blocks from the namespace's segments, whose memory serves its next ones."""
        try:
            return delete_blocks(self._layout, keys)
        except OSError as error:
            raise store_error(error, self._layout.base) from error

    def stats(self) -> TierStats:
        """Return the counters and the bytes used, as last seen."""
        return self.counters.snapshot(self._used, self._capacity)

    def close(self) -> None:
        """Close the segments."""
        with self._lock:
            self._filling = None
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            self._removed.clear()
            self._index.clear()

    def _free_slot(self, nbytes: int) -> tuple[_Filling, int]:
        with self._claiming:
            with self._lock:
                filling = self._filling
                number = None if filling is None else filling.take(nbytes)
            if filling is None or number is None:
                try:
                    segment = self._next(-(-nbytes // UNIT) * UNIT)
                except OSError as error:
                    raise store_error(error, self._layout.base) from error
                with self._lock:
                    filling, number = self._fill(segment)
        return filling, number

    def _use(self, depths: Mapping[BlockKey, int], now: float, until: Callable[[int], int]) -> None:
        for key, depth in depths.items():
            place = self._place(key)
            if place is not None:
                place[0].use(until(depth), now, self._leases)

    def _place(self, key: BlockKey) -> tuple[Segment, int] | None:
        place = self._index.get(key)
        return place if place is not None and place[0].holds(place[1], key) and place[0].is_current() else None

    def _places(self, keys: Sequence[BlockKey]) -> list[tuple[Segment, int] | None]:
        """Return where blocks are; learn of changes if one seems to be missing."""
        found = [self._place(key) for key in keys]
        if None in found:
            self._refresh()
            found = [self._place(key) for key in keys]
        return found

    def _missing(self, key: BlockKey) -> StoreError:
        return BlockMissingError(f"block {key.hex()} is not in memory", where=self._layout.base)

    def _read(
        self,
        codec: HeaderCodec,
        block: BlockTransfer,
        place: tuple[Segment, int] | None,
        now: float,
    ) -> Outcome:
        key, first, slices = block.key, block.first_slice, block.slices
        if place is None:
            return self._missing(key)
        segment, number = place
        slot = segment.slot(number)
        if slot.nbytes < codec.file_nbytes:
            return self._refused(place, key, BlockForeignError("the block has other layer slices"))
        header = bytearray(slot[: codec.nbytes])
        scatter(slot[codec.offsets[first] :], slices)
        if not codec.is_sound(header, key, first, slices):
            return self._refused(place, key, codec.refusal(header, key))
        until = used_until(now, self._config.touch_seconds, block.depth)
        if segment.renewed[number] == until:
            return False
        segment.renewed[number] = until
        segment.use(until, now, self._leases)
        return True

    def _refused(self, place: tuple[Segment, int], key: BlockKey, error: StoreError) -> StoreError:
        """Delete a damaged block, unless it was deleted while it was read; return the error for its reader."""
        segment, number = place
        if isinstance(error, BlockMissingError) or not segment.is_current() or not segment.hide(number, key):
            return self._missing(key)
        self.counters.quarantined()
        error.where = segment.path
        return error

    def _refresh(self) -> None:
        """Learn what other processes stored and evicted.

        Raises:
            StoreUnavailableError: The directory cannot be listed.
        """
        with self._lock:
            try:
                self._list()
            except OSError as error:
                raise store_error(error, self._layout.base) from error
            for segment in self._segments.values():
                self._learn(segment)

    def _list(self) -> None:
        path = directory_of(self._layout)
        try:
            changed = status_of(path).st_mtime_ns
        except FileNotFoundError:
            changed = 0
        if changed and changed == self._listed:
            return
        # By the system's clock, which stamps the directory.
        self._listed = changed if time.time_ns() - changed > _TICK else -1
        found = {}
        if not self._replaced():
            found = {status.st_ino: f"{path}/{name}" for name, status in list_directory(path)}
        for inode in self._segments.keys() - found.keys():
            segment = self._segments.pop(inode)
            self._forget(segment)
            if self._filling is not None and self._filling.segment is segment:
                self._filling = None  # its writers write to memory that nobody finds
            segment.close()
        for inode, where in found.items():
            if inode in self._segments:
                self._segments[inode].path = where
                continue
            try:
                self._segments[inode] = Segment.open(where)
            except (FileNotFoundError, ValueError):  # it vanished, or is no segment
                pass
            except OSError:
                self._listed = -1  # it is tried again

    def _learn(self, segment: Segment) -> None:
        if not segment.is_current():
            segment.renew()
        gone, new = segment.news()
        self._remove(segment, gone)
        self._index.update((key, (segment, number)) for key, number in new)

    def _forget(self, segment: Segment) -> None:
        self._remove(segment, segment.untell())

    def _remove(self, segment: Segment, blocks: Iterable[tuple[BlockKey, int]]) -> None:
        for key, number in blocks:
            if self._index.get(key) == (segment, number):
                del self._index[key]

    def _next(self, slot_nbytes: int) -> Segment:
        """Return a segment with free slots, locked; the caller is the only writer that does this.

        Raises:
            StoreFullError: All segments are being written to, or the block has more bytes than the tier may use.
            StoreTimeoutError: Another process keeps the directory locked.
            OSError: The directory cannot be used.
        """
        self._make_root()
        clean_up(self._layout.root, self._config.stale_seconds, clock=self.clock)
        self._give_back()
        self._refresh()  # a segment that another process emptied cannot be locked before
        found = self._own(slot_nbytes, _ROOMY)
        if found is not None:
            return found
        slots = max(1, min(self._capacity // _SHARE, _MOST_NBYTES) // slot_nbytes)
        nbytes = segment_nbytes(slot_nbytes, slots)
        if nbytes > self._capacity:
            raise StoreFullError(
                f"a block takes {nbytes} bytes, but the Dram tier may use only {self._capacity}",
                where=self._layout.root,
                fix="raise dram_capacity",
            )
        with self._root_lock():
            self._layout.make()
            make_directory(directory_of(self._layout), self._layout.group)
            found = self._claim(slot_nbytes, slots, nbytes)
        found = found or self._own(slot_nbytes, 0)
        if found is None:
            raise StoreFullError(
                f"the {self._capacity} bytes that the Dram tier may use are all being written to, or hold blocks of "
                "running requests",
                where=self._layout.root,
                fix="raise dram_capacity",
            )
        return found

    def _own(self, slot_nbytes: int, free: float) -> Segment | None:
        """Return one of the namespace's segments with this share of free slots, locked; None if there is none."""
        with self._lock:
            for segment in self._segments.values():
                if segment.slot_nbytes == slot_nbytes and segment.has_room(free) and segment.lock():
                    self._learn(segment)  # the slots of deleted blocks will serve others
                    return segment
        return None

    def _claim(self, slot_nbytes: int, slots: int, nbytes: int) -> Segment | None:
        """Return a new segment or an emptied one, locked; None if there is no room. The directory is locked."""
        sizes = self._sizes()
        self._used = sum(sizes.values())
        if made := self._make(slot_nbytes, slots, nbytes):
            return made
        chosen: Segment | None = None
        victims = self._victims(sizes)
        try:
            for victim in victims:
                with self._lock:
                    if not victim.lock():
                        continue
                number = victim.slots - len(victim.free())
                try:
                    if self._used <= self._capacity and (victim.slot_nbytes, victim.slots) == (slot_nbytes, slots):
                        victim.empty()
                        if not victim.path.startswith(f"{self._layout.base}/"):
                            victim.publish(self._layout)
                        chosen = victim
                    else:
                        victim.remove()
                except OSError:
                    with self._lock:
                        victim.unlock()
                    raise
                if chosen is None:
                    self._removed.append((self.clock.monotonic(), victim))
                    self._used -= sizes[victim.path]
                    chosen = self._make(slot_nbytes, slots, nbytes)
                self.counters.evicted(number)
                with self._lock:
                    self._forget(victim)
                if chosen is not None:
                    return chosen
        finally:
            self._close_unused(victims, chosen)
        return None

    def _give_back(self) -> None:
        """Free the memory of deleted segments that other processes still map, once nobody copies from them."""
        now = self.clock.monotonic()
        while self._removed and now - self._removed[0][0] > _COPYING_SECONDS:
            _, segment = self._removed.pop(0)
            segment.give_back()
            segment.close()

    def _close_unused(self, segments: Collection[Segment], chosen: Segment | None) -> None:
        removed = [segment for _, segment in self._removed]
        with self._lock:
            for segment in segments:
                is_known = self._segments.get(segment.inode) is segment
                if not is_known and segment is not chosen and segment not in removed:
                    segment.close()

    def _make(self, slot_nbytes: int, slots: int, nbytes: int) -> Segment | None:
        """Make a segment; None if there is no room for it. The directory is locked."""
        if (self._used or 0) + nbytes > self._capacity:
            return None
        try:
            made = Segment.make(self._layout, slot_nbytes, slots)
        except OSError as error:
            if error.errno in _FULL:
                return None
            raise
        self._used = (self._used or 0) + nbytes
        return made

    def _fill(self, segment: Segment) -> tuple[_Filling, int]:
        """Fill a locked segment from now on; return its first slot. The caller has the lock."""
        old = self._segments.get(segment.inode)
        if old is not None and old is not segment:  # another engine had moved it away meanwhile
            self._forget(old)
            old.close()
        self._segments[segment.inode] = segment
        filling = self._filling = _Filling(segment)
        number = filling.take(segment.slot_nbytes)
        if number is None:
            raise StoreFullError("another process filled the segment meanwhile", where=segment.path)
        return filling, number

    def _replaced(self) -> str:
        """Return what is wrong with the directory, which others may have made after it was deleted; else nothing."""
        with suppress(FileNotFoundError):
            return distrust(os.lstat(self._layout.root), self._layout.group)
        return ""

    def _make_root(self) -> None:
        """Make the directory again if it was deleted.

        Raises:
            OSError: It cannot be made, or others own it, or may write to it.
        """
        make_directory(self._layout.root)
        reason = self._replaced()
        if reason:
            raise PermissionError(errno.EACCES, f"the directory was replaced: {reason}", self._layout.root)

    @contextmanager
    def _root_lock(self) -> Iterator[None]:
        """Be the only one who makes or evicts segments.

        Raises:
            StoreTimeoutError: Another process keeps the lock.
        """
        path = f"{self._layout.root}/{LOCK_FILE}"
        descriptor, _ = open_file(path, os.O_RDWR | os.O_CREAT, self._layout.file_mode, self._layout.group)
        try:
            self._wait_for(descriptor)
            try:
                yield
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has a copy of it
        finally:
            os.close(descriptor)

    def _wait_for(self, descriptor: int) -> None:
        deadline = self.clock.monotonic() + self.timeout
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self.clock.monotonic() > deadline:
                    raise StoreTimeoutError(
                        f"another process has kept the Dram tier's directory locked for {self.timeout:g} s",
                        where=f"{self._layout.root}/{LOCK_FILE}",
                        fix="continue or end the engine that was stopped there",
                    ) from None
                self.clock.sleep(_POLL_SECONDS)
            else:
                return

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of all segments of all namespaces, in bytes."""
        found = {}
        for layout in namespaces(self._layout.root):
            for name, status in list_directory(directory_of(layout)):
                found[f"{directory_of(layout)}/{name}"] = status.st_size
        return found

    def _victims(self, sizes: dict[str, int]) -> list[Segment]:
        """Return the segments that may be evicted, the least recently used one first."""
        with self._lock:
            known = {segment.path: segment for segment in self._segments.values()}
        # The blocks of a private namespace belong to running requests, which would have to compute them again.
        private = {layout.base for layout in namespaces(self._layout.root) if layout.is_private}
        found = []
        for path in sizes:
            if path.rpartition(f"/{SEGMENTS}/")[0] not in private:
                with suppress(OSError, ValueError):
                    found.append(known.get(path) or Segment.open(path))
        now = int(self.clock.time() * 1e9)

        def rank(segment: Segment) -> tuple[int, int]:
            used, set_at = segment.age()
            return self._leases.rank(used, now), set_at

        return sorted(found, key=rank)


class _Filling:
    """The segment that new blocks go to; guarded by the tier's lock. It is locked while it has writers.

    Args:
        segment: The segment, locked.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._free, self._version = segment.free(), segment.version
        self._writers = 0
        self._has_lock = True

    def take(self, nbytes: int) -> int | None:
        """Return a free slot, after which ``done`` follows; None if there is none for so many bytes."""
        if not self._has_lock:
            if not self.segment.lock():
                return None
            self._has_lock = True
            if self.segment.version != self._version:  # others were here
                self._free = self.segment.free()
        if not self._free or nbytes > self.segment.slot_nbytes:
            self._release()
            return None
        self._writers += 1
        return self._free.pop()

    def done(self, unused: int | None) -> None:
        """Count a writer that does not write any more, and take back its slot if it has not used it."""
        if unused is not None:
            self._free.append(unused)
        self._writers -= 1
        self._release()

    def _release(self) -> None:
        if not self._writers:
            self._has_lock, self._version = False, self.segment.version
            self.segment.unlock()
