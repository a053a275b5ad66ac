"""Store blocks in memory that processes map: files of equal slots in a tmpfs, each with a table of the blocks in it.

All integers are little endian::

    offset            bytes  what
         0                8  magic
         8                8  bytes of a slot
        16                8  number of slots, n
        24               16  token: random bytes that change when the segment is emptied for other blocks
        40                8  changes: rises whenever a block becomes visible or the segment is emptied
        48                8  time of last use, in nanoseconds since the epoch: the latest of all blocks
        56                8  deletions: random bytes that change whenever a block is deleted
        64                8  when the time of last use was last set, in nanoseconds since the epoch; 0 in older ones
       128           72 * n  the table; of each slot: its state, the length of its key, the key padded with zeros
    next 4096  n * slot size  the slots; each holds a block as ``ucm.store.format`` describes it

A slot's state is written last, so that a block is whole or absent, whatever happens to its writer. Whoever writes to a
segment, or empties it, holds a lock on its file, which the system drops if that process dies. Readers need no lock:
they copy a block and then compare its key, its namespace and its checksums, which differ if it was overwritten.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import numpy as np

from ucm.store.base import BlockCorruptError, BlockForeignError, BlockKey, BlockMissingError
from ucm.store.format import MAX_KEY_BYTES, UNIT, aligned_buffer, decode, header_nbytes, scatter, verify
from ucm.store.posix.layout import owner_name, unlink_private
from ucm.store.posix.paths import list_directory, open_file, rename, status_of, unlink

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from ucm.store.authentication import Authenticator
    from ucm.store.base import BlockGeometry, Buffer
    from ucm.store.format import BlockHeader
    from ucm.store.posix.layout import Layout
    from ucm.store.tier import LeaseRules

SEGMENTS = "segments"
#: The file in a root that is locked by the process that makes or evicts segments.
LOCK_FILE = "SEGMENTS"
_MAGIC = b"UCMSEG1\n"
_HEADER = struct.Struct("<8sQQ16s")
_TOKEN_AT = 24
#: Which of the words of 8 bytes at the beginning these are.
_CHANGES, _USED, _DELETIONS, _SET = 5, 6, 7, 8
_TABLE_AT = 128
_KEY = [("begin", "<u8"), ("rest", f"V{MAX_KEY_BYTES - 8}")]
_ENTRY = np.dtype([("state", "u1"), ("length", "u1"), ("pad", "V6"), *_KEY])
_WHOLE, _DELETED = 1, 2
_ENTRY_BYTES = _ENTRY.itemsize
#: What precedes the key in the table's entry of a visible block, by the length of the key.
_WHOLE_KEY = [bytes([_WHOLE, nbytes, 0, 0, 0, 0, 0, 0]) for nbytes in range(MAX_KEY_BYTES + 1)]


def directory_of(layout: Layout) -> str:
    """Return the path of a namespace's segments."""
    return f"{layout.base}/{SEGMENTS}"


def segment_nbytes(slot_nbytes: int, slots: int) -> int:
    """Return the length of a segment's file."""
    return _slots_at(slots) + slots * slot_nbytes


