"""A store of one or several tiers: writes go to all of them, reads to the first that has the block."""

from __future__ import annotations

import time
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from ucm.store.assembly import Assembly
from ucm.store.errors import BlockMissingError, IncompleteBlockError, StoreError, too_far_behind
from ucm.store.leases import Lease, LeasingStore
from ucm.store.pace import Pace
from ucm.store.pool import Pool
from ucm.store.posix_layout import owner_name
from ucm.store.promotion import Promoter
from ucm.store.tasks import TransferTask
from ucm.store.transfers import check_memory, check_transfer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.store.base import BlockKey, BlockTransfer, Task, TaskResult, TierStats
    from ucm.store.config import StoreConfig
    from ucm.store.format import HeaderCodec
    from ucm.store.pool import Job
    from ucm.store.tier import Tier

#: How often blocks that were dumped and never committed nor discarded are looked for, in seconds of use. Between two
#: dumps no more than this counts as use: an engine that idles for hours has not forgotten what it will commit.
_SWEEP_SECONDS = 60.0


class TieredStore(LeasingStore):
    """Tiers as one store. An instance belongs to the process that opened it: a fork of that has none of its threads.

    Args:
        tiers: Fastest first.
        codec: What a block's file looks like; None for an instance that only looks up and prefetches.
        config: The store's options.
    """

    def __init__(self, tiers: Sequence[Tier], codec: HeaderCodec | None, config: StoreConfig) -> None:
        self._tiers = tuple(tiers)
        self._codec = codec
        self._queue_limit = config.dump_queue_bytes
        self._idle_limit = config.stale_seconds
        self._lock = Lock()
        self._assemblies: dict[BlockKey, Assembly] = {}
        self._queued_bytes = 0
        self._dumped = time.monotonic()  # when it was used last
        self._used = self._swept = 0.0  # for how long it was in use by then, and as of the last sweep
        self._closed = False
        self._loads = Pool("ucm-load", config.load_threads)
        self._pace = Pace()
        self._dumps = Pool("ucm-dump", config.dump_threads, config.dump_nice, self._take_turn)
        self._promoter = Promoter(self._tiers, self._dumps)

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Asks each tier for what those above it do not have."""
        self._check_open()
        found = self._tiers[0].contains(keys)
        for tier in self._tiers[1:]:
            missing = [index for index, there in enumerate(found) if not there]
            if missing:
                for index, there in zip(missing, tier.contains([keys[index] for index in missing]), strict=True):
                    found[index] = there
        return found

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        """Goes on in the next tier where one has a gap."""
        self._check_open()
        hits = self._tiers[0].prefix(keys)
        gained = len(self._tiers) > 1
        while gained and hits < len(keys):
            before = hits
            for tier in (*self._tiers[1:], self._tiers[0]):
                if hits < len(keys):
                    hits += tier.prefix(keys[hits:])
            gained = hits > before
        return hits

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Copies blocks into the first tier, or has the only one read ahead."""
        self._check_open()
        self._promoter.prefetch(keys)

    def lease(self, keys: Sequence[BlockKey], *, verify: bool = False) -> Lease:
        """In the first tier that has the block."""
        self._check_open()
        token = owner_name()
        held: set[BlockKey] = set()
        for tier in self._tiers:
            held |= tier.lease(token, [key for key in keys if key not in held], verify=verify)
        return Lease(token, frozenset(held))

    def release(self, lease: Lease) -> None:
        """In every tier."""
        self._check_open()
        for tier in self._tiers:
            tier.release(lease.token)

    def load(self, blocks: Sequence[BlockTransfer], lease: str | None = None) -> Task:
        """One job per block."""
        self._check_open()
        codec = self._known_codec()
        for block in blocks:
            check_transfer(block, codec)
            check_memory(block)
        task = TransferTask(len(blocks))
        self._loads.submit(partial(self._load, task, block, lease) for block in blocks)
        return task

    def dump(self, blocks: Sequence[BlockTransfer]) -> Task:
        """One job per block; see ``Assembly``."""
        self._check_open()
        codec = self._known_codec()
        sizes = [check_transfer(block, codec) for block in blocks]
        task = TransferTask(len(blocks))
        jobs: list[Job] = []
        refused = []
        with self._lock:
            now = time.monotonic()
            self._used += min(now - self._dumped, _SWEEP_SECONDS)
            self._dumped, used = now, self._used
            for block, nbytes in zip(blocks, sizes, strict=True):
                assembly = self._assemblies.get(block.key)
                if assembly is None:
                    assembly = self._assemblies[block.key] = Assembly(block.key, codec, self._tiers)
                assembly.touched = used
                if self._queued_bytes and self._queued_bytes + nbytes > self._queue_limit:
                    refused.append(assembly)
                    continue
                assembly.pending += 1
                self._queued_bytes += nbytes
                jobs.append(partial(self._dump, task, assembly, block, nbytes))
        for assembly in refused:
            full = too_far_behind(self._queue_limit)
            assembly.refuse(full)
            self._tiers[-1].counters.failed("dump", full)
            task.failed(assembly.key, full)
        self._dumps.submit(jobs)
        self._sweep(used)
        return task

    def commit(self, keys: Sequence[BlockKey]) -> Task:
        """Each block is finished by the thread that writes its last shard."""
        self._check_open()
        distinct = dict.fromkeys(keys)
        task = TransferTask(len(distinct))
        jobs: list[Job] = []
        with self._lock:
            for key in distinct:
                assembly = self._assemblies.pop(key, None)
                if assembly is None:
                    jobs.append(partial(self._commit_unknown, task, key))
                else:
                    assembly.commit = task
                    if not assembly.pending:
                        jobs.append(partial(self._finish, assembly, task))
        self._dumps.submit(jobs)
        return task

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """What is being written is dropped by the thread that writes it."""
        self._check_open()
        jobs: list[Job] = []
        with self._lock:
            for key in keys:
                assembly = self._assemblies.pop(key, None)
                if assembly is not None:
                    assembly.discarded = True
                    if not assembly.pending:
                        jobs.append(assembly.abort)
        self._dumps.submit(jobs)

    def stand_back(self, *, active: bool) -> None:
        """Holds dumps, commits and promotions back, as long as little waits and nobody waits for them."""
        self._pace.stand_back(active=active)

    def wait(self, task: Task) -> TaskResult:
        """Also after ``close``."""
        known = _known(task)
        if not known.is_finished():
            self._pace.hurry()
        return known.result()

    def check(self, task: Task) -> bool:
        """Also after ``close``."""
        return _known(task).is_finished()

    def stats(self) -> Mapping[str, TierStats]:
        """Every tier's snapshot."""
        return {tier.name: tier.stats() for tier in self._tiers}

    def close(self) -> None:
        """May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for assembly in self._assemblies.values():
                assembly.discarded = True
            idle = [assembly for assembly in self._assemblies.values() if not assembly.pending]
            self._assemblies.clear()
        self._pace.hurry()
        self._promoter.close()
        self._loads.close()
        self._dumps.close()
        for assembly in idle:
            assembly.abort()
        for tier in self._tiers:
            tier.close()

    def _take_turn(self) -> None:
        self._pace.take_turn(self._queued_bytes)

    def _load(self, task: TransferTask, block: BlockTransfer, lease: str | None) -> None:
        failure: StoreError | None = None
        for number, tier in enumerate(self._tiers):
            try:
                old = tier.read(block, lease)
            except StoreError as error:
                failure = error
                if tier is self._tiers[-1] or not isinstance(error, BlockMissingError):
                    tier.counters.failed("load", error)
            except Exception as error:  # noqa: BLE001 - whatever it is, the waiting caller must hear of it
                failure = _unexpected(error)
                tier.counters.failed("load", failure)
            else:
                nbytes = sum(shard.nbytes for shard in block.shards)
                tier.counters.loaded(nbytes)
                task.succeeded(block.key, tier.name, nbytes)
                if number:
                    self._promoter.promote(block.key)
                if old:
                    for lower in self._tiers[number + 1 :]:
                        lower.touch(block.key)
                return
        task.failed(block.key, failure or StoreError("the store has no tier"))

    def _dump(self, task: TransferTask, assembly: Assembly, block: BlockTransfer, nbytes: int) -> None:
        try:
            tier, moved = assembly.take(block)
        except StoreError as error:
            task.failed(assembly.key, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the waiting caller must hear of it
            failure = _unexpected(error)
            assembly.refuse(failure)
            self._tiers[-1].counters.failed("dump", failure)
            task.failed(assembly.key, failure)
        else:
            task.succeeded(assembly.key, tier, moved)
        with self._lock:
            self._queued_bytes -= nbytes
            assembly.pending -= 1
            idle = not assembly.pending
        if idle and assembly.commit is not None:
            self._finish(assembly, assembly.commit)
        elif idle and assembly.discarded:
            assembly.abort()

    def _finish(self, assembly: Assembly, task: TransferTask) -> None:
        try:
            tier, nbytes = assembly.finish()
        except StoreError as error:
            task.failed(assembly.key, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the waiting caller must hear of it
            failure = _unexpected(error)
            self._tiers[-1].counters.failed("commit", failure)
            assembly.abort()
            task.failed(assembly.key, failure)
        else:
            task.succeeded(assembly.key, tier, nbytes)

    def _commit_unknown(self, task: TransferTask, key: BlockKey) -> None:
        for tier in reversed(self._tiers):
            if tier.contains([key])[0]:
                task.succeeded(key, tier.name, 0)
                return
        error = IncompleteBlockError(f"block {key.hex()} was committed without any of its shards")
        self._tiers[-1].counters.failed("commit", error)
        task.failed(key, error)

    def _sweep(self, used: float) -> None:
        """Discard what its caller has forgotten."""
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

    def _known_codec(self) -> HeaderCodec:
        if self._codec is None:
            raise ValueError("the store was opened without a geometry: it looks up and prefetches, no more")
        return self._codec


def _known(task: Task) -> TransferTask:
    if not isinstance(task, TransferTask):
        raise TypeError(f"{task!r} is not a task of this store")
    return task


def _unexpected(error: Exception) -> StoreError:
    return StoreError(f"{type(error).__name__}: {error}")
