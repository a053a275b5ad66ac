"""Staging of chunks for the workers: looked up, read and verified in threads before a hit is reported.

A chunk is staged completely or not at all, with the parts of all ranks, in memory that the workers share with the
scheduler's process, so a reported hit cannot be lost, and all ranks have the same chunks.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from ucm.background import enter_background
from ucm.clock import SYSTEM
from ucm.logger import get_logger
from ucm.store.base import BlockGeometry, BlockTransfer
from ucm.store.memory.slab import PAGE, Slab, State, jobs_of, start_load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.clock import Clock, Queue
    from ucm.store.base import BlockKey, KVStore, Task
    from ucm.store.memory.slab import Row

#: The slab's rows belong to KV-cache groups; all chunk pieces are in one group.
GROUP = 0
#: The threads that wait for the stores.
THREADS = 2


@dataclass(slots=True, eq=False)
class ChunkLookup:
    """The lookup of a request's chunks.

    Args:
        pieces: The keys of each chunk's pieces.
        deadline: The time at which it ends.
    """

    pieces: list[list[BlockKey]]
    deadline: float
    rows: list[list[Row] | None] = field(default_factory=list)  #: the staged rows of each chunk, or None
    finished: bool = False  #: whether it has ended and no longer changes


@dataclass(slots=True)
class _Reading:
    """The reading of a chunk.

    Args:
        number: Its index in the lookup.
        held: The rows of its pieces.
        mine: The rows that this thread reads.
        tasks: Their load tasks, by rank.
    """

    number: int
    held: list[Row] = field(default_factory=list)
    mine: list[Row] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether all of its reads have ended."""
        return all(row.state is not State.READING for row in self.held)

    @property
    def is_whole(self) -> bool:
        """Whether all of it is staged."""
        return bool(self.held) and all(row.state is State.WHOLE for row in self.held)