class Segment:
    """An open segment. Opening fails with OSError or, if the file is no segment, with ValueError.

    Args:
        path: Its file.
        descriptor: The open file, which the segment closes.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._is_locked = False
        try:
            status = os.fstat(descriptor)
            size, self.inode = status.st_size, status.st_ino
            self.map = mmap.mmap(descriptor, size)
            header = self.map[: _HEADER.size].ljust(_HEADER.size)
        except (OSError, ValueError):
            os.close(descriptor)
            raise
        magic, self.slot_nbytes, self.slots, self.token = _HEADER.unpack(header)
        if magic != _MAGIC or size != segment_nbytes(self.slot_nbytes, self.slots):
            os.close(descriptor)
            raise ValueError("the file is no segment")
        self.memory = memoryview(self.map)
        self._words = self.memory[:_TABLE_AT].cast("Q")
        self._table = np.frombuffer(self.map, _ENTRY, self.slots, _TABLE_AT)
        self._begin = _slots_at(self.slots)
        # What `news` has told: of each slot the key, and the table's first two words, in which all changes show.
        self._seen, self._keys = (-1, -1), list[BlockKey | None]([None] * self.slots)
        words = np.frombuffer(self.map, np.uint64, self.slots * _ENTRY_BYTES // 8, _TABLE_AT)
        self._now = words.reshape(self.slots, -1)[:, :2]
        self._told = np.zeros_like(self._now)
        #: Until when this process has renewed each block, in nanoseconds since the epoch.
        self.renewed = np.zeros(self.slots, np.int64)

    @classmethod
    def open(cls, path: str) -> Segment:
        """Open an existing segment."""
        return cls(path, open_file(path, os.O_RDWR)[0])

    @classmethod
    def make(cls, layout: Layout, slot_nbytes: int, slots: int) -> Segment:
        """Make an empty segment, locked, with all of its memory.

        Raises:
            OSError: There is no room for it, or a directory is missing.
        """
        private = f"{layout.temporary}/{owner_name()}"
        descriptor = layout.new_file(private, os.O_RDWR)
        try:
            # All of it now: a write to a mapped page for which there is no room ends the process.
            try:
                _check_room(descriptor, segment_nbytes(slot_nbytes, slots))
                os.posix_fallocate(descriptor, 0, segment_nbytes(slot_nbytes, slots))
                os.pwrite(descriptor, _HEADER.pack(_MAGIC, slot_nbytes, slots, secrets.token_bytes(16)), 0)
            except OSError:
                os.close(descriptor)
                raise
            found = cls(private, descriptor)
        except OSError:
            unlink_private(private)
            raise
        found.lock()
        try:
            found.publish(layout)
        except OSError:
            found.close()
            unlink_private(private)
            raise
        return found

    def publish(self, layout: Layout) -> None:
        """Move the segment into its namespace under a new name, so that readers find it.

        Raises:
            OSError: It cannot be renamed.
        """
        path = f"{directory_of(layout)}/{secrets.token_hex(8)}"
        rename(self.path, path)
        self.path = path

    def lock(self) -> bool:
        """Become the only one who writes to it or empties it.

        Returns:
            Whether that succeeded: nobody did so far, and the file is still where it was.
        """
        if self._is_locked:
            return False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        self._is_locked = True
        with suppress(OSError):
            if status_of(self.path).st_ino == self.inode and self.is_current():
                return True
        self.unlock()
        return False

    def unlock(self) -> None:
        """Let others write to it or empty it."""
        if self._is_locked:
            self._is_locked = False
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def empty(self) -> None:
        """Drop all blocks; only with the lock."""
        self._table["state"] = 0
        self.token = secrets.token_bytes(16)
        self.map[_TOKEN_AT : _TOKEN_AT + 16] = self.token
        self._words[_USED] = 0
        self._words[_CHANGES] += 1

    def remove(self) -> None:
        """Delete the file; only with the lock. Its memory is free when nobody maps it, or after `give_back`.

        Raises:
            OSError: The file cannot be deleted.
        """
        unlink(self.path)
        self._table["state"] = 0

    def give_back(self) -> None:
        """Free the memory of a deleted segment although others map it.

        Whoever copies from it at that moment would need memory again, and end with SIGBUS if there is none.
        """
        with suppress(OSError):  # without the table, which others still read: it says that there is nothing
            self.map.madvise(mmap.MADV_REMOVE, self._begin, len(self.map) - self._begin)

    def news(self) -> tuple[list[tuple[BlockKey, int]], list[tuple[BlockKey, int]]]:
        """Return what changed since the last call: blocks that are no longer visible, and new ones.

        Returns:
            The keys and the slots of both.
        """
        gone: list[tuple[BlockKey, int]] = []
        new: list[tuple[BlockKey, int]] = []
        seen = self.version
        if seen != self._seen:  # it was read before the table, so that what changes from now on is told next time
            now = self._now.copy()
            for number in np.flatnonzero((now != self._told).any(axis=1)).tolist():
                old, key = self._keys[number], self._key(number)
                self._keys[number] = key
                if old is not None and old != key:
                    gone.append((old, number))
                if key is not None:
                    new.append((key, number))
            self._seen, self._told = seen, now
        return gone, new

    def untell(self) -> list[tuple[BlockKey, int]]:
        """Return the blocks that `news` has told; it will tell all visible ones again."""
        told = [(key, number) for number, key in enumerate(self._keys) if key is not None]
        self._seen, self._keys = (-1, -1), [None] * self.slots
        self._told = np.zeros_like(self._told)
        return told

    def age(self) -> tuple[int, int]:
        """Return what orders segments for eviction: the time of last use, and of equal ones, when it was last set."""
        return self._words[_USED], self._words[_SET]

    def use(self, used_ns: int, now: float, rules: LeaseRules) -> None:
        """Set the time of last use, unless it is later.

        Args:
            used_ns: The time of last use, in nanoseconds since the epoch; equal for all that is used in one span.
            now: The time, in seconds since the epoch.
            rules: What times mean: one that a wrong clock has set is replaced.
        """
        old, now_ns = self._words[_USED], int(now * 1e9)
        if (joined := rules.joined(old, used_ns, now_ns)) != old:
            self._words[_USED] = joined
        self._words[_SET] = now_ns

    def is_current(self) -> bool:
        """Return whether the segment holds what it held when its token was read, apart from single blocks."""
        return bool(self.map[_TOKEN_AT : _TOKEN_AT + 16] == self.token)

    def renew(self) -> None:
        """Read the token again."""
        self.token = self.map[_TOKEN_AT : _TOKEN_AT + 16]

    @property
    def version(self) -> tuple[int, int]:
        """What changes whenever a block becomes visible or is deleted."""
        return self._words[_CHANGES], self._words[_DELETIONS]

    def slot(self, number: int) -> Buffer:
        """Return the memory of a slot."""
        at = self._begin + number * self.slot_nbytes
        return self.memory[at : at + self.slot_nbytes]

    def holds(self, number: int, key: BlockKey) -> bool:
        """Return whether a slot's block is visible and has this key."""
        at, nbytes = _TABLE_AT + number * _ENTRY_BYTES, len(key)
        return bool(self.map[at : at + 8 + nbytes] == _WHOLE_KEY[nbytes] + key)

    def blocks(self, begins: NDArray[np.uint64] | None = None) -> Iterator[tuple[BlockKey, int]]:
        """Yield the key and the slot of every visible block.

        Args:
            begins: Only yield blocks whose first 8 bytes of the key, as an integer, are among these.
        """
        chosen = self._table["state"] == _WHOLE
        if begins is not None:
            chosen &= np.isin(self._table["begin"], begins)
        for number in np.flatnonzero(chosen).tolist():
            key = self._key(number)
            if key is not None:
                yield key, number

    def free(self) -> list[int]:
        """Return the slots without a visible block, the last one first."""
        found: list[int] = np.flatnonzero(self._table["state"] != _WHOLE)[::-1].tolist()
        return found

    def has_room(self, share: float) -> bool:
        """Return whether a share of the slots, and one at least, have no visible block."""
        return bool(np.count_nonzero(self._table["state"] != _WHOLE) >= max(1, share * self.slots))

    def show(self, number: int, key: BlockKey) -> list[tuple[BlockKey, int]]:
        """Make the block in a slot visible; only with the lock.

        Returns:
            The deleted block that was there, with its slot, if `news` has told of it but not of its end.
        """
        at = _TABLE_AT + number * _ENTRY_BYTES
        self.map[at + 8 : at + 8 + len(key)] = key
        self.map[at + 1] = len(key)
        self.map[at] = _WHOLE
        old, self._keys[number] = self._keys[number], key
        seen = self.version
        self._words[_CHANGES] += 1
        if seen == self._seen:  # so that `news` need not look through the table for it
            self._seen, self._told[number] = self.version, self._now[number]
        return [] if old is None else [(old, number)]

    def hide(self, number: int, key: BlockKey) -> bool:
        """Delete a block; return False if it is not there any more. The memory serves another block."""
        if not self.holds(number, key):
            return False
        self.map[_TABLE_AT + number * _ENTRY_BYTES] = _DELETED
        # Two processes without the lock could give a counter the same value.
        self._words[_DELETIONS] = secrets.randbits(64)
        return True

    def file_of(
        self,
        number: int,
        key: BlockKey,
        authenticator: Authenticator | None = None,
        *,
        namespace: str | None = None,
        geometry: BlockGeometry | None = None,
        any_key: bool = False,
    ) -> tuple[Buffer, BlockHeader]:
        """Return a copy of a stored block, checked against its own header, and this; see ``verify``.

        Raises:
            BlockMissingError: The slot has another block by now.
            BlockCorruptError: Bytes were changed.
            BlockForeignError: The block has another key than the table says, another namespace or geometry than
                expected, or another format version.
        """
        slot = self.slot(number)
        try:
            nbytes = decode(bytes(slot[: min(header_nbytes(bytes(slot[:UNIT])), slot.nbytes)])).file_nbytes
            content = aligned_buffer(min(nbytes, slot.nbytes))
            scatter(slot[: content.nbytes], [content])
            header, content = verify(
                content, key, authenticator, namespace=namespace, geometry=geometry, any_key=any_key
            )
        except (BlockCorruptError, BlockForeignError) as error:
            if not (self.is_current() and self.holds(number, key)):
                raise BlockMissingError(f"block {key.hex()} was deleted meanwhile", where=self.path) from error
            error.where = self.path
            raise
        return content, header

    def close(self) -> None:
        """Close the file and drop the lock; the memory stays mapped while it is in use."""
        if self._descriptor >= 0:
            self.unlock()  # the map keeps a copy of the descriptor
            os.close(self._descriptor)
            self._descriptor = -1

    def _key(self, number: int) -> BlockKey | None:
        """Return the key of the block in a slot; None if no block is visible there."""
        at = _TABLE_AT + number * _ENTRY_BYTES
        entry = self.map[at : at + _ENTRY_BYTES]
        return BlockKey(entry[8 : 8 + entry[1]]) if entry[0] == _WHOLE else None


