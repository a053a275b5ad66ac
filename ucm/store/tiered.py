"""Combine tiers into a store: saves go to the first tier and then to lower ones; loads try them in order."""

from __future__ import annotations

from collections import deque
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from ucm.clock import SYSTEM
from ucm.store.base import BlockMissingError, IncompleteBlockError, KVStore, StoreError, TransferTask, too_far_behind
from ucm.store.copying import CLOSE_SECONDS, Promoter, WriteBehind
from ucm.store.format import MAX_KEY_BYTES, MIN_KEY_BYTES, known_codec
from ucm.store.guard import Guard, Throttle, unexpected
from ucm.store.health import RefusableJob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.clock import Clock, Lock
    from ucm.store.base import BlockKey, BlockTransfer, Task, TaskResult, TierStats
    from ucm.store.config import StoreConfig
    from ucm.store.format import HeaderCodec, Seal
    from ucm.store.health import Job
    from ucm.store.tier import BlockWriter, Tier

#: Called for every layer slice, and several times as fast as an expression in Python.
_NBYTES, _CONTIGUOUS, _READONLY = map(attrgetter, ("nbytes", "c_contiguous", "readonly"))
#: How often to look for blocks that were saved but never committed or discarded, in seconds of use. Between two saves
#: at most this much counts as use, because an engine that idled for hours may still commit its blocks.
_SWEEP_SECONDS = 60.0
#: How many blocks behind the first gap of a prefix are looked up first; then twice as many, and so on.
_FIRST_WAVE = 8
#: How long a write-behind job lets loads go first, and how often it checks for loads, in seconds.
_LOADS_FIRST_SECONDS, _LOOK_SECONDS = 0.25, 0.005


