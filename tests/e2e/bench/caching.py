"""What naming, finding, storing and loading blocks costs, each beside its plain counterpart in the same run."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from tests.e2e.bench.figure import Figure
from transforms.pipeline.package import BUILD
from ucm.hashing.bench import measure
from ucm.store.bench import BESIDE, Workload, bench, for_bench
from ucm.store.bench_lookup import bench_lookup
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

#: A plain file's speed may be this many times the store's, checksums included.
SHARE = 1 / 0.9
MIB = 1 << 20


def hashing() -> Iterator[Figure]:
    """Microseconds per block of each size, against chained MD5 over pickled tuples."""
    for cost in measure():
        size = cost.block_size
        detail = {"md5_us": cost.md5_us, "ours_us": cost.ours_us, "growing_us": cost.ours_growing_us}
        yield Figure(f"hash of {size} tokens, to chained MD5", cost.ours_us / cost.md5_us, "", 0.5, detail)
        yield Figure(f"{size} tokens, added to vLLM's hashes", cost.vllm_us, "µs", 0.1)


def storing() -> Iterator[Figure]:
    """The Posix store on the build directory's file system: transfers, lookups among 1,000,000 blocks, opening."""
    directory = BUILD / "bench" / "store"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    config = for_bench(StoreConfig(directories=(str(directory),)))
    try:
        found = bench(config, Workload(shard_nbytes=MIB // 4))
        for operation, beside in BESIDE.items():
            if operation in found.seconds:
                _, share = found.ratio(operation, beside)
                detail = {name: found.rate(name)[1] for name in found.seconds}
                yield Figure(f"store: {operation}, plain {beside} to it", 1 / share, "", SHARE, detail)
        lookups = bench_lookup(config)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for what, seconds, part, most in (
        ("store: lookup of 1,000 ids among 1,000,000, median", lookups.known, 0.5, 1.0),
        ("store: lookup of 1,000 ids among 1,000,000, slowest in 100", lookups.known, 0.99, 5.0),
        ("store: lookup by a new instance, median", lookups.first, 0.5, None),
        ("store: opening with 1,000,000 blocks", lookups.opening, 0.5, 2000.0),
    ):
        yield Figure(what, lookups.quantile(seconds, part) * 1e3, "ms", most)