def segments(layout: Layout) -> Iterator[Segment]:
    """Open the segments of a namespace one by one, skipping other files and those that vanish.

    Raises:
        OSError: The namespace cannot be listed.
    """
    for name, _ in list_directory(directory_of(layout)):
        with suppress(ValueError, OSError), closing(Segment.open(f"{directory_of(layout)}/{name}")) as found:
            yield found


def check_slot(path: str, number: int, key: BlockKey, authenticator: Authenticator | None = None) -> BlockHeader:
    """Check a block against its own header and, if it is authenticated by this key, the tags."""
    with _opened(path, key) as segment:
        return segment.file_of(number, key, authenticator, any_key=True)[1]


def delete_slot(path: str, number: int, key: BlockKey) -> bool:
    """Delete a block; return False if it is not there any more."""
    with suppress(BlockMissingError), _opened(path, key) as segment:
        return segment.hide(number, key)
    return False


def _opened(path: str, key: BlockKey) -> closing[Segment]:
    try:
        return closing(Segment.open(path))
    except (OSError, ValueError) as error:
        raise BlockMissingError(f"block {key.hex()} is gone: {error}", where=path) from error


def delete_blocks(layout: Layout, keys: Iterable[BlockKey]) -> int:
    """Delete blocks of a namespace and return how many there were; their memory serves its next ones.

    Raises:
        OSError: The namespace cannot be listed.
    """
    wanted = set(keys)
    begins = np.array([int.from_bytes(key[:8], "little") for key in wanted], np.uint64)
    return sum(
        segment.hide(number, key)
        for segment in segments(layout)
        for key, number in segment.blocks(begins)
        if key in wanted
    )


def remove_empty(layout: Layout) -> None:
    """Delete the segments of a namespace that hold no block and that nobody writes to.

    Raises:
        OSError: The namespace cannot be listed.
    """
    for segment in segments(layout):
        if segment.lock() and len(segment.free()) == segment.slots:
            with suppress(OSError):
                segment.remove()


def _check_room(descriptor: int, nbytes: int) -> None:
    """Raise before anything is written if the file system has too little room."""
    system = os.fstatvfs(descriptor)
    if system.f_blocks and system.f_bavail * system.f_frsize < nbytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _slots_at(slots: int) -> int:
    return -(-(_TABLE_AT + slots * _ENTRY_BYTES) // UNIT) * UNIT
