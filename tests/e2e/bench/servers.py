"""A frozen server below a disk: the longest stall of the scheduler's thread, and what a dump takes beside it.

The servers, the scheduler side and its threads are real. The servers are stopped by SIGSTOP.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.e2e.bench.figure import Figure, alternate
from tests.e2e.bench.lookups import GEOMETRY, MOST_MS, REQUESTS, Scheduler, keys_of
from tests.ucm.store.servers import MooncakeServer, RedisServer, S3Server
from transforms.place import BUILD
from ucm.store.base import BlockGeometry, BlockKey
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.testing.blocks import Memory, save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: A dump, how many of each kind are measured, and the goal for one beside a frozen server to one without.
BLOCKS, BLOCK, ROUNDS, MOST = 16, BlockGeometry((1 << 19,) * 8, b"bench of servers"), 15, 1.1


def figures() -> Iterator[Figure]:
    """Milliseconds of the scheduler's thread, and the times of dumps in proportion."""
    for name, serve in (("Redis", _redis), ("S3", _s3), ("Mooncake", _mooncake)):
        with TemporaryDirectory(prefix="ucm-bench-servers-") as directory:
            server, options = serve(Path(directory))
            try:
                yield from beside(name, server, options)
            finally:
                server.kill()


def beside(name: str, server: Any, options: dict[str, Any]) -> Iterator[Figure]:
    """The figures of one server."""
    directory = BUILD / "bench" / "servers"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    # Soon tried again, so that each kind of call meets the server itself, and not only its rest.
    alone = StoreConfig(directories=(str(directory),), save_queue_bytes=1 << 62, save_nice=0, rest_seconds=2.0)
    both = replace(alone, pipeline=f"Posix|{name}", tiers={name: {**options, "timeout": 0.5}})
    try:
        with ExitStack() as stack:
            store = stack.enter_context(open_store(both, "bench", GEOMETRY))
            for number in range(REQUESTS):
                save(store, keys_of(number), GEOMETRY)
            store.flush(30.0)
            scheduler = stack.enter_context(Scheduler(store))
            well = [scheduler.ask(number - REQUESTS) for number in range(REQUESTS)]
            sides = [stack.enter_context(open_store(one, "bench/dump", BLOCK)) for one in (alone, both)]
            server.freeze()
            frozen = [scheduler.ask(number - 2 * REQUESTS) for number in range(REQUESTS)]
            times = alternate([_dump(side) for side in sides], ROUNDS)
            server.thaw()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for what, seconds in (("answers", well), ("is frozen", frozen)):
        value = max(seconds) * 1e3
        label = f"scheduler's thread per lookup, {name} {what}"
        detail = {"ms": [1e3 * one for one in seconds]}
        yield Figure(f"{label}: median", float(np.median(seconds)) * 1e3, "ms", MOST_MS, detail)
        yield Figure(f"{label}: longest stall", value, "ms", None)
    without, beside_it = (float(np.median(some)) for some in times)
    detail = {"seconds without": times[0], "seconds beside it": times[1]}
    yield Figure(f"dump above a frozen {name}, to one without it", beside_it / without, "", MOST, detail)


def _dump(store: Any) -> Callable[[], float]:
    data = os.urandom(BLOCK.nbytes)

    def dump() -> float:
        transfers = [Memory(BlockKey(os.urandom(32)), BLOCK, data).transfer() for _ in range(BLOCKS)]
        began = perf_counter()
        if store.save(transfers).wait().failed:
            raise RuntimeError("a dump failed")
        return perf_counter() - began

    return dump


def _redis(directory: Path) -> tuple[Any, dict[str, Any]]:
    server = RedisServer(directory)
    return server, {"address": server.address}


def _s3(directory: Path) -> tuple[Any, dict[str, Any]]:
    server = S3Server(directory / "s3")
    return server, server.options(directory / "secret")


def _mooncake(_: Path) -> tuple[Any, dict[str, Any]]:
    server = MooncakeServer()
    return server, {"address": server.address}
