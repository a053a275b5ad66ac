"""Store blocks in memory that all engines of a user on a host share; see ``ucm.store.segment``.

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
from threading import Lock
from typing import TYPE_CHECKING

from ucm.store.dram import prepare_dram
from ucm.store.errors import BlockForeignError, BlockMissingError, StoreError, StoreFullError
from ucm.store.format import UNIT
from ucm.store.posix.files import store_error
from ucm.store.posix.layout import Layout, check_namespace, is_stale, namespaces, unlink_private
from ucm.store.posix.paths import list_directory, make_directory, open_file, status_of
from ucm.store.posix.space import USAGE_FILE
from ucm.store.segment import SEGMENTS, Segment, directory_of, gather, scatter, segment_nbytes
from ucm.store.tier import BlockWriter, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ucm.store.base import BlockKey, BlockTransfer, Buffer, TierStats
    from ucm.store.format import HeaderCodec
    from ucm.store.tier import Outcome, TierOptions, TierPlace

#: A segment has about this share of the capacity, and at most so many bytes, or else one block.
_SHARE, _MOST_NBYTES = 64, 1 << 30
#: A directory's time of change may stand still for so long, in nanoseconds.
_TICK = 50_000_000
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

    def __init__(self, options: TierOptions, place: TierPlace) -> None:
        del options
        config = place.config
        super().__init__("dram", timeout=config.stuck_seconds)
        root, self._capacity = prepare_dram(config)
        self._layout = Layout(root, check_namespace(place.namespace))
        self._layout.keep_identity()
        self._codec = place.codec
        self._touch_seconds = config.touch_seconds
        self._stale_seconds = config.stale_seconds
        self._lock = Lock()
        self._index: dict[BlockKey, tuple[Segment, int]] = {}
        self._segments: dict[int, Segment] = {}  # by inode
        self._listed = -1  # the directory's time of change when it was listed, if that can be relied upon
        self._filling: _Filling | None = None
        self._used: int | None = None
        with suppress(OSError):
            self._used = sum(self._sizes().values())

    def contains(self, keys: Sequence[BlockKey], deadline: float) -> list[bool]:
        """Look the keys up in the tables of all segments."""
        del deadline
        self._refresh()
        return [self._place(key) is not None for key in keys]

    def read_many(self, blocks: Sequence[BlockTransfer], deadline: float) -> list[Outcome]:
        """Copy layer slices out of the segments and verify the copies."""
        del deadline
        codec, now = self._known_codec(), time.monotonic()
        used: set[Segment] = set()
        outcomes = [
            self._read(codec, block, place, now, used)
            for block, place in zip(blocks, self._places([block.key for block in blocks]), strict=True)
        ]
        for segment in used:
            segment.use()
        return outcomes

    def read_file(self, key: BlockKey, deadline: float) -> Buffer:
        """Return a copy of a stored block, verified by its own header."""
        del deadline
        (place,) = self._places([key])
        if place is None:
            raise self._missing(key)
        try:
            content = place[0].file_of(place[1], key)
        except StoreError as error:
            raise self._refused(place, key, error) from error
        refusal = None if self._codec is None else self._codec.check(content, key)
        if refusal is not None:
            raise self._refused(place, key, refusal)
        return content

    def expect(self, keys: Sequence[BlockKey], file_nbytes: int) -> None:
        """Learn which blocks others have stored meanwhile."""
        del keys, file_nbytes
        with suppress(StoreError):  # the writer reports it
            self._refresh()

    def writer(self, key: BlockKey, file_nbytes: int) -> BlockWriter | None:
        """Return a writer into a free slot; None if the block exists."""
        if self._place(key) is not None:
            return None
        with self._lock:
            filling = self._filling
            if filling is None or not filling.takes(file_nbytes):
                if filling is not None:
                    filling.end()
                try:
                    filling = self._filling = self._next(-(-file_nbytes // UNIT) * UNIT)
                except OSError as error:
                    self._filling = None
                    raise store_error(error, self._layout.base) from error
            return _SlotWriter(self, filling, filling.take(), key)

    def touch(self, key: BlockKey) -> None:
        """Renew the time of last use of a block's segment."""
        place = self._place(key)
        if place is not None:
            place[0].use()

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
            self._index.clear()

    def show(self, filling: _Filling, number: int, key: BlockKey) -> None:
        """Make a written block visible, unless another thread stored it meanwhile."""
        with self._lock:
            if self._place(key) is None:
                filling.segment.show(number, key)
                filling.segment.touched[number] = time.monotonic()
                self._index[key] = filling.segment, number
            else:
                filling.free.append(number)
            filling.done()

    def drop(self, filling: _Filling, number: int) -> None:
        """Use the slot of a dropped block for another one."""
        with self._lock:
            filling.free.append(number)
            filling.done()

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
        used: set[Segment],
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
            return self._refused(place, key, codec.refusal_of(header, key))
        used.add(segment)
        old = now - float(segment.touched[number]) > self._touch_seconds
        if old:
            segment.touched[number] = now
        return old

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
                if segment.seen != segment.changes:
                    segment.seen = segment.changes
                    if not segment.is_current():
                        self._forget(segment)
                        segment.renew()
                    self._index.update((key, (segment, number)) for key, number in segment.blocks())

    def _list(self) -> None:
        path = directory_of(self._layout)
        try:
            changed = status_of(path).st_mtime_ns
        except FileNotFoundError:
            changed = 0
        if changed == self._listed:
            return
        self._listed = changed if time.time_ns() - changed > _TICK else -1
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
            with suppress(OSError, ValueError):  # it vanished, or is no segment
                self._segments[inode] = Segment.open(where)

    def _forget(self, segment: Segment) -> None:
        for key in [key for key, (found, _) in self._index.items() if found is segment]:
            del self._index[key]

    def _next(self, slot_nbytes: int) -> _Filling:
        """Return a segment with free slots, locked.

        Raises:
            StoreFullError: All segments are being written to, or the block has more bytes than the tier may use.
            OSError: The directory cannot be used.
        """
        self._remove_leftovers()
        for segment in self._segments.values():
            if segment.slot_nbytes == slot_nbytes and segment.is_roomy() and segment.lock():
                return _Filling(segment)
        slots = max(1, min(self._capacity // _SHARE, _MOST_NBYTES) // slot_nbytes)
        nbytes = segment_nbytes(slot_nbytes, slots)
        if nbytes > self._capacity:
            raise StoreFullError(
                f"a block takes {nbytes} bytes and the Dram tier may use {self._capacity}",
                where=self._layout.root,
                fix="raise dram_capacity",
            )
        with self._root_lock():
            sizes = self._sizes()
            self._used = sum(sizes.values())
            for victim in self._victims(sizes):
                if self._used + nbytes <= self._capacity and (made := self._make(slot_nbytes, slots)):
                    self._used += nbytes
                    return self._fill(made)
                if victim is None or not victim.lock():
                    continue
                self.counters.evicted(victim.slots - len(victim.free()))
                self._forget(victim)
                if self._used <= self._capacity and (victim.slot_nbytes, victim.slots) == (slot_nbytes, slots):
                    victim.empty()
                    if not victim.path.startswith(f"{self._layout.base}/"):
                        victim.publish(self._layout)
                    return self._fill(victim)
                self._used -= os.stat(victim.path).st_size  # noqa: PTH116 - a text
                victim.remove()
        raise StoreFullError(
            f"the {self._capacity} bytes that the Dram tier may use are all being written to",
            where=self._layout.root,
            fix="raise dram_capacity",
        )

    def _make(self, slot_nbytes: int, slots: int) -> Segment | None:
        """Make a segment; None if there is no room for it."""
        try:
            return Segment.make(self._layout, slot_nbytes, slots)
        except OSError as error:
            if error.errno in _FULL:
                return None
            raise

    def _fill(self, segment: Segment) -> _Filling:
        self._segments[segment.inode] = segment
        return _Filling(segment)

    @contextmanager
    def _root_lock(self) -> Iterator[None]:
        """Be the only one who makes or evicts segments."""
        path = f"{self._layout.root}/{USAGE_FILE}"
        try:
            descriptor, _ = open_file(path, os.O_RDWR | os.O_CREAT, self._layout.file_mode, self._layout.group)
        except FileNotFoundError:
            make_directory(self._layout.root)
            descriptor, _ = open_file(path, os.O_RDWR | os.O_CREAT, self._layout.file_mode, self._layout.group)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _remove_leftovers(self) -> None:
        """Delete the segments that dead processes did not finish."""
        for name, status in list_directory(self._layout.temporary):
            if is_stale(name, time.time() - status.st_mtime, self._stale_seconds):
                unlink_private(f"{self._layout.temporary}/{name}")

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of all segments of all namespaces, in bytes."""
        found = {}
        for layout in namespaces(self._layout.root):
            for name, status in list_directory(directory_of(layout)):
                found[f"{directory_of(layout)}/{name}"] = status.st_size
        return found

    def _victims(self, sizes: dict[str, int]) -> Iterator[Segment | None]:
        """Yield the segments, the least recently used one first, around a first and a last None."""
        yield None
        known = {segment.path: segment for segment in self._segments.values()}
        private = {layout.base for layout in namespaces(self._layout.root) if layout.is_private} - {self._layout.base}
        found = []
        for path in sizes:
            if path.rpartition(f"/{SEGMENTS}/")[0] not in private:
                with suppress(OSError, ValueError):
                    found.append(known.get(path) or Segment.open(path))
        found.sort(key=lambda segment: segment.used)
        try:
            for segment in found:
                yield segment
            yield None
        finally:
            for segment in found:
                if segment.inode not in self._segments:
                    segment.close()

    def _known_codec(self) -> HeaderCodec:
        if self._codec is None:
            raise ValueError("the store was opened without a geometry: it looks up and prefetches, no more")
        return self._codec


class _Filling:
    """The segment that new blocks go to; guarded by the tier's lock. Its own lock is kept until no writer is left.

    Args:
        segment: The segment, locked.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.free = segment.free()
        self._writers = 0
        self._ended = False

    def takes(self, nbytes: int) -> bool:
        """Return whether there is a slot for a block."""
        return bool(self.free) and nbytes <= self.segment.slot_nbytes

    def take(self) -> int:
        """Return a free slot; ``done`` follows."""
        self._writers += 1
        return self.free.pop()

    def done(self) -> None:
        """Count a writer that does not write any more."""
        self._writers -= 1
        if self._ended and not self._writers:
            self.segment.unlock()

    def end(self) -> None:
        """Take no more blocks."""
        self._ended = True
        if not self._writers:
            self.segment.unlock()


class _SlotWriter(BlockWriter):
    """Writes a block into a slot.

    Args:
        tier: The tier.
        filling: The segment.
        number: The slot.
        key: The block's key.
    """

    def __init__(self, tier: DramTier, filling: _Filling, number: int, key: BlockKey) -> None:
        self._tier, self._filling, self._number, self._key = tier, filling, number, key
        self._slot = filling.segment.slot(number)

    def write(self, buffers: Sequence[Buffer | bytearray], offset: int, nbytes: int) -> None:
        """Copy bytes into the slot."""
        gather(buffers, self._slot[offset : offset + nbytes])

    def pause(self) -> None:
        """Do nothing: no resources are held."""

    def commit(self) -> None:
        """Make the block visible."""
        self._tier.show(self._filling, self._number, self._key)

    def abort(self) -> None:
        """Give the slot to another block."""
        self._tier.drop(self._filling, self._number)
