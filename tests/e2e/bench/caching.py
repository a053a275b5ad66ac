"""The costs of hashing and looking up blocks."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from tests.e2e.bench.figure import Figure
from transforms.place import BUILD
from ucm.hashing.bench import measure
from ucm.store.bench import bench_lookup, for_bench
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    from collections.abc import Iterator


def hashing() -> Iterator[Figure]:
    """Microseconds per block of each size, against chained MD5 over pickled tuples."""
    for cost in measure():
        size = cost.block_size
        detail = {"md5_us": cost.md5_us, "ours_us": cost.ours_us, "growing_us": cost.ours_growing_us}
        yield Figure(f"hash of {size} tokens, to chained MD5", cost.ours_us / cost.md5_us, "", 0.5, detail)
        yield Figure(f"hash of {size} tokens", cost.ours_us, "µs", 3.0)


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
