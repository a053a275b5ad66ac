"""Blocks alone and in chunks on real servers, beside a bare client that moves values of a chunk's size.

The store has the server as its only tier, with headers and checksums. The bare client has neither: for Redis, a socket
in each of as many threads as the store uses; for S3, obstore with as many requests at the same time. All move the same
bytes, in turns.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import obstore

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.redis_values import Bare
from tests.e2e.bench.store_figures import LayeredWorkload, SideFigures, measured
from tests.ucm.store.servers import RedisServer, S3Server
from ucm.store.base import BlockKey
from ucm.store.bench import for_bench
from ucm.store.config import StoreConfig
from ucm.store.remote.tiers import S3Options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Executor


#: Turns of two rounds each; blocks of 16 tokens, their bytes, and how many are a chunk of 256 tokens.
TURNS, BLOCKS, NBYTES, CHUNK = 4, 512, (1 << 20) // 8, 16
ALONE, CHUNKS, BARE = "blocks", "chunks", "bare"
LEAST_OF_BARE, LEAST_OF_BLOCKS = 0.8, 5
_SAVE, _LOAD = "save", "load hot"
#: Seconds for a call; nothing is frozen here.
_LONG = 60.0


class BareS3:
    """obstore, and a copy to where the value is wanted.

    Args:
        store: Its client.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def save(self, key: BlockKey, value: memoryview) -> None:
        """One PUT."""
        obstore.put(self._store, f"bare/{key.hex()}", value, use_multipart=False)

    def load(self, key: BlockKey, into: memoryview) -> None:
        """One GET."""
        into[:] = obstore.get(self._store, f"bare/{key.hex()}").bytes()

    def drop(self, key: BlockKey) -> None:
        """One DELETE."""
        obstore.delete(self._store, f"bare/{key.hex()}")


def figures(turns: int = TURNS) -> Iterator[Figure]:
    """Time of chunks for that of a bare client, and of blocks alone."""
    with TemporaryDirectory(prefix="ucm-bench-") as directory, ExitStack() as stack:
        redis = RedisServer(Path(directory, "redis"), "--maxmemory", "1gb")
        stack.callback(redis.kill)
        config = _alone("Redis", {"address": redis.address})
        clients = [Bare(redis.port) for _ in range(max(config.save_threads, config.load_threads))]
        bare: Mapping[str, Sequence[Bare]] = {
            _SAVE: clients[: config.save_threads],
            _LOAD: clients[: config.load_threads],
        }
        yield from _figures(config, bare, turns)
        s3 = S3Server(Path(directory, "s3"), volume_mb=1024)
        stack.callback(s3.kill)
        options = s3.options(Path(directory, "secret"))
        parallel = [BareS3(s3.store())] * S3Options(**options).parallel
        yield from _figures(_alone("S3", options), {_SAVE: parallel, _LOAD: parallel}, turns)


def _alone(name: str, options: dict[str, Any]) -> StoreConfig:
    return for_bench(StoreConfig(pipeline=name, tiers={name: {**options, "timeout": _LONG, "transfer_timeout": _LONG}}))


def _figures(config: StoreConfig, clients: Mapping[str, Sequence[Bare | BareS3]], turns: int) -> Iterator[Figure]:
    alone = LayeredWorkload(BLOCKS, NBYTES, 2)
    chunks = replace(alone, blocks=BLOCKS // CHUNK, block_nbytes=NBYTES * CHUNK)
    works = {ALONE: alone, CHUNKS: chunks}
    found = SideFigures(chunks)
    for turn in range(turns):
        for side in works if turn % 2 else reversed(works):
            found.merge(measured(config, works[side]), f"{side} ")
            if side == CHUNKS:
                for _ in range(alone.rounds):
                    _measure_bare(found, clients)
    for operation in (_SAVE, _LOAD):
        sides = (*works, BARE)
        rates = {side: found.rate(f"{side} {operation}")[1] for side in sides}
        rates |= {f"{side}, processor s/GB": found.processor_per_gb(f"{side} {operation}") for side in sides}
        for beside, least in ((BARE, LEAST_OF_BARE), (ALONE, LEAST_OF_BLOCKS)):
            ratio = found.ratio(f"{CHUNKS} {operation}", f"{beside} {operation}")[1]
            name = f"{config.pipeline}: {operation} of {CHUNKS}, seconds to {beside}"
            yield Figure(name, 1 / ratio, "", 1 / least, rates)


def _measure_bare(found: SideFigures, clients: Mapping[str, Sequence[Bare | BareS3]]) -> None:
    """Move all values once in each direction, each client in a thread of its own.

    Like the store's, they have new names, and are deleted: to replace a value takes a server less time.
    """
    work = found.workload
    size, keys = work.geometry.nbytes, [BlockKey(os.urandom(32)) for _ in range(work.blocks)]
    source = memoryview(np.random.default_rng(0).bytes(work.nbytes))
    target = memoryview(bytearray(work.nbytes))
    for operation, memory in ((_SAVE, source), (_LOAD, target)):
        sides = clients[operation]
        values = [memory[at : at + size] for at in range(0, work.nbytes, size)]
        shares = [(keys[first :: len(sides)], values[first :: len(sides)]) for first in range(len(sides))]
        with ThreadPoolExecutor(len(sides)) as pool:
            found.add(f"{BARE} {operation}", partial(_all, pool, sides, operation, shares))
    if source != target:
        raise RuntimeError("a bare client has received other bytes than it sent")
    for key in keys:
        clients[_SAVE][0].drop(key)


def _move(side: Bare | BareS3, operation: str, keys: Sequence[BlockKey], values: Sequence[memoryview]) -> None:
    for key, value in zip(keys, values, strict=True):
        (side.save if operation == _SAVE else side.load)(key, value)


def _all(pool: Executor, sides: Sequence[Bare | BareS3], operation: str, shares: Sequence[tuple[Any, Any]]) -> None:
    for _ in pool.map(_move, sides, [operation] * len(sides), *zip(*shares, strict=True)):
        pass
