"""Host memory that an engine's processes share: blocks are staged there, verified, and copied from there.

The scheduler's process makes one anonymous file of memory. It needs no name in a file system and no room in
``/dev/shm``, takes memory only where it was written, and is gone with the last process that has it open. A worker opens
it by its address, ``/proc/<pid>/fd/<fd>``, and answers by writing its record into it; so the scheduler learns which
ranks share its host, and what their blocks look like.

    offset                    what
    0                         the address' token, so that nobody takes another file for this one
    4096 + 65536 * rank       the record of a rank
    …                         rows: room for one block of one KV-cache group, the parts of all ranks one after the other
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import stat
import struct
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ucm.store.errors import StoreError, StoreUnavailableError
from ucm.store.format import checksum
from ucm.store.pool import Pool
from ucm.store.tasks import TransferTask

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ucm.store.base import BlockKey, BlockTransfer, Buffer, Task, TaskResult

PAGE = 4096
#: Room for a rank's record.
RECORD_BYTES = 64 << 10
#: The length of a record, and its checksum.
_RECORD = struct.Struct("<QQ")
#: Without a limit of the operator's, this part of the host's memory, and no more than so much.
_SHARE, _MOST_BYTES = 8, 16 << 30
#: Blocks that nobody has used for so long give their memory back.
IDLE_SECONDS = 120.0
#: Blocks of this age are read again when they are wanted, so that the tiers see that they are in use.
STALE_SECONDS = 600.0
#: So much memory is taken ahead of its first use: a page's first use costs more than reading the page.
AHEAD_BYTES = 128 << 20
_MADV_POPULATE_WRITE = 23
#: Threads that copy out of the slab in each worker.
COPY_THREADS = 2
#: Shards from this size on are copied by numpy, which lets other threads run meanwhile; smaller ones faster without it.
_LARGE_BYTES = 32 << 10


def default_bytes() -> int:
    """How much may be staged unless the operator says: an eighth of the host's, or the container's, memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(total // _SHARE, _MOST_BYTES)


@dataclass(frozen=True, slots=True)
class SlabAddress:
    """Where a slab is found, by processes of the same host and user.

    Args:
        boot: The running system's own name.
        pid: The owner's process.
        descriptor: The open file in it.
        inode: The file's.
        token: What stands at its beginning.
    """

    boot: str
    pid: int
    descriptor: int
    inode: int
    token: bytes


class State(Enum):
    """Of a row."""

    READING = "reading"  #: somebody fills it
    WHOLE = "whole"  #: verified
    FAILED = "failed"  #: nobody finds it any more


class Row:
    """Room for one block, with the parts of all ranks.

    Args:
        number: Its place.
        name: The KV-cache group, and the block's key.
    """

    __slots__ = ("name", "number", "read_at", "state", "tier", "users")

    def __init__(self, number: int, name: tuple[int, BlockKey]) -> None:
        self.number = number
        self.name = name
        self.state = State.READING
        self.tier = ""  #: where it came from
        self.users = 2  #: who wanted it first, and who fills it
        self.read_at = time.monotonic()


class Slab:
    """The owner's side. All methods may be called from any thread.

    Args:
        nbytes: How much may be staged.
        ranks: How many workers write a record.
    """

    def __init__(self, nbytes: int, ranks: int) -> None:
        self.changed = threading.Condition()
        self._begin = PAGE + ranks * RECORD_BYTES
        self._ranks = ranks
        self._nbytes = self._begin + max(PAGE, nbytes // PAGE * PAGE)
        self._file = os.memfd_create("ucm-staging")
        os.ftruncate(self._file, self._nbytes)
        self._map = mmap.mmap(self._file, self._nbytes)
        self._memory = memoryview(self._map)
        token = secrets.token_bytes(16)
        self._memory[: len(token)] = token
        self.address = SlabAddress(_boot(), os.getpid(), self._file, os.fstat(self._file).st_ino, token)
        self._row_bytes = 0
        self._rows = 0
        self._fresh = 0  # rows from here on were never used
        self._populated = 0  # rows from here on have no memory yet
        self._free: list[int] = []
        self._table: dict[tuple[int, BlockKey], Row] = {}
        self._unused: OrderedDict[Row, float] = OrderedDict()

    def records(self) -> dict[int, dict[str, Any]]:
        """What the ranks have written until now."""
        found = {}
        for rank in range(self._ranks):
            at = PAGE + rank * RECORD_BYTES
            length, expected = _RECORD.unpack_from(self._memory, at)
            if 0 < length <= RECORD_BYTES - _RECORD.size:
                text = bytes(self._memory[at + _RECORD.size : at + _RECORD.size + length])
                if checksum(text) == expected:
                    found[rank] = json.loads(text)
        return found

    def lay_out(self, row_bytes: int) -> None:
        """Say how large a row is; called once."""
        self._row_bytes = -(-row_bytes // PAGE) * PAGE
        self._rows = (self._nbytes - self._begin) // self._row_bytes

    def offset(self, row: Row) -> int:
        """Where a row begins."""
        return self._begin + row.number * self._row_bytes

    def memory(self, row: Row, share: int, sizes: Sequence[int]) -> list[Buffer]:
        """The memory of a rank's shards of a block.

        Args:
            row: The block's.
            share: Where the rank's part begins within it.
            sizes: The shards', in bytes.
        """
        at = self.offset(row) + share
        found = []
        for size in sizes:
            found.append(self._memory[at : at + size])
            at += size
        return found

    def holds(self, group: int, keys: Sequence[BlockKey]) -> int:
        """How many of the first blocks are there, verified."""
        table, oldest = self._table, time.monotonic() - STALE_SECONDS
        for count, key in enumerate(keys):
            row = table.get((group, key))
            if row is None or row.state is not State.WHOLE or row.read_at < oldest:
                return count
        return len(keys)

    def hold(self, group: int, keys: Sequence[BlockKey]) -> list[Row] | None:
        """Keep blocks that are there, until ``release``; None if one is not."""
        with self.changed:
            if self.holds(group, keys) < len(keys):
                return None
            found = [self._table[group, key] for key in keys]
            for row in found:
                self._use(row)
            return found

    def claim(self, group: int, key: BlockKey) -> tuple[Row, bool] | None:
        """A block's row, to be given back by ``release``, and whether the caller is to fill it; None without room.

        Who fills it says how that went by ``filled`` or ``failed``; until then the row is nobody else's.
        """
        name = (group, key)
        with self.changed:
            row = self._table.get(name)
            if row is not None and not row.users and time.monotonic() - row.read_at > STALE_SECONDS:
                self._forget(row)
                row = None
            if row is not None:
                self._use(row)
                return row, False
            number = self._take()
            if number is None:
                return None
            row = self._table[name] = Row(number, name)
            return row, True

    def filled(self, row: Row, tier: str) -> None:
        """A claimed row has its block, verified, of all ranks."""
        with self.changed:
            row.state, row.tier = State.WHOLE if self._table.get(row.name) is row else State.FAILED, tier
            self._drop(row)
            self.changed.notify_all()

    def failed(self, row: Row, *, at_rest: bool = True) -> None:
        """A claimed row cannot be filled; unless it is ``at_rest``, somebody may write to it for ever."""
        with self.changed:
            row.state = State.FAILED
            if self._table.get(row.name) is row:
                del self._table[row.name]
            if at_rest:
                self._drop(row)
            self.changed.notify_all()

    def release(self, rows: Iterable[Row]) -> None:
        """Let blocks go; they stay until the room is needed, or nobody wants them for a while."""
        with self.changed:
            for row in rows:
                self._drop(row)

    def clear(self) -> None:
        """Let nobody find what was staged until now; who holds some of it may still use it."""
        with self.changed:
            for row in list(self._unused):
                self._forget(row)
            for row in self._table.values():
                row.state = State.FAILED if row.state is State.WHOLE else row.state
            self._table.clear()

    def trim(self) -> None:
        """Give the memory of blocks back that nobody has used for a while; takes time."""
        limit = time.monotonic() - IDLE_SECONDS
        while True:
            with self.changed:
                row = next(iter(self._unused), None)
                if row is None or self._unused[row] > limit:
                    return
                del self._unused[row], self._table[row.name]
            with suppress(OSError, ValueError):
                self._map.madvise(mmap.MADV_REMOVE, self.offset(row), self._row_bytes)
            with self.changed:
                heappush(self._free, row.number)

    def populate(self) -> None:
        """Take memory for some rows beyond those that were used; takes time, so call it beforehand."""
        with self.changed:
            begin = max(self._fresh, self._populated)
            end = min(self._rows, self._fresh + AHEAD_BYTES // max(1, self._row_bytes))
            self._populated = max(begin, end)
        for number in range(begin, end):
            with suppress(OSError):  # older systems take it as it is used
                self._map.madvise(_MADV_POPULATE_WRITE, self._begin + number * self._row_bytes, self._row_bytes)

    def close(self) -> None:
        """No more workers find it; its memory goes when nobody reads or writes it any more."""
        os.close(self._file)

    def _use(self, row: Row) -> None:
        if not row.users:
            del self._unused[row]
        row.users += 1

    def _drop(self, row: Row) -> None:
        row.users -= 1
        if row.users:
            return
        if row.state is State.WHOLE:
            self._unused[row] = time.monotonic()
        else:
            heappush(self._free, row.number)

    def _forget(self, row: Row) -> None:
        del self._unused[row], self._table[row.name]
        heappush(self._free, row.number)

    def _take(self) -> int | None:
        if not self._free and self._fresh == self._rows:
            row = next(iter(self._unused), None)
            if row is None:
                return None
            self._forget(row)
        if self._free:
            return heappop(self._free)
        self._fresh += 1
        return self._fresh - 1


class CopyTask(TransferTask):
    """Copies out of a slab under way."""


class SlabReader:
    """A worker's side: copies blocks out of the slab, in threads of its own.

    The slab stays mapped. The first copy of a row is as fast as reading it from the file, since the kernel maps its
    pages; every later one runs at the speed of memory, and rows are used again and again.
    """

    def __init__(self) -> None:
        self._memory: memoryview | None = None
        self._pool = Pool("ucm-copy", COPY_THREADS)

    @property
    def attached(self) -> bool:
        """Whether there is a slab."""
        return self._memory is not None

    def attach(self, address: SlabAddress, rank: int, record: dict[str, Any]) -> bool:
        """Open a slab, and write this rank's record into it.

        Returns:
            Whether it is there: on another host it is not.
        """
        text = json.dumps(record).encode()
        if len(text) > RECORD_BYTES - _RECORD.size:
            return False
        path = f"/proc/{address.pid}/fd/{address.descriptor}"
        try:
            status = os.stat(path)  # noqa: PTH116 - of the file that it stands for
            if address.boot != _boot() or not stat.S_ISREG(status.st_mode) or status.st_ino != address.inode:
                return False
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.pread(file, len(address.token), 0) != address.token:
                    return False
                at = PAGE + rank * RECORD_BYTES
                os.pwrite(file, text, at + _RECORD.size)
                os.pwrite(file, _RECORD.pack(len(text), checksum(text)), at)
                self._memory = memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ))
            finally:
                os.close(file)
        except OSError:
            return False
        return True

    def load(self, blocks: Sequence[BlockTransfer], places: Sequence[int], tiers: Sequence[str]) -> Task:
        """Copy blocks into memory.

        Args:
            blocks: The memory.
            places: Of each, where its first wanted shard begins in the slab.
            tiers: Of each, where it came from.
        """
        task = CopyTask(len(blocks))
        step = -(-len(blocks) // COPY_THREADS) or 1
        self._pool.submit(
            partial(self._copy, task, blocks[at : at + step], places[at : at + step], tiers[at : at + step])
            for at in range(0, len(blocks), step)
        )
        return task

    def check(self, task: Task) -> bool:
        """Whether a copy is finished."""
        return _copy(task).is_finished()

    def wait(self, task: Task) -> TaskResult:
        """Wait for a copy."""
        return _copy(task).result()

    def close(self) -> None:
        """Finish what was asked for."""
        self._pool.close()
        self._memory = None

    def _copy(
        self, task: TransferTask, blocks: Sequence[BlockTransfer], places: Sequence[int], tiers: Sequence[str]
    ) -> None:
        for block, place, tier in zip(blocks, places, tiers, strict=True):
            nbytes = sum(shard.nbytes for shard in block.shards)
            failure: StoreError | None = None
            try:
                if self._memory is None:
                    failure = StoreUnavailableError("the slab is not there")
                elif place + nbytes > self._memory.nbytes:
                    failure = StoreUnavailableError("the slab ends before the block does")
                else:
                    _copy_out(self._memory, place, block.shards)
            except Exception as error:  # noqa: BLE001 - whatever it is, the waiting caller must hear of it
                failure = StoreError(f"{type(error).__name__}: {error}")
            if failure is None:
                task.succeeded(block.key, tier, nbytes)
            else:
                task.failed(block.key, failure)


def _copy_out(memory: Buffer, at: int, shards: Sequence[Buffer]) -> None:
    for shard in shards:
        if shard.nbytes < _LARGE_BYTES:
            shard.cast("B")[:] = memory[at : at + shard.nbytes]
        else:
            np.copyto(np.frombuffer(shard, np.uint8), np.frombuffer(memory, np.uint8, shard.nbytes, at))
        at += shard.nbytes


def _copy(task: Task) -> CopyTask:
    if not isinstance(task, CopyTask):
        raise TypeError(f"{task!r} is not a task of the slab's")
    return task


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