def check_transfer(block: BlockTransfer, codec: HeaderCodec) -> int:
    """Check a transfer and return its size in bytes.

    Raises:
        ValueError: A layer slice does not exist, or its memory is of the wrong size or not contiguous.
    """
    first, slices, sizes = block.first_slice, block.slices, codec.geometry.slice_sizes
    if not MIN_KEY_BYTES <= len(block.key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, not {len(block.key)}")
    given = tuple(map(_NBYTES, slices))
    if not given or first < 0 or given != sizes[first : first + len(given)]:
        raise ValueError(
            f"block {block.key.hex()}: layer slices from {first} on have {given} bytes; of a block's {len(sizes)} "
            f"layer slices those there have {sizes[first : first + len(given)]}"
        )
    if not all(map(_CONTIGUOUS, slices)):
        raise ValueError(f"block {block.key.hex()}: the memory of a layer slice is not contiguous")
    return sum(given)


def check_memory(block: BlockTransfer) -> None:
    """Check that a transfer's memory is writable.

    Raises:
        ValueError: The memory is read-only.
    """
    if any(map(_READONLY, block.slices)):
        raise ValueError(f"block {block.key.hex()} cannot be loaded into read-only memory")


class Assembly:
    """One block being assembled, from its first layer slice to ``finish`` or ``abort``.

    The store's lock guards ``pending``, ``commit``, ``discarded`` and ``touched``.

    Args:
        block: The first transfer of the block, with its key, depth and lease.
        codec: The codec of the block's stored form.
        tiers: The tiers to try, in order.
        lock: The block's own; whoever writes it holds the lock, also while the medium hangs.
    """

    def __init__(self, block: BlockTransfer, codec: HeaderCodec, tiers: Sequence[Guard], lock: Lock) -> None:
        self.key, self.depth, self.retain_until = block.key, block.depth, block.retain_until
        self.pending = 0  #: transfers queued or in progress
        self.commit: TransferTask | None = None  #: the commit task waiting for this block
        self.discarded = False
        self.touched = 0.0  #: when the last transfer was queued, in the store's seconds of use
        self._codec = codec
        self._tiers = tiers
        self._lock = lock
        self._seals: list[Seal] = [None] * len(codec.geometry.slice_sizes)
        self._tier: Guard | None = None  # the tier that has the block or receives it
        self._writer: BlockWriter | None = None  # None if the tier already had the block
        self._error: StoreError | None = None

    def refuse(self, error: StoreError) -> None:
        """Fail the block with this error, unless it has failed already."""
        self._error = self._error or error

    def take(self, block: BlockTransfer, nbytes: int) -> tuple[str, int]:
        """Write layer slices into the first tier that accepts them; later ones of the block go to the same tier.

        Args:
            block: The layer slices.
            nbytes: Their size in bytes.

        Returns:
            The tier's name, and the bytes written: 0 if the tier already had the block.

        Raises:
            StoreError: No tier accepted these layer slices or earlier ones.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self.discarded:
                raise IncompleteBlockError(f"block {self.key.hex()} was discarded before it was written")
            if self._tier is not None:
                if self._writer is None:
                    return self._tier.name, 0
                try:
                    self._write(self._tier, self._writer, block)
                except StoreError as error:
                    self._tier.counters.failed("save", error)
                    self._abort()
                    self._error = error
                    raise
                return self._tier.name, nbytes
            self._begin(block)
            return self._known_tier().name, 0 if self._writer is None else nbytes

    def finish(self) -> tuple[str, int]:
        """Make the block visible.

        Returns:
            The name of the tier that has the block, and the block's bytes: 0 if the tier already had it.

        Raises:
            IncompleteBlockError: Layer slices are missing, or no tier accepted them, for the reason that the save gave.
            StoreError: The tier failed to commit the block.
        """
        with self._lock:
            error = self._error
            if error is not None:
                # The save has already reported and counted this error: reporting it as is would count it twice.
                self._abort()
                what = f"block {self.key.hex()} was not saved and cannot be committed: {error.what}"
                raise IncompleteBlockError(what, where=error.where, fix=error.fix) from error
            tier, writer = self._known_tier(), self._writer
            if writer is None:
                for each in self._tiers:
                    each.used(self.key, self.depth, self.retain_until)
                return tier.name, 0
            if None in self._seals:
                missing = f"{self._seals.count(None)} of its {len(self._seals)} layer slices"
                incomplete = IncompleteBlockError(f"block {self.key.hex()} was committed without {missing}")
                tier.counters.failed("commit", incomplete)
                self._abort()
                raise incomplete
            try:
                tier.write(writer.commit)
            except StoreError as failure:
                tier.counters.failed("commit", failure)
                self._abort()
                raise
            nbytes = self._codec.geometry.nbytes
            tier.counters.saved(nbytes)
            tier.used(self.key, self.depth, self.retain_until, is_new=True)
            return tier.name, nbytes

    def abort(self) -> None:
        """Drop the layer slices written so far."""
        with self._lock:
            self._abort()

    def _abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()
            self._writer = None

    def _begin(self, block: BlockTransfer) -> None:
        """Write the first layer slices into the first tier that accepts them."""
        for tier in self._tiers:
            writer = None
            try:
                writer = tier.writer(self.key, self._codec.file_nbytes)
                if writer is not None:
                    self._write(tier, writer, block)
            except StoreError as error:
                tier.counters.failed("save", error)
                if writer is not None:
                    writer.abort()
                self._error = error
            else:
                self._tier, self._writer, self._error = tier, writer, None
                return
        if self._error is not None:
            raise self._error

    def _write(self, tier: Guard, writer: BlockWriter, block: BlockTransfer) -> None:
        codec, first, slices = self._codec, block.first_slice, block.slices
        self._seals[first : first + len(slices)] = codec.seal(slices)
        begin, end = codec.offsets[first], codec.offsets[first + len(slices)]
        whole = len(slices) == len(self._seals)
        header = None if None in self._seals else codec.encode(self.key, self._seals)

        def write() -> None:
            if whole and header is not None:
                writer.write([header, *slices], 0, end)
            else:
                writer.write(slices, begin, end - begin)
                if header is not None:
                    writer.write([header], 0, codec.nbytes)
            writer.pause()

        tier.write(write)

    def _known_tier(self) -> Guard:
        if self._tier is None:
            raise IncompleteBlockError(f"block {self.key.hex()} was committed without any of its layer slices")
        return self._tier


class TieredStore(KVStore):
    """A store of one or several tiers. It works only in the process that opened it, because a fork has no threads.

    Args:
        tiers: The tiers, fastest first.
        codec: The codec of a block's file; None for an instance that only looks up.
        config: The store's options.
        clock: The clock that the tiers were opened with.
    """

    def __init__(
        self, tiers: Sequence[Tier], codec: HeaderCodec | None, config: StoreConfig, *, clock: Clock = SYSTEM
    ) -> None:
        self._clock = clock
        self._tiers = tuple(tiers)
        self._codec = codec
        self._queue_limit = config.save_queue_bytes
        self._idle_limit = config.stale_seconds
        self._lock = clock.lock()
        self._assemblies: dict[BlockKey, Assembly] = {}
        self._queued_bytes = 0
        self._saved = self._clock.monotonic()  # time of the last save
        self._used = self._swept = 0.0  # seconds of use until the last save, and until the last sweep
        self._closed = False
        self._loading = 0  # load tasks in progress
        self._throttle = Throttle(clock=clock)
        self._guards = tuple(Guard(tier, config, self._take_turn, clock=clock) for tier in self._tiers)
        self._promoter = Promoter(self._guards, codec, config.write_behind_bytes)
        self._behind = tuple(
            tuple(
                WriteBehind(
                    self._guards[:number],
                    guard,
                    config.write_behind_bytes // guard.tier.lanes,
                    codec.file_nbytes,
                    config.save_nice,
                    self._take_turn_behind,
                    clock=clock,
                )
                for _ in range(guard.tier.lanes)
            )
            for number, guard in enumerate(self._guards)
            if number and codec is not None
        )

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Look up keys: each tier is asked, in one call, for the keys missing in the tiers above it."""
        self._check_open()
        return _lookup(self._guards, keys)

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Count blocks without a gap; after a gap, continue in the next tier.

        Several tiers may each hold parts of the rest. It is asked for in growing parts: in some tiers each block costs
        a request, and in others each call costs a round trip.
        """
        self._check_open()
        hits = last = 0
        for number, tier in enumerate(self._guards):
            if found := tier.prefix(keys[hits:]):
                hits, last = hits + found, number
        tiers, wave = self._guards[:last], 1  # the tiers that were not yet asked for the next block
        while hits < len(keys):
            there = _lookup(tiers, keys[hits : hits + wave])
            hits += there.index(False) if False in there else len(there)
            if False in there:
                break
            tiers, wave = self._guards, max(_FIRST_WAVE, 2 * wave)
        return hits

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Load blocks in batches on each tier's threads; blocks that one tier lacks go on to the next."""
        self._check_open()
        codec = known_codec(self._codec)
        for block in blocks:
            check_transfer(block, codec)
            check_memory(block)
        task = TransferTask(len(blocks), clock=self._clock)
        if blocks:
            with self._lock:
                self._loading += 1
            task.when_finished(self._loaded)
            self._load_from(0, task, blocks)
        return task

    def save(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Queue one job per block; see ``Assembly``."""
        self._check_open()
        codec = known_codec(self._codec)
        sizes = [check_transfer(block, codec) for block in blocks]
        task = TransferTask(len(blocks), clock=self._clock)
        accepted: list[tuple[Assembly, BlockTransfer, int]] = []
        refused = []
        with self._lock:
            now = self._clock.monotonic()
            self._used += min(now - self._saved, _SWEEP_SECONDS)
            self._saved, used = now, self._used
            for block, nbytes in zip(blocks, sizes, strict=True):
                assembly = self._assemblies.get(block.key)
                if assembly is None:
                    assembly = Assembly(block, codec, self._guards, self._clock.lock())
                    self._assemblies[block.key] = assembly
                assembly.touched = used
                if self._queued_bytes and self._queued_bytes + nbytes > self._queue_limit:
                    refused.append(assembly)
                    continue
                assembly.pending += 1
                self._queued_bytes += nbytes
                accepted.append((assembly, block, nbytes))
        first = self._guards[0]
        for assembly in refused:
            full = too_far_behind(self._queue_limit)
            assembly.refuse(full)
            first.counters.failed("save", full)
            task.failed(assembly.key, full)
        jobs = [(block.key, partial(self._save, task, assembly, block, nbytes)) for assembly, block, nbytes in accepted]
        stuck = first.stuck()
        first.save_all_later([(key, RefusableJob(run, partial(run, stuck))) for key, run in jobs])
        self._sweep(used)
        return task

    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Finish each block on the thread that writes its last layer slice."""
        self._check_open()
        distinct = dict.fromkeys(keys)
        task = TransferTask(len(distinct), clock=self._clock)
        ready: list[tuple[BlockKey, Assembly | None]] = []
        with self._lock:
            for key in distinct:
                assembly = self._assemblies.pop(key, None)
                if assembly is not None:
                    assembly.commit = task
                if assembly is None or not assembly.pending:
                    ready.append((key, assembly))
        self._guards[0].save_all_later([(key, self._finishing(task, key, assembly)) for key, assembly in ready])
        return task

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Drop blocks; the thread that is writing a block drops it."""
        self._check_open()
        idle = []
        with self._lock:
            for key in keys:
                assembly = self._assemblies.pop(key, None)
                if assembly is not None:
                    assembly.discarded = True
                    if not assembly.pending:
                        idle.append(assembly)
        for assembly in idle:
            self._guards[0].save_later(assembly.key, assembly.abort)

    def renew(self, keys: Sequence[BlockKey]) -> None:
        """Let every tier renew the times of last use."""
        self._check_open()
        for tier in self._tiers:
            tier.renew(keys)

    def retain(self, keys: Sequence[BlockKey], until: float, *, pinned: bool = False) -> None:
        """Let every tier lease the blocks that it has."""
        self._check_open()
        for tier in self._tiers:
            tier.retain(keys, until, pinned=pinned)

    def throttle(self, *, active: bool) -> None:
        """Delay saves, commits and promotions, as long as few bytes are queued and no caller waits for them."""
        self._throttle.switch(active=active)

    def wait(self, task: Task) -> TaskResult:
        """Wait for a task, also after ``close``."""
        known = _known(task)
        if not known.is_finished():
            self._throttle.hurry()
            while not known.finished_within(1.0):
                self._relieve()
        return known.result()

    def check(self, task: Task) -> bool:
        """Return whether a task is finished, also after ``close``."""
        known = _known(task)
        if not known.is_finished():
            self._relieve()
        return known.is_finished()

    def flush(self, seconds: float) -> bool:
        """Wait for blocks that are written behind."""
        until = self._clock.monotonic() + seconds
        self._throttle.hurry()
        return all(lane.flush(max(0.0, until - self._clock.monotonic())) for lanes in self._behind for lane in lanes)

    def stats(self) -> Mapping[str, TierStats]:
        """Return every tier's snapshot."""
        found = {guard.name: guard.stats() for guard in self._guards}
        for guard, lanes in zip(self._guards[1:], self._behind, strict=False):
            for lane in lanes:
                blocks, nbytes = lane.queued
                found[guard.name].queued_blocks += blocks
                found[guard.name].queued_bytes += nbytes
        return found

    def close(self) -> None:
        """Close the store; later calls do nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for assembly in self._assemblies.values():
                assembly.discarded = True
            idle = [assembly for assembly in self._assemblies.values() if not assembly.pending]
            self._assemblies.clear()
        self._throttle.hurry()
        self._promoter.close()
        for assembly in idle:
            assembly.abort()
        self._guards[0].finish_saves()
        until = self._clock.monotonic() + CLOSE_SECONDS
        for lanes in self._behind:
            for lane in lanes:
                lane.close(until)
        for guard in self._guards:
            guard.close()

    def _take_turn(self) -> None:
        self._throttle.take_turn(self._queued_bytes)

    def _take_turn_behind(self) -> None:
        """Give way to loads, for a moment, and to the caller's computation."""
        until = self._clock.monotonic() + _LOADS_FIRST_SECONDS
        while self._loading and not self._closed and self._clock.monotonic() < until:
            self._clock.sleep(_LOOK_SECONDS)
        self._take_turn()

    def _relieve(self) -> None:
        for guard in self._guards:
            guard.relieve()

    def _loaded(self) -> None:
        with self._lock:
            self._loading -= 1

    def _load_from(self, number: int, task: TransferTask, blocks: Sequence[BlockTransfer]) -> None:
        def refuse(some: Sequence[BlockTransfer], error: StoreError) -> None:
            self._not_loaded(number, task, [(block, error) for block in some])

        run = partial(self._load, number, task)
        try:
            self._guards[number].load_later(blocks, run, refuse)
        except ValueError as error:  # closed meanwhile
            if not number:
                raise
            for block in blocks:
                task.failed(block.key, StoreError(str(error)))

    def _load(self, number: int, task: TransferTask, blocks: Sequence[BlockTransfer]) -> None:
        guard = self._guards[number]
        left: list[tuple[BlockTransfer, StoreError]] = []
        untold = deque(blocks)
        try:
            for block, outcome in zip(blocks, guard.read_many(blocks), strict=True):
                if isinstance(outcome, StoreError):
                    left.append((untold.popleft(), outcome))
                    continue
                nbytes = sum(layer_slice.nbytes for layer_slice in block.slices)
                if number:
                    self._promoter.keep(block)
                guard.counters.loaded(nbytes)
                untold.popleft()
                task.succeeded(block.key, guard.name, nbytes)
                if outcome:
                    for lower in self._tiers[number + 1 :]:
                        lower.renew([block.key], block.depth)
        except Exception as error:  # noqa: BLE001 - the waiting caller must receive any error
            failure = unexpected(error)
            left += [(block, failure) for block in untold]
        self._not_loaded(number, task, left)

    def _not_loaded(self, number: int, task: TransferTask, failed: Sequence[tuple[BlockTransfer, StoreError]]) -> None:
        """Pass blocks that one tier could not load to the next tier."""
        last = number + 1 == len(self._guards)
        for block, error in failed:
            if last or not isinstance(error, BlockMissingError):
                self._guards[number].counters.failed("load", error)
            if last:
                task.failed(block.key, error)
        if failed and not last:
            self._load_from(number + 1, task, [block for block, _ in failed])

    def _save(
        self,
        task: TransferTask,
        assembly: Assembly,
        block: BlockTransfer,
        nbytes: int,
        refusal: StoreError | None = None,
    ) -> None:
        try:
            if refusal is None:
                tier, moved = assembly.take(block, nbytes)
                task.succeeded(assembly.key, tier, moved)
            else:  # another layer slice's thread may be stuck inside the assembly: do not wait for its lock
                assembly.refuse(refusal)
                self._guards[0].counters.failed("save", refusal)
                task.failed(assembly.key, refusal)
        except StoreError as error:
            task.failed(assembly.key, error)
        except Exception as error:  # noqa: BLE001 - the waiting caller must receive any error
            failure = unexpected(error)
            assembly.refuse(failure)
            self._guards[0].counters.failed("save", failure)
            task.failed(assembly.key, failure)
        with self._lock:
            self._queued_bytes -= nbytes
            assembly.pending -= 1
            # Read this under the lock: a later commit or discard finds nothing pending and handles the block itself.
            commit, discarded = assembly.commit, assembly.discarded
            idle = not assembly.pending
        if idle and commit is not None:
            self._finish(assembly, commit)
        elif idle and discarded:
            assembly.abort()

    def _finishing(self, task: TransferTask, key: BlockKey, assembly: Assembly | None) -> Job:
        if assembly is None:
            return RefusableJob(
                partial(self._commit_unknown, task, key), partial(task.failed, key, self._guards[0].stuck())
            )
        return RefusableJob(partial(self._finish, assembly, task), partial(self._finish, assembly, task, refused=True))

    def _finish(self, assembly: Assembly, task: TransferTask, *, refused: bool = False) -> None:
        if refused:
            assembly.refuse(self._guards[0].stuck())
        try:
            tier, nbytes = assembly.finish()
        except StoreError as error:
            task.failed(assembly.key, error)
        except Exception as error:  # noqa: BLE001 - the waiting caller must receive any error
            failure = unexpected(error)
            self._guards[0].counters.failed("commit", failure)
            assembly.abort()
            task.failed(assembly.key, failure)
        else:
            self._feed(assembly, tier)
            task.succeeded(assembly.key, tier, nbytes)

    def _feed(self, block: Assembly, above: str) -> None:
        """Queue a block that one tier has to be written to the tiers below it."""
        below = False
        for guard, lanes in zip(self._guards, ((), *self._behind), strict=True):
            if below:
                lanes[guard.tier.lane(block.key)].add(block.key, block.depth, block.retain_until)
            below = below or guard.name == above

    def _commit_unknown(self, task: TransferTask, key: BlockKey) -> None:
        for tier in self._guards:
            if tier.contains([key])[0]:
                task.succeeded(key, tier.name, 0)
                return
        error = IncompleteBlockError(f"block {key.hex()} was committed without any of its layer slices")
        self._guards[0].counters.failed("commit", error)
        task.failed(key, error)

    def _sweep(self, used: float) -> None:
        """Discard blocks that were not used for a long time."""
        if used - self._swept < _SWEEP_SECONDS:
            return
        self._swept = used
        with self._lock:
            forgotten = [
                assembly.key for assembly in self._assemblies.values() if used - assembly.touched > self._idle_limit
            ]
        self.discard(forgotten)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the store is closed")


def _lookup(tiers: Sequence[Guard], keys: Sequence[BlockKey]) -> list[bool]:
    found = [False] * len(keys)
    for tier in tiers:
        missing = [index for index, there in enumerate(found) if not there]
        for index, there in zip(missing, tier.contains([keys[index] for index in missing]), strict=True):
            found[index] = there
    return found


def _known(task: Task) -> TransferTask:
    if not isinstance(task, TransferTask):
        raise TypeError(f"{task!r} is not a task of this store")
    return task
