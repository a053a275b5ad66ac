"""A store of others that stores other values than it is given, and vouches for them: their checksums are right."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ucm.api import BlockTransfer, KVStore, open_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.api import BlockGeometry, BlockKey, StoreConfig, Task, TierStats


class LyingStore(KVStore):
    """Files, with some values of every block in another order; ``options`` name the ``directory``."""

    def __init__(self, config: StoreConfig, namespace: str, geometry: BlockGeometry | None) -> None:
        directories = (str(config.options["directory"]),)
        self._store = open_store(replace(config, pipeline="Posix", directories=directories), namespace, geometry)

    def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        return self._store.lookup(keys)

    def lookup_on_prefix(self, keys: Sequence[BlockKey]) -> int:
        return self._store.lookup_on_prefix(keys)

    def load(self, blocks: Sequence[BlockTransfer]) -> Task:
        return self._store.load(blocks)

    def save(self, blocks: Sequence[BlockTransfer]) -> Task:
        return self._store.save([BlockTransfer(b.key, [_other(s) for s in b.slices], b.first_slice) for b in blocks])

    def flush(self, seconds: float) -> bool:
        return self._store.flush(seconds)

    def stats(self) -> Mapping[str, TierStats]:
        return self._store.stats()

    def close(self) -> None:
        self._store.close()


def _other(layer: object) -> memoryview:
    """Return a layer slice whose last quarter is that of another token."""
    values = np.frombuffer(layer, np.uint8).copy()  # type: ignore[call-overload]
    quarter = len(values) // 4
    values[-quarter:] = np.roll(values[-quarter:], 256)
    return memoryview(values)
