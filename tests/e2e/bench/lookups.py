"""The time that a request's lookup takes of the scheduler's thread, and a long prompt's of another thread.

The first is that of all calls until there is an answer. The scheduler side, its threads and a Posix store are real.
Steps come at a fixed interval, and the blocks are already hashed; the section ``hashing`` measures hashing.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest.mock import create_autospec

import numpy as np

from tests.e2e.bench.figure import Figure
from transforms.place import BUILD
from ucm.hashing.block_keys import BlockKeys
from ucm.integration.vllm.connector.kv_cache import CacheGroup, CacheGroups
from ucm.integration.vllm.connector.prefix_cache import PlanningOptions, PrefixCacheScheduler
from ucm.integration.vllm.connector.staging import Stager
from ucm.integration.vllm.metrics import ConnectorCounters
from ucm.store.base import BlockGeometry, BlockKey, KVStore
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.memory.slab import Slab
from ucm.testing.blocks import save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

REQUESTS, BLOCKS, TOKENS = 100, 64, 16
GEOMETRY = BlockGeometry((16_384,) * 8, b"bench of lookups")
#: Seconds between two steps, of a slow lookup, and of the deadline for a frozen medium.
STEP, SLOW, DEADLINE = 0.005, 0.05, 2.0
MOST_MS = 0.1
#: The lookup of a prompt of 16,384 tokens, in chunks of 256, for several ranks, and its goal.
PREFIX, RANKS, ROUNDS, MOST_PREFIX_MS = 64, 8, 60, 5.0
SMALL = BlockGeometry((4096,), b"bench of lookups")


def figures() -> Iterator[Figure]:
    """Milliseconds per lookup."""
    yield from scheduler_thread()
    directory = BUILD / "bench" / "lookups"
    with TemporaryDirectory(prefix="ucm-bench-", dir="/dev/shm") as memory:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        base = StoreConfig(directories=(str(directory),), save_queue_bytes=1 << 62, save_nice=0)
        try:
            yield from prefixes("Posix", base)
            yield from prefixes("Dram", replace(base, pipeline="Dram", dram_directory=memory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def prefixes(tier: str, config: StoreConfig) -> Iterator[Figure]:
    """Lookups of a stored prefix for all ranks, one after the other, while nothing changes and after each rank's saves.

    Other instances save, as other processes than the scheduler's do.
    """
    keys = [BlockKey(os.urandom(32)) for _ in range(PREFIX)]
    busy = []
    with ExitStack() as stack:
        saving = [stack.enter_context(open_store(config, f"bench/{rank}", SMALL)) for rank in range(RANKS)]
        asked = [stack.enter_context(open_store(config, f"bench/{rank}", None)) for rank in range(RANKS)]
        for store in saving:
            save(store, keys, SMALL)
        _prefix(asked, keys)
        quiet = [_prefix(asked, keys) for _ in range(ROUNDS)]
        for _ in range(ROUNDS):
            for store in saving:
                save(store, [BlockKey(os.urandom(32))], SMALL)
            busy.append(_prefix(asked, keys))
    for what, seconds in (("", quiet), (", after saves", busy)):
        value = float(np.median(seconds)) * 1e3
        name = f"{tier}: lookup of {PREFIX:,} blocks, {RANKS} ranks{what}: median"
        yield Figure(name, value, "ms", MOST_PREFIX_MS, {"ms": [1e3 * one for one in seconds]})


def _prefix(stores: list[KVStore], keys: list[BlockKey]) -> float:
    began = time.perf_counter()
    for store in stores:
        if store.lookup_on_prefix(keys) < len(keys):
            raise RuntimeError("a stored block was not found")
    return time.perf_counter() - began


def scheduler_thread() -> Iterator[Figure]:
    """Milliseconds of the scheduler's thread per request, the median and the slowest in 100."""
    directory = BUILD / "bench" / "lookups"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    config = StoreConfig(directories=(str(directory),), save_queue_bytes=1 << 62, save_nice=0)
    goes_on = threading.Event()
    try:
        with open_store(config, "bench", GEOMETRY) as store:
            for number in range(REQUESTS):
                save(store, keys_of(number), GEOMETRY)
            with Scheduler(store) as scheduler:
                yield from _quantiles("a miss", [scheduler.ask(-1 - number) for number in range(REQUESTS)])
                yield from _quantiles("a hit", [scheduler.ask(number) for number in range(REQUESTS)])
                yield from _quantiles("a hit that is staged", [scheduler.ask(number) for number in range(REQUESTS)])
            with Scheduler(_behind(store, lambda: time.sleep(SLOW))) as scheduler:
                yield from _quantiles("a slow medium", [scheduler.ask(number) for number in range(REQUESTS)])
            with Scheduler(_behind(store, goes_on.wait)) as scheduler:
                yield from _quantiles("a frozen medium", [scheduler.ask(number) for number in range(REQUESTS)])
                goes_on.set()
    finally:
        goes_on.set()
        shutil.rmtree(directory, ignore_errors=True)


