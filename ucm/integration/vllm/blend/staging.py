"""Chunks on their way from the store to the workers: looked up, read and verified in threads, then promised.

A chunk is staged whole or not at all, with the parts of all ranks, in memory that the workers share with the
scheduler's process; so what is promised cannot be lost, and every rank knows the same chunks.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from ucm.background import enter_background
from ucm.logger import get_logger
from ucm.store.base import BlockGeometry, BlockTransfer
from ucm.store.slab import PAGE, Slab, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.store.base import BlockKey, KVStore
    from ucm.store.slab import Row

#: The slab counts KV-cache groups; all pieces of chunks are of one kind.
GROUP = 0
#: Threads that wait for the stores, and how long one of them waits for a piece that another one reads.
THREADS = 2
_LOOKS_SECONDS = 0.02


@dataclass(slots=True, eq=False)
class ChunkLookup:
    """Chunks that a request asks for.

    Args:
        pieces: Of each chunk, the keys of its pieces.
        deadline: When it is too late.
    """

    pieces: list[list[BlockKey]]
    deadline: float
    rows: list[list[Row] | None] = field(default_factory=list)  #: of each chunk, what is staged, or None
    finished: bool = False  #: nothing of it changes any more


class ChunkStager:
    """Looks chunks up at all ranks and stages them.

    Args:
        slab: Where.
        seconds: How long a lookup may take.
    """

    def __init__(self, slab: Slab, seconds: float) -> None:
        self._slab = slab
        self.seconds = seconds
        self._stores: Sequence[KVStore] = ()
        self._sizes: list[tuple[int, ...]] = []
        self.shares: tuple[int, ...] = ()  #: where each rank's part of a row begins
        self._changed = threading.Condition()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"ucm-chunks-{number}", daemon=True) for number in range(THREADS)
        ]

    def begin(self, stores: Sequence[KVStore], geometries: Sequence[BlockGeometry]) -> None:
        """It is known where chunks are, and what their pieces look like.

        Args:
            stores: Of all ranks, in their order.
            geometries: What a piece is there.
        """
        padded = [-(-geometry.nbytes // PAGE) * PAGE for geometry in geometries]
        self._sizes = [geometry.shard_sizes for geometry in geometries]
        self.shares = tuple(accumulate(padded[:-1], initial=0))
        self._slab.lay_out(sum(padded))
        for thread in self._threads:
            thread.start()
        self._stores = stores

    @property
    def has_begun(self) -> bool:
        """Whether anything can be looked up."""
        return bool(self._stores)

    def submit(self, pieces: list[list[BlockKey]]) -> ChunkLookup:
        """Look chunks up; what is staged already is answered at once."""
        lookup = ChunkLookup(pieces, time.monotonic() + self.seconds)
        staged = [self._slab.hold(GROUP, keys) for keys in pieces]
        lookup.rows = staged
        if all(rows is not None for rows in staged):
            lookup.finished = True
        else:
            self._jobs.put(lambda: self._run(lookup))
        return lookup

    def poll(self, lookup: ChunkLookup) -> bool:
        """Whether a lookup has ended, or is out of time: then what is staged by now is its outcome."""
        with self._changed:
            if time.monotonic() >= lookup.deadline:
                lookup.finished = True
            return lookup.finished

    def wait(self, lookups: Sequence[ChunkLookup], seconds: float) -> None:
        """Wait until one of some lookups has ended."""
        with self._changed:
            self._changed.wait_for(lambda: any(lookup.finished for lookup in lookups), seconds)

    def release(self, lookup: ChunkLookup) -> None:
        """Nobody uses what was looked up any more."""
        with self._changed:
            lookup.finished = True
            rows, lookup.rows = lookup.rows, []
        self._slab.release([row for of_chunk in rows if of_chunk is not None for row in of_chunk])

    def offsets(self, rows: Sequence[Row]) -> list[int]:
        """Where staged pieces begin in the slab."""
        return [self._slab.offset(row) for row in rows]

    def close(self) -> None:
        """End the threads; one that a medium holds is left to it."""
        for thread in self._threads:
            self._jobs.put(None)
            if thread.is_alive():
                thread.join(1.0)
        self._slab.close()

    def _work(self) -> None:
        enter_background()
        while (job := self._jobs.get()) is not None:
            job()

    def _run(self, lookup: ChunkLookup) -> None:
        for number, keys in enumerate(lookup.pieces):
            with self._changed:  # a release takes the rows away
                if lookup.finished:
                    break
                missing = lookup.rows[number] is None
            if missing:
                rows = None
                try:
                    rows = self._stage(keys)
                except Exception:  # noqa: BLE001 - whatever it is, the request must go on
                    get_logger(__name__).exception("[UCM.Blend] staging a chunk failed unexpectedly")
                if not self._took(lookup, number, rows) and rows is not None:
                    self._slab.release(rows)
        with self._changed:
            lookup.finished = True
            self._changed.notify_all()

    def _took(self, lookup: ChunkLookup, number: int, rows: list[Row] | None) -> bool:
        """Whether what was staged of a chunk has come in time."""
        with self._changed:
            if lookup.finished:
                return False
            lookup.rows[number] = rows
            return True

    def _stage(self, keys: Sequence[BlockKey]) -> list[Row] | None:
        """Hold a chunk's pieces, read from the store where nobody has; None if one is missing or damaged."""
        if not all(all(store.lookup(keys)) for store in self._stores):
            return None
        held: list[Row] = []
        mine: list[Row] = []
        whole = False
        try:
            for key in keys:
                claimed = self._slab.claim(GROUP, key)
                if claimed is None:  # no room
                    return None
                held.append(claimed[0])
                if claimed[1]:
                    mine.append(claimed[0])
            self._read(mine)
            until = time.monotonic() + self.seconds
            while any(row.state is State.READING for row in held) and time.monotonic() < until:
                time.sleep(_LOOKS_SECONDS)
            whole = all(row.state is State.WHOLE for row in held)
        finally:
            for row in mine:
                if row.state is State.READING:
                    self._slab.failed(row)
            if not whole:
                self._slab.release(held)
        return held if whole else None

    def _read(self, rows: Sequence[Row]) -> None:
        """Read pieces of all ranks into their rows."""
        tasks = []
        for store, share, sizes in zip(self._stores, self.shares, self._sizes, strict=True):
            transfers = [BlockTransfer(row.name[1], self._slab.memory(row, share, sizes)) for row in rows]
            tasks.append((store, store.load(transfers)))
        results = [store.wait(task) for store, task in tasks]
        for row in rows:
            if all(row.name[1] in result.done for result in results):
                self._slab.filled(row, str(results[0].done[row.name[1]]))
            else:
                self._slab.failed(row)
