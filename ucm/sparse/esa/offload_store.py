"""A worker's store for the offloaded context of its requests.

A block stays in host memory until the store has saved it, or until its request ends if the store
does not accept it or has lost a block before. Saves to a full or lagging store are retried. Keys are never
reused, and the namespace is unique to this engine start and worker. The store verifies checksums, so it returns the
saved bytes or nothing. Threads open and finally delete it, which a directory that does not answer
may block; the worker does not wait for them.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

from ucm.background import call_later
from ucm.clock import SYSTEM
from ucm.logger import get_logger
from ucm.sparse.esa.offloaded import block_key
from ucm.store.base import BlockTransfer, StoreFullError, StoreTimeoutError
from ucm.store.factory import OpeningStore, open_store
from ucm.store.health import Pool
from ucm.store.memory.segment import delete_blocks, remove_empty
from ucm.store.posix.layout import PRIVATE, Layout, namespaces
from ucm.store.posix.paths import list_directory, unlink

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from ucm.clock import Clock
    from ucm.sparse.attention import BlockCopies
    from ucm.store.base import BlockGeometry, BlockKey, Buffer, KVStore, StoreError, Task
    from ucm.store.config import StoreConfig

#: The delay before a full or lagging store is retried.
RETRY_SECONDS = 1.0
_DELETED_AT_ONCE = 256


@dataclass(slots=True)
class _Admission:
    """The state of a request.

    Attributes:
        copies: The bytes, by layer, of each block in host memory.
        keys: The key of each block passed to the store.
    """

    copies: dict[int, list[Tensor]] = field(default_factory=dict)
    keys: dict[int, BlockKey] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Saving:
    """Blocks that are being saved."""

    admission: int
    places: tuple[int, ...]
    task: Task


@dataclass(frozen=True, slots=True)
class Fetch:
    """A running load of blocks of one layer.

    Attributes:
        rows: ``[blocks, bytes of a block]``, uint8: their destination in host memory.
        wanted: The admission and place of each.
        loads: The rows that the store loads.
        task: The store's task, if any.
    """

    rows: Tensor
    wanted: Sequence[tuple[int, int]]
    loads: list[tuple[int, BlockTransfer]]
    task: Task | None


class OffloadStore:
    """Saves blocks, and loads single layers of them.

    All calls come from the worker's own thread; transfers run in the store's.

    Args:
        config: The store's options.
        copies: The worker's layers.
        engine: The name of the engine start.
        rank: The worker's rank.
        clock: Time and threads.

    Attributes:
        counts: ``saved``, ``loaded`` and ``from_host`` (block-layers), ``kept`` (blocks that stay in host memory),
            ``retried`` and ``lost`` loads.
    """

    def __init__(
        self, config: StoreConfig, copies: BlockCopies, engine: str, rank: int, *, clock: Clock = SYSTEM
    ) -> None:
        self._clock = clock
        self._copies = copies
        self._engine = engine
        #: The directories of blocks, once the store is open.
        self._layouts: list[Layout] = []
        # The prefix identifies a dead engine's leftovers, and exempts a running one's blocks from eviction.
        make = partial(_open, config, f"{PRIVATE}/{engine}/{rank}", copies.geometry, self._layouts, clock)
        self._store: KVStore = OpeningStore(make, config.stuck_seconds, clock=clock)
        self._cleaner = _cleaner(config.stuck_seconds, clock)
        self._kept: dict[int, _Admission] = {}
        self._saving: list[_Saving] = []
        #: When to save again what a full or late store did not accept.
        self._retry_at = math.inf
        self._at_once = max(1, config.save_queue_bytes // 2 // copies.geometry.nbytes)
        self._trusted = True
        self._logged: set[str] = set()
        self.counts: Counter[str] = Counter()
        ours = self._store, self._cleaner, self._layouts, config.stuck_seconds, clock
        self._end = Finalize(self, _end, ours, exitpriority=10)

    def save(self, admission: int, first: int, layers: Sequence[Tensor]) -> None:
        """Save consecutive blocks.

        Args:
            admission: Their request's admission.
            first: The place of the first one.
            layers: Per layer ``[blocks, bytes of a block]``, uint8, in host memory; do not change them afterwards.
        """
        kept = self._kept.setdefault(admission, _Admission())
        places = range(first, first + layers[0].shape[0])
        kept.copies.update({place: [layer[place - first] for layer in layers] for place in places})
        self.counts["saved"] += len(places)
        if self._trusted:
            self._save(admission, places)
        else:
            self.counts["kept"] += len(places)

    def settle(self) -> None:
        """Free the host memory of saved blocks; called once per step."""
        under_way = []
        for saving in self._saving:
            if saving.task.check():
                self._settle(saving)
            else:
                under_way.append(saving)
        self._saving = under_way
        if self._trusted and not under_way and self._clock.monotonic() >= self._retry_at:
            self._save_again()

    def fetch(self, layer: int, wanted: Sequence[tuple[int, int]]) -> Fetch:
        """Start to load one layer of some blocks into host memory.

        Args:
            layer: The layer.
            wanted: The admission and place of each, without duplicates.
        """
        rows = self._copies.host_rows(layer, len(wanted))
        loads: list[tuple[int, BlockTransfer]] = []
        for row, (admission, place) in enumerate(wanted):
            kept = self._kept[admission]
            copy = kept.copies.get(place)
            if copy is not None:
                rows[row] = copy[layer]
            else:
                loads.append((row, BlockTransfer(kept.keys[place], [_memory(rows[row])], layer)))
        self.counts["from_host"] += len(wanted) - len(loads)
        task = self._store.load([transfer for _, transfer in loads]) if loads else None
        return Fetch(rows, wanted, loads, task)

    def wait(self, fetch: Fetch) -> list[int]:
        """Wait until the blocks are loaded.

        Returns:
            The rows of lost blocks: their request was dropped meanwhile, or the store has failed twice.
        """
        if fetch.task is None:
            return []
        result = fetch.task.wait()
        self.counts["loaded"] += len(result.done)
        return [
            row
            for row, transfer in fetch.loads
            if transfer.key in result.failed and not self._again(fetch.wanted[row][0], transfer)
        ]

    def drop(self, admission: int) -> None:
        """Delete the blocks of a request that has ended."""
        kept = self._kept.pop(admission, None)
        if kept is not None:
            self._forget(kept.keys.values())  # those that are being written again when they are

    def _save(self, admission: int, places: Sequence[int]) -> None:
        kept = self._kept[admission]
        transfers = []
        for place in places:
            key = kept.keys[place] = block_key(self._engine, admission, place)
            transfers.append(BlockTransfer(key, [_memory(rows) for rows in kept.copies[place]]))
        self._saving.append(_Saving(admission, tuple(places), self._store.save(transfers)))

    def _save_again(self) -> None:
        left = self._at_once
        for admission, kept in self._kept.items():
            places = list(kept.copies)[:left]
            if places:
                left -= len(places)
                self.counts["kept"] -= len(places)
                self._save(admission, places)
        self._retry_at = math.inf if left else self._retry_at  # there may be more, for the next step

    def _settle(self, saving: _Saving) -> None:
        result = saving.task.wait()
        kept = self._kept.get(saving.admission)
        if kept is None:  # dropped during the save
            self._forget([block_key(self._engine, saving.admission, place) for place in saving.places])
            return
        held = set(result.done)
        for place in saving.places:
            if kept.keys[place] in held and self._trusted:
                del kept.copies[place]
            else:
                self.counts["kept"] += 1
                # A full or still opening store may accept them later; others of them may be waiting for that already.
                error = result.failed.get(kept.keys[place])
                if isinstance(error, StoreFullError | StoreTimeoutError) or self._retry_at < math.inf:
                    self._retry_at = self._clock.monotonic() + RETRY_SECONDS
        for error in result.failed.values():
            self._tell("blocks stay in host memory, because the store does not accept them", error)

    def _again(self, admission: int, transfer: BlockTransfer) -> bool:
        """Load a block once more."""
        if admission not in self._kept:
            return False
        self.counts["retried"] += 1
        result = self._store.load([transfer]).wait()
        for error in result.failed.values():
            # Other blocks may be lost, too: from now on freed blocks stay in host memory.
            self._trusted = False
            self.counts["lost"] += 1
            self._tell("a block of a request is lost, and released blocks stay in host memory from here on", error)
        return not result.failed

    def _forget(self, keys: Iterable[BlockKey]) -> None:
        names = list(keys)
        some = [names[at : at + _DELETED_AT_ONCE] for at in range(0, len(names), _DELETED_AT_ONCE)]
        with suppress(ValueError):
            self._cleaner.submit([partial(_delete, self._layouts, of_job) for of_job in some])

    def _tell(self, what: str, error: StoreError) -> None:
        label = f"{what}: {error.cause}"
        if label not in self._logged:
            self._logged.add(label)
            get_logger(__name__).error("[UCM.Sparse] %s (logged once, counted from now on): %s", what, error)


def _open(config: StoreConfig, namespace: str, geometry: BlockGeometry, layouts: list[Layout], clock: Clock) -> KVStore:
    layouts += [Layout(root, namespace) for root in config.roots]
    store = open_store(config, namespace, geometry, clock=clock)
    # There may be much of it, and blocks wait.
    call_later(partial(remove_leftovers, config.roots), "ucm-leftovers", clock=clock)
    return store


def _cleaner(patience: float, clock: Clock) -> Pool:
    return Pool("ucm-offload", 1, 19, patience=patience, clock=clock)


def _delete(layouts: Sequence[Layout], keys: Sequence[BlockKey]) -> None:
    for layout in layouts:
        with suppress(OSError):
            delete_blocks(layout, keys)  # those in memory
            remove_empty(layout)  # others may need the room
        for key in keys:
            with suppress(OSError):
                unlink(layout.block(key))


def _end(store: KVStore, cleaner: Pool, layouts: Sequence[Layout], patience: float, clock: Clock) -> None:
    """Close the store and delete its blocks when the worker ends."""
    cleaner.close()
    store.close()
    last = _cleaner(patience, clock)
    for layout in layouts:
        # A few blocks per job, because a job that exceeds the time limit counts as blocked for ever.
        last.submit([partial(_remove_bucket, f"{layout.base}/{number:02x}") for number in range(256)])
        last.submit([partial(shutil.rmtree, layout.base, ignore_errors=True)])
    last.close()


def _remove_bucket(path: str) -> None:
    with suppress(OSError):
        for name, _ in list_directory(path):
            unlink(f"{path}/{name}")


def _memory(rows: Tensor) -> Buffer:
    return memoryview(rows.numpy())


def remove_leftovers(roots: Sequence[str]) -> None:
    """Delete the offloaded contexts of dead engines, which are unreadable."""
    for root in roots:
        with suppress(OSError):
            for layout in namespaces(root):
                if layout.is_abandoned:
                    shutil.rmtree(layout.base, ignore_errors=True)