def _quantiles(what: str, seconds: list[float]) -> Iterator[Figure]:
    for name, part in (("median", 0.5), ("slowest in 100", 0.99)):
        value = float(np.quantile(seconds, part)) * 1e3
        yield Figure(f"scheduler's thread per lookup, {what}: {name}", value, "ms", MOST_MS)


def keys_of(number: int) -> list[BlockKey]:
    """Return the keys of a request's blocks."""
    return [BlockKey(number.to_bytes(16, "big", signed=True) + place.to_bytes(16, "little")) for place in range(BLOCKS)]


def _behind(store: KVStore, wait: Callable[[], object]) -> KVStore:
    """Return the store with delayed lookups."""

    def prefix(keys: list[BlockKey]) -> int:
        wait()
        return store.lookup_on_prefix(keys)

    found = create_autospec(KVStore, instance=True)
    found.lookup_on_prefix.side_effect = prefix
    found.load.side_effect = store.load
    return cast("KVStore", found)


class _Named(BlockKeys):
    """Keys that requests already have."""

    def __init__(self) -> None:
        """Hash nothing."""

    def of(self, request: Any, block_size: int, first: int = 0) -> list[bytes]:
        del block_size
        return cast("list[bytes]", request.keys[first:])

    def is_ready(self, request: Any) -> bool:
        del request
        return True

    def wait(self, seconds: float) -> None:
        pass

    def may_change(self, request: Any) -> bool:
        del request
        return False

    def is_same(self, request: Any) -> bool:
        del request
        return True

    def note(self, request: Any) -> None:
        del request

    def is_invalidated(self, request: Any) -> bool:
        del request
        return False

    def forget(self, request_id: str) -> None:
        pass


class Scheduler:
    """The scheduler side of an engine with one rank and one group."""

    def __init__(self, store: KVStore) -> None:
        groups = CacheGroups((CacheGroup(0, TOKENS, None, {}, ()),))
        slab = Slab((REQUESTS + 1) * BLOCKS * GEOMETRY.nbytes, 1)
        self._stager = Stager(groups, slab, DEADLINE, rest_seconds=3600.0)
        counters = ConnectorCounters(export=False)
        self._side = PrefixCacheScheduler(groups, _Named(), self._stager, counters, PlanningOptions(batches=1))
        self._asked = 0
        self._stager.begin({0: [store]}, {0: [GEOMETRY]})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stager.close()

    def ask(self, number: int) -> float:
        """Return the seconds that one request takes of this thread."""
        self._asked += 1
        tokens = BLOCKS * TOKENS
        request: Any = SimpleNamespace(
            request_id=f"{self._asked}", keys=keys_of(number), num_tokens=tokens + 1, num_prompt_tokens=tokens + 1
        )
        spent, answer = 0.0, None
        while answer is None:
            began = time.perf_counter()
            answer = self._side.matched_tokens(request, 0)
            spent += time.perf_counter() - began
            if answer is None:
                time.sleep(STEP)
        request.num_computed_tokens = 0
        self._side.finished(request)
        return spent
