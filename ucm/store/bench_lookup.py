"""Measure lookups in a store of many blocks, and opening it."""

from __future__ import annotations

import os
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ucm.store.base import BlockKey
from ucm.store.factory import open_store
from ucm.store.posix.index import INDEX_THREAD, WORTH
from ucm.store.posix.layout import Layout
from ucm.store.posix.paths import DIRECTORY_MODE, FILE_MODE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.store.config import StoreConfig


_PAUSE = 0.01


@dataclass(frozen=True)
class LookupFigures:
    """Measured seconds; each list has one entry per call."""

    stored: int  #: blocks in the store
    asked: int  #: keys per call
    opening: list[float]  #: opening the store and looking up one key
    first: list[float]  #: existing keys, looked up in an instance without an index
    known: list[float]  #: existing keys, looked up for the first time after the names were listed
    prefix: list[float]  #: as ``known``, by ``lookup_on_prefix``
    missing: list[float]  #: keys that do not exist

    @staticmethod
    def quantile(seconds: list[float], part: float) -> float:
        """Return a quantile of the seconds, for instance the median for 0.5."""
        return float(np.quantile(seconds, part))


def bench_lookup(
    config: StoreConfig,
    stored: int = 1_000_000,
    asked: int = 1_000,
    calls: int = 200,
    progress: Callable[[int], None] = lambda _: None,
) -> LookupFigures:
    """Measure lookups in a temporary namespace.

    The blocks are empty files, spread over the store's directories, because a lookup reads only directory entries.

    Args:
        config: A store with one directory.
        stored: The number of blocks in the store.
        asked: The number of keys per call.
        calls: The number of calls.
        progress: Called with the number of blocks made so far.
    """
    namespace = f"bench-lookup-{os.getpid()}"
    layout = Layout(config.directories[0], namespace)
    chance = np.random.default_rng(1)
    digests = chance.bytes(32 * stored)
    keys = [BlockKey(digests[at : at + 32]) for at in range(0, 32 * stored, 32)]
    try:
        layout.make()
        for bucket in range(256):
            Path(layout.base, f"{bucket:02x}").mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        for number, key in enumerate(keys):
            os.close(os.open(layout.block(key), os.O_WRONLY | os.O_CREAT, FILE_MODE))
            if number % 1000 == 0:
                progress(number)
        figures = LookupFigures(stored, asked, [], [], [], [], [])
        for _ in range(calls):
            some, nowhere = _sample(chance, keys, asked), [BlockKey(chance.bytes(32)) for _ in range(asked)]
            began = time.perf_counter()
            with open_store(config, namespace, None) as store:
                store.lookup(keys[:1])
                figures.opening.append(time.perf_counter() - began)
                _measure(figures.first, store.lookup, some)
                _measure(figures.missing, store.lookup, nowhere)
        with open_store(config, namespace, None) as store:
            for _ in range(WORTH // asked + 1):
                store.lookup(_sample(chance, keys, asked))
            while any(thread.name == INDEX_THREAD for thread in threading.enumerate()):
                time.sleep(_PAUSE)
            for _ in range(calls):
                _measure(figures.known, store.lookup, _sample(chance, keys, asked))
                _measure(figures.prefix, store.lookup_on_prefix, _sample(chance, keys, asked))
        return figures
    finally:
        shutil.rmtree(layout.base, ignore_errors=True)


def _sample(chance: np.random.Generator, keys: list[BlockKey], count: int) -> list[BlockKey]:
    return [keys[index] for index in chance.choice(len(keys), count, replace=False)]


def _measure(seconds: list[float], way: Callable[[Sequence[BlockKey]], object], keys: list[BlockKey]) -> None:
    began = time.perf_counter()
    way(keys)
    seconds.append(time.perf_counter() - began)
