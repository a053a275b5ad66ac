"""Share host memory between an engine's processes: blocks are staged there, verified, and copied from there.

The scheduler process makes one anonymous memory file. It needs no name in a file system and no room in ``/dev/shm``,
uses memory only where it was written, and disappears with the last process that has it open. A worker opens it by its
address, ``/proc/<pid>/fd/<fd>``, and answers by writing its record into it. So the scheduler learns which ranks share
its host, and the format of their blocks.

    offset                    content
    0                         the address's token, so that a process detects a wrong file
    4096 + 65536 * rank       the record of a rank, and in the last 4096 bytes of its room what it reports while it runs
    …                         rows: room for one block of one KV-cache group, the parts of all ranks one after the other

If the only worker is in the scheduler's process, the rows are private memory instead. There the system grants huge
pages, whose first use takes a quarter of the time; it rarely grants them to shared memory.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import stat
import struct
import weakref
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

from ucm.clock import SYSTEM
from ucm.store.base import StoreUnavailableError, Task, TransferTask
from ucm.store.format import checksum, scatter
from ucm.store.guard import unexpected
from ucm.store.health import Pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ucm.clock import Clock, Queue
    from ucm.store.base import BlockKey, BlockTransfer, Buffer

PAGE = 4096
#: The size reserved for a rank's record and report, in bytes.
RECORD_BYTES = 64 << 10
#: The length of a record, and its checksum.
_RECORD = struct.Struct("<QQ")
#: The offset of a rank's report from its record.
_REPORT_AT = RECORD_BYTES - PAGE
#: The default limit: host memory divided by ``_SHARE``, at most ``_MOST_BYTES``.
_SHARE, _MOST_BYTES = 8, 16 << 30
#: Of the limit, the largest part that is touched at the start; and the bytes that are kept while no block needs them.
_TOUCHED_SHARE, _KEPT_BYTES = 8, 40 << 20
#: Memory that was not needed for this many seconds, at most twice as many, is given back to the system. The first use
#: of a page costs up to ten times as much as copying it, which a pause between requests should not.
KEEP_SECONDS = 300.0
#: Seconds after which a block is read again when it is wanted, so that the tiers see that it is in use.
STALE_SECONDS = 600.0
_MADV_POPULATE_WRITE = 23
#: Without ``MAP_NORESERVE``, which Python does not name, a system may refuse a limit that exceeds its free memory.
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
#: Threads that copy out of the slab in each worker.
COPY_THREADS = 2


def default_bytes() -> int:
    """Return the default limit of staged bytes: an eighth of the memory of the host or the container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return min(total // _SHARE, _MOST_BYTES)


def jobs_of(jobs: Queue[Callable[[], None] | None], slab: Slab | None) -> Iterator[Callable[[], None]]:
    """Yield queued jobs up to a None; beside them, the slab gives back what it does not need."""
    while True:
        if slab is not None:
            slab.trim()
        try:
            job = jobs.get(timeout=KEEP_SECONDS)
        except Empty:
            continue
        if job is None:
            return
        yield job
        del job  # with the memory that it refers to


@dataclass(frozen=True, slots=True)
class SlabAddress:
    """The address of a slab, for processes of the same host and user.

    Args:
        pid: The owner's process id.
        descriptor: The file's descriptor in the owner's process.
        token: The bytes at the beginning of the file, by which another host's or process's is told from it.
        begin: The offset of the rows in the file.
    """

    pid: int
    descriptor: int
    token: bytes
    begin: int


class State(Enum):
    """The state of a row."""

    READING = "reading"  #: being filled
    WHOLE = "whole"  #: verified
    FAILED = "failed"  #: no longer found by lookups


_WHOLE = State.WHOLE  # in Python 3.11 an attribute of an Enum costs a call


@dataclass(slots=True, eq=False)
class Row:
    """Room for one block, with the parts of all ranks.

    Args:
        number: The row's index in the slab.
        name: The KV-cache group, and the block's key.
        read_at: When its thread began to fill it, in seconds of the slab's clock.
    """

    number: int
    name: tuple[int, BlockKey]
    read_at: float
    state: State = State.READING
    tier: str = ""  #: the tier it was read from
    users: int = 2  #: the first process that wanted the block, and the thread that fills it


class Slab:
    """The owner's side of a slab. All methods may be called from any thread.

    The first use of a page costs more than reading its content from a file, and takes a processor from the model. So a
    part of the memory is touched at the start, and a row that has memory is used before one that has none: first those
    that are free, the last one freed first, then that of the block that was unused for longest. Only when all are in
    use does the slab grow; but for a small part, what it did not need for a while is given back.

    Args:
        nbytes: Bytes that may be staged.
        ranks: The number of workers that write a record.
        longest: The bytes of the longest request; so much memory is touched now, but no more than an eighth of the
            limit.
        private: Whether no worker is in another process. Where the system refuses so much private memory, as it may
            under a limit of a process's data or with strict overcommit, the rows are shared all the same.
        clock: What time passes by.
    """

    def __init__(
        self, nbytes: int, ranks: int, longest: int = 0, *, private: bool = False, clock: Clock = SYSTEM
    ) -> None:
        self._clock = clock
        self.changed = clock.condition()
        self._ranks = ranks
        self._nbytes = max(PAGE, nbytes // PAGE * PAGE)
        self._file = os.memfd_create("ucm-staging")
        begin = (1 + ranks) * RECORD_BYTES  # also where a page has 64 KiB
        rows = private_memory(self._nbytes) if private else None
        self._give_back = mmap.MADV_REMOVE if rows is None else mmap.MADV_DONTNEED
        os.ftruncate(self._file, begin + self._nbytes if rows is None else begin)
        self._head = mmap.mmap(self._file, begin)
        if rows is None:
            rows = _in_huge_pages(mmap.mmap(self._file, self._nbytes, offset=begin))
        self._memory = memoryview(rows)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(rows))
        token = secrets.token_bytes(16)
        self._head[: len(token)] = token
        self.address = SlabAddress(os.getpid(), self._file, token, begin)
        _of_this_process[token] = self
        self._touched_bytes = min(longest, nbytes // _TOUCHED_SHARE)
        self._advise(_MADV_POPULATE_WRITE, 0, self._touched_bytes)
        self._row_bytes = 0
        self._rows = 0
        self._kept = 0  # rows whose memory is kept
        self._fresh = 0  # index of the first row that was never used
        self._free: deque[int] = deque()  # rows with memory, the last one freed at the end
        self._bare: list[int] = []  # used rows whose memory was given back
        self._table: dict[tuple[int, BlockKey], Row] = {}
        self._unused: OrderedDict[Row, None] = OrderedDict()
        self._used = self._most = 0  # rows in use, and the most of them since the last trim
        self._trim_at = clock.monotonic() + KEEP_SECONDS

    def records(self) -> dict[int, dict[str, Any]]:
        """Return the records that ranks have written so far, by rank."""
        return self._written(0, _REPORT_AT)

    def reports(self) -> dict[int, dict[str, Any]]:
        """Return the last report of each rank, by rank; one that is being written is left out."""
        return self._written(_REPORT_AT, PAGE)

    def _written(self, offset: int, room: int) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in range(self._ranks):
            at = PAGE + rank * RECORD_BYTES + offset
            length, expected = _RECORD.unpack_from(self._head, at)
            if 0 < length <= room - _RECORD.size:
                text = self._head[at + _RECORD.size : at + _RECORD.size + length]
                if checksum(text) == expected:
                    found[rank] = json.loads(text)
        return found

    def lay_out(self, row_bytes: int) -> int:
        """Set the size of a row in bytes, and return how many there is room for; called once."""
        self._row_bytes = -(-row_bytes // PAGE) * PAGE
        self._rows = self._nbytes // self._row_bytes
        self._kept = min(self._touched_bytes, _KEPT_BYTES) // self._row_bytes
        self._fresh = self._most = self._touched_bytes // self._row_bytes
        self._free.extend(range(self._fresh))
        return self._rows

    def offset(self, row: Row) -> int:
        """Return the offset of a row from the first one."""
        return row.number * self._row_bytes

    def memory(self, row: Row, share: int, nbytes: int) -> Buffer:
        """Return the memory of a rank's part of a block.

        Args:
            row: The block's row.
            share: The offset of the rank's part within the row.
            nbytes: The size of the part.
        """
        at = self.offset(row) + share
        return self._memory[at : at + nbytes]

    def whole(self) -> memoryview:
        """Return the memory of all rows, read-only."""
        return self._memory.toreadonly()

    def knows(self, group: int, key: BlockKey) -> bool:
        """Return whether a block is staged or being staged; cheaper than `holds`, and no promise."""
        return (group, key) in self._table

    def holds(self, group: int, keys: Sequence[BlockKey]) -> int:
        """Return how many of the first blocks are staged and verified."""
        table, oldest = self._table, self._clock.monotonic() - STALE_SECONDS
        for count, key in enumerate(keys):
            row = table.get((group, key))
            if row is None or row.state is not _WHOLE or row.read_at < oldest:
                return count
        return len(keys)

    def hold(self, group: int, keys: Sequence[BlockKey]) -> list[Row] | None:
        """Keep staged blocks until ``release``; return None if one is missing."""
        with self.changed:
            if self.holds(group, keys) < len(keys):
                return None
            found = [self._table[group, key] for key in keys]
            for row in found:
                self._use(row)
            return found

    def claim(self, group: int, key: BlockKey) -> tuple[Row, bool] | None:
        """Return a block's row, to be released later, and whether the caller must fill it; None if there is no room.

        The thread that fills the row reports the outcome by ``filled`` or ``failed``; until then no other uses it.
        """
        name = (group, key)
        with self.changed:
            row = self._table.get(name)
            if row is not None and not row.users and self._clock.monotonic() - row.read_at > STALE_SECONDS:
                self._forget(row)
                row = None
            if row is not None:
                self._use(row)
                return row, False
            number = self._take()
            if number is None:
                return None
            row = self._table[name] = Row(number, name, self._clock.monotonic())
            return row, True

    def filled(self, row: Row, tier: str) -> None:
        """Report that a claimed row has its block, verified for all ranks."""
        with self.changed:
            row.state, row.tier = State.WHOLE if self._table.get(row.name) is row else State.FAILED, tier
            self._drop(row)
            self.changed.notify_all()

    def failed(self, row: Row, *, at_rest: bool = True) -> None:
        """Report that a claimed row cannot be filled; unless ``at_rest``, a stuck thread may still write to it."""
        with self.changed:
            row.state = State.FAILED
            if self._table.get(row.name) is row:
                del self._table[row.name]
            if at_rest:
                self._drop(row)
            self.changed.notify_all()

    def release(self, rows: Iterable[Row]) -> None:
        """Release blocks; they stay until their memory is needed."""
        with self.changed:
            for row in rows:
                self._drop(row)

    def clear(self) -> None:
        """Hide all staged blocks from lookups; holders of a block may still use it."""
        with self.changed:
            for row in list(self._unused):
                self._forget(row)
            for row in self._table.values():
                row.state = State.FAILED if row.state is State.WHOLE else row.state
            self._table.clear()

    def trim(self) -> None:
        """Give back memory that is not kept and was not needed for a while, every ``KEEP_SECONDS``; this takes time."""
        with self.changed:
            now = self._clock.monotonic()
            if now < self._trim_at:
                return
            self._trim_at = now + KEEP_SECONDS
            needed, self._most = max(self._kept, self._most), self._used
        while True:
            with self.changed:
                if self._used + len(self._free) + len(self._unused) <= max(needed, self._most):
                    return
                number = self._free.popleft() if self._free else self._take_unused()
            if number is None:
                return
            self._advise(self._give_back, number * self._row_bytes, self._row_bytes)
            with self.changed:
                self._bare.append(number)

    def close(self) -> None:
        """Hide the slab from new workers; its memory is freed when its last user ends."""
        os.close(self._file)

    def _advise(self, advice: int, offset: int, nbytes: int) -> None:
        """Call ``madvise`` for memory of rows, and ignore that an older system cannot do this.

        Python's own ``madvise`` would keep the interpreter's lock, for half a millisecond per MiB, and so stop the
        scheduler's thread.
        """
        if nbytes:
            _madvise(self._address + offset, nbytes, advice)

    def _use(self, row: Row) -> None:
        if not row.users:
            del self._unused[row]
            self._count_used()
        row.users += 1

    def _drop(self, row: Row) -> None:
        row.users -= 1
        if row.users:
            return
        self._used -= 1
        if row.state is _WHOLE:
            self._unused[row] = None
        else:
            self._free.append(row.number)

    def _forget(self, row: Row) -> None:
        del self._unused[row], self._table[row.name]
        self._free.append(row.number)

    def _count_used(self) -> None:
        self._used += 1
        self._most = max(self._most, self._used)

    def _take(self) -> int | None:
        """Return a row for another block, with memory if there is one; None if all are used."""
        number = self._free.pop() if self._free else self._take_unused()
        if number is None and self._bare:
            number = self._bare.pop()
        if number is None and self._fresh < self._rows:
            number = self._fresh
            self._fresh += 1
        if number is not None:
            self._count_used()
        return number

    def _take_unused(self) -> int | None:
        """Return the row of the block that was unused for longest; None if all blocks are used."""
        row = next(iter(self._unused), None)
        if row is None:
            return None
        self._forget(row)
        return self._free.pop()


class SlabReader:
    """A worker's side of a slab: copies blocks out of it on its own threads.

    The slab stays mapped. In a process of its own, a worker's first copy of a row is as fast as reading it from the
    file, because the kernel maps its pages; later copies run at the speed of memory, and rows are reused often. A
    worker in the owner's process uses the owner's mapping, whose pages are there.

    Args:
        clock: The clock whose threads copy.
    """

    def __init__(self, *, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._memory: memoryview | None = None
        self._report: mmap.mmap | None = None
        self._pool = Pool("ucm-copy", COPY_THREADS, clock=clock)

    @property
    def attached(self) -> bool:
        """Whether a slab is attached."""
        return self._memory is not None

    def attach(self, address: SlabAddress, rank: int, record: dict[str, Any]) -> bool:
        """Open a slab and write this rank's record into it.

        Returns:
            Whether the slab was found; it is not on another host.
        """
        text = json.dumps(record).encode()
        if len(text) > _REPORT_AT - _RECORD.size:
            return False
        path = f"/proc/{address.pid}/fd/{address.descriptor}"
        own = _of_this_process.get(address.token) if address.pid == os.getpid() else None  # a fork has it, too
        try:
            status = os.stat(path)  # noqa: PTH116 - the link's target
            if not stat.S_ISREG(status.st_mode):
                return False
            if own is None and status.st_size == address.begin:
                return False  # its rows are private
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.pread(file, len(address.token), 0) != address.token:
                    return False
                at = PAGE + rank * RECORD_BYTES
                os.pwrite(file, text, at + _RECORD.size)
                os.pwrite(file, _RECORD.pack(len(text), checksum(text)), at)
                self._report = mmap.mmap(file, PAGE, offset=at + _REPORT_AT)
                if own is None:
                    self._memory = memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ, offset=address.begin))
                else:
                    self._memory = own.whole()
            finally:
                os.close(file)
        except OSError:
            return False
        return True

    def report(self, report: dict[str, Any]) -> bool:
        """Replace what this rank reports while it runs; return False if it is too long for a page.

        Raises:
            ValueError: No slab is attached.
        """
        if self._report is None:
            raise ValueError("no slab is attached")
        text = json.dumps(report).encode()
        if len(text) > PAGE - _RECORD.size:
            return False
        self._report[: _RECORD.size + len(text)] = _RECORD.pack(len(text), checksum(text)) + text
        return True

    def load(self, blocks: Sequence[BlockTransfer], places: Sequence[int], tiers: Sequence[str]) -> Task:
        """Start to copy blocks into memory.

        Args:
            blocks: The blocks with their destination memory.
            places: For each block, the offset of its first requested layer slice in the slab.
            tiers: For each block, the tier it was read from.
        """
        task = TransferTask(len(blocks), clock=self._clock)
        step = -(-len(blocks) // COPY_THREADS) or 1
        self._pool.submit(
            partial(self._copy, task, blocks[at : at + step], places[at : at + step], tiers[at : at + step])
            for at in range(0, len(blocks), step)
        )
        return task

    def close(self) -> None:
        """Finish queued copies."""
        self._pool.close()
        self._memory = None

    def _copy(
        self, task: TransferTask, blocks: Sequence[BlockTransfer], places: Sequence[int], tiers: Sequence[str]
    ) -> None:
        for block, place, tier in zip(blocks, places, tiers, strict=True):
            nbytes, memory = block.nbytes, self._memory
            if memory is None or place + nbytes > memory.nbytes:
                missing = StoreUnavailableError("the staging memory does not exist, or ends before the block does")
                task.failed(block.key, missing)
                continue
            try:
                scatter(memory[place : place + nbytes], block.slices)
            except Exception as error:  # noqa: BLE001 - the waiting caller must receive any error
                task.failed(block.key, unexpected(error))
            else:
                task.succeeded(block.key, tier, nbytes)


#: The slabs of this process, by token.
_of_this_process: weakref.WeakValueDictionary[bytes, Slab] = weakref.WeakValueDictionary()


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def private_memory(nbytes: int) -> mmap.mmap | None:
    """Return private memory that is used where it is written; None if the system refuses it."""
    try:
        return _in_huge_pages(mmap.mmap(-1, nbytes, _PRIVATE))
    except OSError:
        return None


def _in_huge_pages(memory: mmap.mmap) -> mmap.mmap:
    with suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
