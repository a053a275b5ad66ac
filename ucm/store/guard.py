"""Protect a store from its tiers: skip a failing tier, time and count calls, and run them on separate threads."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from ucm.clock import SYSTEM
from ucm.store.base import StoreError, StoreFullError, StoreTimeoutError, StoreUnavailableError
from ucm.store.health import Breaker, Pool, RefusableJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar

    from ucm.clock import Clock
    from ucm.store.base import BlockKey, BlockTransfer, Buffer, TierStats
    from ucm.store.config import StoreConfig
    from ucm.store.health import Job
    from ucm.store.tier import Outcome, Tier

    T = TypeVar("T")


class Guard:
    """Isolates the failures of one tier.

    Lookups and reads return their failures; all other operations raise only StoreError.

    Args:
        tier: The tier.
        config: The store's options.
        clock: The clock of deadlines, rests and threads.
    """

    def __init__(self, tier: Tier, config: StoreConfig, *, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self.tier = tier
        self.name = tier.name
        self.counters = tier.counters
        failures, rest = config.failures_until_rest, config.rest_seconds
        self._breaker = tier.breaker or Breaker(f"the tier {tier.name}", failures, rest, clock=clock)
        # A full server can still be read.
        self._writes = Breaker(f"writing to the tier {tier.name}", failures, rest, clock=clock)
        patience = max(config.stuck_seconds, 2 * tier.transfer_timeout if not tier.rests_by_itself else 0.0)
        pool = partial(Pool, patience=patience, rest=rest, clock=clock)
        self._loads = [pool("ucm-load", config.load_threads) for _ in range(tier.lanes)]
        self._saves = [pool("ucm-save", config.save_threads, config.save_nice) for _ in range(tier.lanes)]
        self._load_threads = config.load_threads

    # Threads.

    def load_later(
        self, blocks: Sequence[BlockTransfer], run: Callable[[Sequence[BlockTransfer], StoreError | None], None]
    ) -> None:
        """Process blocks on the load threads, in batches.

        Args:
            blocks: The blocks.
            run: Called with each batch; if that would wait for stuck threads, by another thread, with the error.
        """
        for lane, some in self._by_lane(blocks).items():
            nbytes = self.tier.moved_nbytes(some[0]) or 1
            step = max(1, min(-(-len(some) // self._load_threads), self.tier.batch_nbytes // nbytes))
            parts = [some[at : at + step] for at in range(0, len(some), step)]
            self._loads[lane].submit([self._job(partial(run, part)) for part in parts])

    def save_later(self, jobs: Sequence[tuple[BlockKey, Callable[[StoreError | None], None]]]) -> None:
        """Process blocks on the write threads.

        Args:
            jobs: For each block, its key and what to call, as ``run`` of ``load_later``.
        """
        by_lane: dict[int, list[Job]] = defaultdict(list)
        for key, run in jobs:
            by_lane[self.tier.lane(key)].append(self._job(run))
        for lane, of_lane in by_lane.items():
            self._saves[lane].submit(of_lane)

    def relieve(self) -> None:
        """Refuse queued jobs if all threads are stuck; see ``Pool.relieve``."""
        for pool in (*self._loads, *self._saves):
            pool.relieve()

    def finish_saves(self) -> None:
        """Finish queued writes and accept no more."""
        for pool in self._saves:
            pool.close()

    def close(self) -> None:
        """Finish all queued jobs, then close the tier."""
        for pool in (*self._loads, *self._saves):
            pool.close()
        self.tier.close()

    # The tier.

    def allows(self, *, wait: bool = False) -> bool:
        """Return whether the tier may be called; the caller may become the breaker's probe."""
        return self.tier.rests_by_itself or self._breaker.allows(wait=wait)

    @property
    def takes(self) -> bool:
        """Whether a write is likely to succeed; unlike ``allows``, this does not make the caller the probe."""
        return self.tier.resting < 1 if self.tier.rests_by_itself else not (self._breaker.rests or self._writes.rests)

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Return whether each block exists; none does in a tier that does not answer."""
        found: list[bool] = []
        if keys and self.allows():
            try:
                found = self._timed("lookup", lambda: list(self.tier.contains(keys, self._deadline(self.tier.timeout))))
            except StoreError as error:
                self.counters.failed("lookup", error)
        self.counters.looked_up(len(keys), [key for key, there in zip(keys, found, strict=False) if there])
        return found or [False] * len(keys)

    def read_many(self, blocks: Sequence[BlockTransfer]) -> list[Outcome]:
        """Load layer slices into memory and return an outcome for each block."""
        if not self.allows(wait=True):
            return [self._breaker.refusal(self.name)] * len(blocks)
        outcomes: list[Outcome] = []

        def read() -> None:
            outcomes.extend(self.tier.read_many(blocks, self._deadline(self.tier.transfer_timeout)))
            worst = next((found for found in outcomes if isinstance(found, StoreUnavailableError)), None)
            if worst is not None:
                raise worst

        try:
            self._timed("load", read)
        except StoreError as error:
            return outcomes or [error] * len(blocks)
        return outcomes

    def read_file(self, key: BlockKey) -> Buffer:
        """Return a whole block in its stored form; see ``Tier.read_file``."""
        self._check_rest()
        return self._timed("load", lambda: self.tier.read_file(key, self._deadline(self.tier.transfer_timeout)))

    def has(self, key: BlockKey) -> bool:
        """Return whether a block exists that is to be saved; see ``Tier.has``."""
        self._check_rest()
        return self._timed("save", lambda: self.tier.has(key))

    def put(
        self,
        key: BlockKey,
        pieces: Sequence[Buffer | bytearray],
        nbytes: int,
        depth: int = 0,
        retain_until: float = 0.0,
    ) -> None:
        """Store a whole block and count it; see ``Tier.put``.

        Args:
            key: The block's key.
            pieces: Its header and layer slices.
            nbytes: The bytes of its layer slices.
            depth: See ``BlockTransfer``.
            retain_until: See ``BlockTransfer``.
        """
        self._check_rest()
        if not self._writes.allows():
            raise self._writes.refusal(self.name)
        self._timed("save", lambda: self.tier.put(key, pieces, self._deadline(self.tier.transfer_timeout)))
        self._writes.succeeded()
        self.used(key, depth, retain_until, is_new=True)
        self.counters.saved(nbytes)

    def used(self, key: BlockKey, depth: int, retain_until: float, *, is_new: bool = False) -> None:
        """Renew a saved block's time of last use, and retain it if it is to be retained."""
        self.tier.renew({key: depth}, is_new=is_new)
        if retain_until:
            self.tier.retain({key: depth}, retain_until)

    def stats(self) -> TierStats:
        """Return a snapshot of the tier's counters, with its state."""
        found = self.tier.stats()
        pools = (*self._loads, *self._saves)
        stuck = sum(pool.is_stuck for pool in pools) / len(pools)
        found.resting = max(self.tier.resting if self.tier.rests_by_itself else float(self._breaker.rests), stuck)
        return found

    # Inside.

    # Functions, because context managers take three times as long, and every saved block passes here twice.

    def _check_rest(self) -> None:
        """Raise the error of a call while the tier rests."""
        if not self.allows(wait=True):
            raise self._breaker.refusal(self.name)

    def _deadline(self, seconds: float) -> float:
        return self._clock.monotonic() + seconds

    def _timed(self, operation: str, call: Callable[[], T]) -> T:
        """Run an operation so that it raises only StoreError, time it, and report its outcome to the breaker."""
        began = self._clock.monotonic()
        try:
            found = call()
        except StoreUnavailableError as error:
            self._tell(error)
            raise
        except StoreError as error:
            self._tell(None)  # the tier answered
            if isinstance(error, StoreFullError) and not self.tier.rests_by_itself:
                self._writes.failed(error)
            raise
        except Exception as error:
            failure = unexpected(error)
            self._tell(failure)
            raise failure from error
        else:
            self._tell(None)
            return found
        finally:
            self.counters.took(operation, self._clock.monotonic() - began)

    def _tell(self, error: StoreError | None) -> None:
        if self.tier.rests_by_itself:
            return
        if error is None:
            self._breaker.succeeded()
        else:
            self._breaker.failed(error)

    def _by_lane(self, blocks: Sequence[BlockTransfer]) -> dict[int, Sequence[BlockTransfer]]:
        if self.tier.lanes == 1 or not blocks:
            return {0: blocks} if blocks else {}
        found: dict[int, list[BlockTransfer]] = defaultdict(list)
        for block in blocks:
            found[self.tier.lane(block.key)].append(block)
        return dict(found)

    def _job(self, run: Callable[[StoreError | None], None]) -> Job:
        stuck = StoreTimeoutError(f"the threads of the tier {self.name} are stuck: it does not answer")
        return RefusableJob(partial(run, None), partial(run, stuck))


def unexpected(error: Exception) -> StoreError:
    """Return any exception as a StoreError, so that the waiting caller receives it."""
    return error if isinstance(error, StoreError) else StoreError(f"{type(error).__name__}: {error}")
