"""What the tests run in processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.ucm.store.blocks import content, fetch, pick, save
from ucm.store.factory import open_store

if TYPE_CHECKING:
    from ucm.store.base import BlockGeometry, BlockKey
    from ucm.store.config import StoreConfig


def save_and_fetch(
    config: StoreConfig, namespace: str, geometry: BlockGeometry, keys: list[BlockKey], seed: int
) -> int:
    """Save and load blocks in an order of our own: how many could be loaded in the end, none of them wrong."""
    chance = np.random.default_rng(seed)
    with open_store(config, namespace, geometry) as store:
        for block in pick(chance, keys):
            assert save(store, [block], geometry).failed == {}
            for found, data in fetch(store, pick(chance, keys, 4), geometry)[0].items():
                assert data == content(found, geometry)
        return len(fetch(store, keys, geometry)[0])
