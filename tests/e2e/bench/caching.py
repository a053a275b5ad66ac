"""The costs of hashing and looking up blocks."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.e2e.bench.figure import Figure
from transforms.place import BUILD
from ucm.hashing.request_hasher import RequestHasher
from ucm.store.base import BlockKey
from ucm.store.bench import for_bench
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.posix.layout import Layout
from ucm.store.posix.paths import DIRECTORY_MODE, FILE_MODE

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


#: The blocks of the store, the keys of a lookup (the chunks of a prompt of 16,384 tokens), and the lookups.
STORED, ASKED, CALLS = 1_000_000, 64, 200


def names() -> Iterator[Figure]:
    """Lookups among many blocks, and opening; files are in the build directory.

    The blocks are empty files, spread over the store's directories, because a lookup reads only directory entries.
    """
    directory = BUILD / "bench" / "names"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    config, layout = for_bench(StoreConfig(directories=(str(directory),))), Layout(str(directory), "bench-lookup")
    chance = np.random.default_rng(1)
    keys = [BlockKey(chance.bytes(32)) for _ in range(STORED)]
    found, opening = [], []
    try:
        layout.make()
        for bucket in range(256):
            Path(layout.base, f"{bucket:02x}").mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        for key in keys:
            os.close(os.open(layout.block(key), os.O_WRONLY | os.O_CREAT, FILE_MODE))
        for _ in range(CALLS):
            asked = [keys[index] for index in chance.choice(STORED, ASKED, replace=False)]
            began = time.perf_counter()
            with open_store(config, "bench-lookup", None) as store:
                store.lookup(keys[:1])
                opened = time.perf_counter()
                assert store.lookup_on_prefix(asked) == ASKED
                found.append(time.perf_counter() - opened)
                opening.append(opened - began)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for what, seconds, part, most in (
        ("store: lookup of 64 ids among 1,000,000, median", found, 0.5, 1.0),
        ("store: lookup of 64 ids among 1,000,000, slowest in 100", found, 0.99, 5.0),
        ("store: opening with 1,000,000 blocks", opening, 0.5, 2000.0),
    ):
        yield Figure(what, float(np.quantile(seconds, part)) * 1e3, "ms", most)
