"""Combine tiers into a store: saves go to the first tier and then to lower ones; loads try them in order."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from ucm.clock import SYSTEM
from ucm.store.base import BlockMissingError, KVStore, StoreError, TransferTask, too_far_behind
from ucm.store.copying import CLOSE_SECONDS, WriteBehind
from ucm.store.format import MAX_KEY_BYTES, MIN_KEY_BYTES, aligned_buffer, gather, known_codec
from ucm.store.guard import Guard, unexpected

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.clock import Clock
    from ucm.store.base import BlockKey, BlockTransfer, Buffer, Task, TierStats
    from ucm.store.config import StoreConfig
    from ucm.store.format import HeaderCodec
    from ucm.store.tier import Tier

#: Called for every buffer, and several times as fast as an expression in Python.
_NBYTES, _CONTIGUOUS, _READONLY = map(attrgetter, ("nbytes", "c_contiguous", "readonly"))
#: How many times as many blocks of a prefix are looked up as before; see ``Tier.first_wave``.
_GROWTH, _SLOW_GROWTH = 16, 4


def check_transfer(block: BlockTransfer, codec: HeaderCodec) -> int:
    """Check a transfer and return its size in bytes.

    Raises:
        ValueError: A layer slice does not exist, or the memory is of the wrong size or not contiguous.
    """
    if not MIN_KEY_BYTES <= len(block.key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, not {len(block.key)}")
    if codec.end_of(block.first_slice, block.nbytes) is None:
        raise ValueError(
            f"block {block.key.hex()}: the memory of layer slices from {block.first_slice} on has {block.nbytes} "
            f"bytes, and none of its {len(codec.geometry.slice_sizes)} layer slices ends there"
        )
    if not all(map(_CONTIGUOUS, block.slices)) or not all(map(_NBYTES, block.slices)):
        raise ValueError(f"block {block.key.hex()}: the memory of a layer slice is not contiguous, or empty")
    return block.nbytes


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
        self._lock = clock.lock()
        self._queued_bytes = 0
        self._closed = False
        self._guards = tuple(Guard(tier, config, clock=clock) for tier in self._tiers)
        #: Blocks that are being copied into the first tier, and the most of them.
        self._promoting: set[BlockKey] = set()
        self._most_promoting = 0 if codec is None else config.write_behind_bytes // codec.file_nbytes
        self._behind = tuple(
            tuple(
                WriteBehind(self._guards[:number], guard, codec, config, clock=clock) for _ in range(guard.tier.lanes)
            )
            for number, guard in enumerate(self._guards)
            if number and codec is not None
        )

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Look up keys: each tier is asked, in one call, for the keys missing in the tiers above it."""
        self._check_open()
        return _lookup(self._guards, keys)

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Count blocks without a gap; what the first tier lacks is looked for in all of them.

        With several tiers the parts grow more slowly, as one may lack most of a part that another has.
        """
        self._check_open()
        hits = _lookup_on_prefix(self._guards[:1], keys, _GROWTH)
        return hits if len(self._guards) == 1 else hits + _lookup_on_prefix(self._guards, keys[hits:], _SLOW_GROWTH)

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Load blocks in batches on each tier's threads; blocks that one tier lacks go on to the next."""
        self._check_open()
        codec = known_codec(self._codec)
        for block in blocks:
            check_transfer(block, codec)
            if any(map(_READONLY, block.slices)):
                raise ValueError(f"block {block.key.hex()} cannot be loaded into read-only memory")
        task = TransferTask(len(blocks), self._relieve, clock=self._clock)
        if blocks:
            self._load_from(0, task, blocks)
        return task

    def save(self, blocks: Sequence[BlockTransfer]) -> Task:
        """Queue one job per block, up to a number of bytes."""
        self._check_open()
        codec = known_codec(self._codec)
        sizes = [check_transfer(block, codec) for block in blocks]
        for block, nbytes in zip(blocks, sizes, strict=True):
            if nbytes != codec.geometry.nbytes:
                raise ValueError(f"block {block.key.hex()} is to be saved without all of its layer slices")
        task = TransferTask(len(blocks), self._relieve, clock=self._clock)
        with self._lock:
            room = (self._queue_limit - self._queued_bytes) // codec.geometry.nbytes
            accepted = max(room, 0 if self._queued_bytes else 1)
            self._queued_bytes += codec.geometry.nbytes * min(accepted, len(blocks))
        first = self._guards[0]
        for block in blocks[accepted:]:
            first.counters.failed("save", full := too_far_behind(self._queue_limit))
            task.failed(block.key, full)
        first.save_later([(block.key, partial(self._save, task, block)) for block in blocks[:accepted]])
        return task

    def renew(self, depths: Mapping[BlockKey, int]) -> None:
        """Let every tier renew the times of last use."""
        self._check_open()
        for tier in self._tiers:
            tier.renew(depths)

    def retain(self, depths: Mapping[BlockKey, int], until: float, *, pinned: bool = False) -> None:
        """Let every tier lease the blocks that it has."""
        self._check_open()
        for tier in self._tiers:
            tier.retain(depths, until, pinned=pinned)

    def flush(self, seconds: float) -> bool:
        """Wait for blocks that are written behind."""
        until = self._clock.monotonic() + seconds
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
        self._guards[0].finish_saves()
        until = self._clock.monotonic() + CLOSE_SECONDS
        for lanes in self._behind:
            for lane in lanes:
                lane.close(until)
        for guard in self._guards:
            guard.close()

    def _relieve(self) -> None:
        """Refuse what would wait for stuck threads, because somebody asks for it."""
        for guard in self._guards:
            guard.relieve()

    def _load_from(self, number: int, task: TransferTask, blocks: Sequence[BlockTransfer]) -> None:
        try:
            self._guards[number].load_later(blocks, partial(self._load, number, task))
        except ValueError as error:  # closed meanwhile
            if not number:
                raise
            for block in blocks:
                task.failed(block.key, StoreError(str(error)))

    def _load(self, number: int, task: TransferTask, blocks: Sequence[BlockTransfer], stuck: StoreError | None) -> None:
        guard = self._guards[number]
        left: list[tuple[BlockTransfer, StoreError]] = []
        loaded: list[BlockTransfer] = []
        try:
            outcomes = guard.read_many(blocks) if stuck is None else [stuck] * len(blocks)
            for block, outcome in zip(blocks, outcomes, strict=True):
                if isinstance(outcome, StoreError):
                    left.append((block, outcome))
                    continue
                if number:
                    self._promote(block)
                if outcome:
                    for lower in self._tiers[number + 1 :]:
                        lower.renew({block.key: block.depth})
                loaded.append(block)
        except Exception as error:  # noqa: BLE001 - the waiting caller must receive any error
            failure = unexpected(error)
            loaded, left = [], [(block, failure) for block in blocks]
        if loaded:
            nbytes = sum(block.nbytes for block in loaded)
            guard.counters.loaded(len(loaded), nbytes)
            task.all_succeeded([block.key for block in loaded], guard.name, nbytes)
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

    def _promote(self, block: BlockTransfer) -> None:
        """Copy a block that a lower tier has just loaded as a whole into the first one, from a copy of its memory."""
        codec, first = known_codec(self._codec), self._guards[0]
        if block.nbytes < codec.geometry.nbytes:
            return
        with self._lock:
            if block.key in self._promoting or len(self._promoting) >= self._most_promoting:
                return
            self._promoting.add(block.key)
        try:
            content = aligned_buffer(codec.file_nbytes)
            gather(block.slices, content[codec.nbytes :])
            first.save_later([(block.key, partial(self._write_copy, block.key, block.depth, content))])
        except (StoreError, ValueError) as error:  # there is no memory, or it was closed meanwhile
            self._promoting.discard(block.key)
            if isinstance(error, StoreError):
                first.counters.failed("promote", error)

    def _write_copy(self, key: BlockKey, depth: int, content: Buffer, stuck: StoreError | None) -> None:
        codec, first = known_codec(self._codec), self._guards[0]
        try:
            if stuck is None and not self._closed and not first.has(key):  # another engine may have been faster
                content[: codec.nbytes] = codec.encode(key, codec.seal([content[codec.nbytes :]]))
                first.put(key, [content], codec.geometry.nbytes, depth)
        except Exception as error:  # noqa: BLE001 - the thread goes on after any error
            first.counters.failed("promote", unexpected(error))
        finally:
            self._promoting.discard(key)

    def _save(self, task: TransferTask, block: BlockTransfer, stuck: StoreError | None) -> None:
        try:
            if stuck is not None:
                self._guards[0].counters.failed("save", stuck)
                raise stuck
            number, written = self._put(block)
        except StoreError as error:
            report = partial(task.failed, block.key, error)
        else:
            for guard, lanes in zip(self._guards[number + 1 :], self._behind[number:], strict=True):
                lanes[guard.tier.lane(block.key)].add(block.key, block.depth, block.retain_until)
            report = partial(task.succeeded, block.key, self._guards[number].name, written)
        with self._lock:
            self._queued_bytes -= known_codec(self._codec).geometry.nbytes
        report()

    def _put(self, block: BlockTransfer) -> tuple[int, int]:
        """Write a block into the first tier that accepts it, unless a tier has it.

        Returns:
            The tier's number, and the bytes written.

        Raises:
            StoreError: No tier accepted it; the last one's error.
        """
        codec, failures = known_codec(self._codec), list[StoreError]()
        nbytes = codec.geometry.nbytes
        pieces: list[Buffer | bytearray] = []
        for number, guard in enumerate(self._guards):
            try:
                if guard.has(block.key):
                    for each in self._guards:
                        each.used(block.key, block.depth, block.retain_until)
                    return number, 0
                pieces = pieces or [codec.encode(block.key, codec.seal(block.slices)), *block.slices]
                guard.put(block.key, pieces, nbytes, block.depth, block.retain_until)
            except Exception as error:  # noqa: BLE001 - the waiting caller must receive any error
                failures.append(unexpected(error))
                guard.counters.failed("save", failures[-1])
            else:
                return number, nbytes
        raise failures[-1]

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the store is closed")


def _lookup(tiers: Sequence[Guard], keys: Sequence[BlockKey]) -> list[bool]:
    found = tiers[0].contains(keys)
    for tier in tiers[1:]:
        missing = [index for index, there in enumerate(found) if not there]
        for index, there in zip(missing, tier.contains([keys[index] for index in missing]), strict=True):
            found[index] = there
    return found


def _lookup_on_prefix(tiers: Sequence[Guard], keys: Sequence[BlockKey], growth: int) -> int:
    """Count blocks without a gap.

    They are asked for in growing parts: in some tiers each block costs a request, and in others each call costs a round
    trip.
    """
    hits, wave = 0, min(guard.tier.first_wave for guard in tiers)
    while hits < len(keys):
        there = _lookup(tiers, keys[hits : hits + wave])
        if False in there:
            return hits + there.index(False)
        hits, wave = hits + len(there), wave * growth
    return hits
