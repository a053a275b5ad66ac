"""The costs of hashing and looking up blocks."""

from __future__ import annotations

import hashlib
import pickle
import random
import shutil
import time
from functools import partial
from typing import TYPE_CHECKING

from tests.e2e.bench.figure import Figure
from transforms.place import BUILD
from ucm.hashing.request_hasher import RequestHasher
from ucm.store.bench import bench_lookup, for_bench
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def hashing() -> Iterator[Figure]:
    """Microseconds per block of each size, against upstream UCM's chained MD5 over pickled (parent, tokens, extras)."""
    numbers = random.Random(0)  # noqa: S311 - the same tokens each time
    tokens, hasher = [numbers.randrange(128_000) for _ in range(16_384)], RequestHasher(b"bench")
    for size in (16, 128):
        ways: dict[str, Callable[[list[int], int], object]] = {
            "md5_us": _chained_md5,
            "ours_us": hasher.generate_block_hashes,
            "growing_us": partial(_grow, hasher),
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(30):
            for name, way in ways.items():
                began = time.perf_counter()
                way(tokens, size)
                best[name] = min(best[name], (time.perf_counter() - began) * size / len(tokens) * 1e6)
        yield Figure(f"hash of {size} tokens, to chained MD5", best["ours_us"] / best["md5_us"], "", 0.5, best)
        yield Figure(f"hash of {size} tokens", best["ours_us"], "µs", 3.0)


def _chained_md5(tokens: list[int], size: int) -> None:
    parent = b"bench"
    for start in range(0, len(tokens) - size + 1, size):
        block = pickle.dumps((parent, tuple(tokens[start : start + size]), None), protocol=pickle.HIGHEST_PROTOCOL)
        parent = hashlib.md5(block, usedforsecurity=False).digest()


def _grow(hasher: RequestHasher, tokens: list[int], size: int) -> None:
    """Hash block by block, as a request grows."""
    hashes = hasher.start(size)
    known: list[int] = []
    for start in range(0, len(tokens), size):
        known += tokens[start : start + size]
        hashes.extend(known)


def names() -> Iterator[Figure]:
    """Lookups among 1,000,000 blocks, and opening; files are in the build directory."""
    directory = BUILD / "bench" / "names"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        lookups = bench_lookup(for_bench(StoreConfig(directories=(str(directory),))))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for what, seconds, part, most in (
        ("store: lookup of 64 ids among 1,000,000, median", lookups.found, 0.5, 1.0),
        ("store: lookup of 64 ids among 1,000,000, slowest in 100", lookups.found, 0.99, 5.0),
        ("store: opening with 1,000,000 blocks", lookups.opening, 0.5, 2000.0),
    ):
        yield Figure(what, lookups.quantile(seconds, part) * 1e3, "ms", most)