class ChunkStager:
    """Looks chunks up at all ranks and stages them.

    Args:
        slab: The slab.
        seconds: The time limit of a lookup.
        clock: Time and threads; the slab's.
    """

    def __init__(self, slab: Slab, seconds: float, *, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self._slab = slab
        self.seconds = seconds
        self._stores: Sequence[KVStore] = ()
        self._sizes: list[int] = []  # the bytes of each rank's part
        self.shares: tuple[int, ...] = ()  #: the offset of each rank's part in a row
        self._changed = clock.condition()
        self._running: list[ChunkLookup] = []  # by the threads
        self._jobs: Queue[Callable[[], None] | None] = clock.queue()
        self._threads = [clock.thread(self._work, f"ucm-chunks-{number}") for number in range(THREADS)]

    def begin(self, stores: Sequence[KVStore], geometries: Sequence[BlockGeometry]) -> None:
        """Start lookups, once the stores and piece geometries are known.

        Args:
            stores: The stores of all ranks, in order.
            geometries: The piece geometry of each.
        """
        padded = [-(-geometry.nbytes // PAGE) * PAGE for geometry in geometries]
        self._sizes = [geometry.nbytes for geometry in geometries]
        self.shares = tuple(accumulate(padded[:-1], initial=0))
        self._slab.lay_out(sum(padded))
        for thread in self._threads:
            with suppress(RuntimeError):  # the system allows no more threads: without any, lookups find what is staged
                thread.start()
        self._stores = stores

    @property
    def has_begun(self) -> bool:
        """Return whether lookups are possible."""
        return bool(self._stores)

    def submit(self, pieces: list[list[BlockKey]]) -> ChunkLookup:
        """Look up chunks; what is staged is answered at once, and if all threads wait for a medium, nothing else is."""
        lookup = ChunkLookup(pieces, self.clock.monotonic() + self.seconds)
        staged = [self._slab.hold(GROUP, keys) for keys in pieces]
        lookup.rows = staged
        if all(rows is not None for rows in staged) or self._is_stuck:
            lookup.finished = True
        else:
            self._jobs.put(lambda: self._run(lookup))
        return lookup

    @property
    def _is_stuck(self) -> bool:
        """Whether all threads still wait for stores, although the time for their lookups is over."""
        with self._changed:
            now = self.clock.monotonic()
            return len(self._running) == THREADS and all(now >= lookup.deadline for lookup in self._running)

    def poll(self, lookup: ChunkLookup) -> bool:
        """Return whether a lookup has ended or reached its deadline; its result is then what is staged."""
        with self._changed:
            if self.clock.monotonic() >= lookup.deadline:
                lookup.finished = True
            return lookup.finished

    def wait(self, lookups: Sequence[ChunkLookup], seconds: float) -> None:
        """Wait until one of some lookups has ended."""
        with self._changed:
            self._changed.wait_for(lambda: any(lookup.finished for lookup in lookups), seconds)

    def release(self, lookup: ChunkLookup) -> None:
        """Free the rows of a lookup."""
        with self._changed:
            lookup.finished = True
            rows, lookup.rows = lookup.rows, []
        self._slab.release([row for of_chunk in rows if of_chunk is not None for row in of_chunk])

    def offsets(self, rows: Sequence[Row]) -> list[int]:
        """Return the offsets of staged pieces in the slab."""
        return [self._slab.offset(row) for row in rows]

    def close(self) -> None:
        """End the threads; one blocked by a medium is abandoned."""
        for thread in self._threads:
            self._jobs.put(None)
            if thread.is_alive():
                thread.join(1.0)
        self._slab.close()

    def _work(self) -> None:
        enter_background()
        for job in jobs_of(self._jobs, self._slab):
            job()

    def _run(self, lookup: ChunkLookup) -> None:
        """Start all missing reads, then wait for them, so that the medium's latency counts only once."""
        begun: list[_Reading] = []
        try:
            with self._changed:  # a release takes the rows away
                self._running.append(lookup)
                missing = [n for n, rows in enumerate(lookup.rows) if rows is None and not lookup.finished]
            stored = self._stored([lookup.pieces[number] for number in missing])
            for number in [number for number, there in zip(missing, stored, strict=True) if there]:
                if lookup.finished:
                    break
                begun.append(_Reading(number))
                self._begin_reading(begun[-1], lookup.pieces[number])
            for reading in begun:
                self._end_reading(reading)
                if reading.is_over:
                    self._hand_over(lookup, reading)
            # Wait for other threads' reads only after this thread's own, for which others may wait.
            until = self.clock.monotonic() + self.seconds
            for reading in begun:
                with self._slab.changed:
                    while not reading.is_over and (left := until - self.clock.monotonic()) > 0:
                        self._slab.changed.wait(left)
                self._hand_over(lookup, reading)
        except Exception:  # noqa: BLE001 - whatever it is, the request must go on
            get_logger(__name__).exception("[UCM.Blend] staging chunks failed unexpectedly")
        for reading in begun:
            self._give_up(reading)
        with self._changed:
            self._running.remove(lookup)
            lookup.finished = True
            self._changed.notify_all()

    def _took(self, lookup: ChunkLookup, number: int, rows: list[Row] | None) -> bool:
        """Pass a staged chunk to its lookup; return whether it was in time."""
        with self._changed:
            if lookup.finished:
                return False
            lookup.rows[number] = rows
            return True

    def _stored(self, pieces: Sequence[Sequence[BlockKey]]) -> list[bool]:
        """Return, for each chunk, whether all ranks have all of its pieces."""
        keys = list(dict.fromkeys(key for of_chunk in pieces for key in of_chunk))
        there = set(keys)
        for store in self._stores:
            there.intersection_update(key for key, found in zip(keys, store.lookup(keys), strict=True) if found)
        return [there.issuperset(of_chunk) for of_chunk in pieces]

    def _begin_reading(self, reading: _Reading, keys: Sequence[BlockKey]) -> None:
        """Hold a chunk's rows, and start to read those that no thread reads; hold none if there is no room."""
        for key in keys:
            claimed = self._slab.claim(GROUP, key)
            if claimed is None:
                self._give_up(reading)
                return
            reading.held.append(claimed[0])
            if claimed[1]:
                reading.mine.append(claimed[0])
        for store, share, nbytes in zip(self._stores, self.shares, self._sizes, strict=True):
            transfers = [BlockTransfer(row.name[1], [self._slab.memory(row, share, nbytes)]) for row in reading.mine]
            reading.tasks.append(start_load(store, transfers))

    def _end_reading(self, reading: _Reading) -> None:
        """Wait for the reads of `_begin_reading`."""
        results = [task.wait() for task in reading.tasks]
        for row in reading.mine:
            if all(row.name[1] in result.done for result in results):
                self._slab.filled(row, str(results[0].done[row.name[1]]))
            else:
                self._slab.failed(row)
        reading.mine = []

    def _hand_over(self, lookup: ChunkLookup, reading: _Reading) -> None:
        """Pass a chunk to the lookup if it is complete and in time; otherwise free its rows."""
        if reading.is_whole and self._took(lookup, reading.number, reading.held):
            reading.held = []
        self._give_up(reading)

    def _give_up(self, reading: _Reading) -> None:
        """Free the rows of a chunk."""
        for row in reading.mine:
            self._slab.failed(row, at_rest=not reading.tasks)
        self._slab.release(reading.held)
        reading.held, reading.mine = [], []
