"""Where the middles of requests lie on this host, and what dead engines have left of theirs."""

from __future__ import annotations

import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from ucm.store.posix.layout import PRIVATE, is_stale, namespaces

if TYPE_CHECKING:
    from ucm.store.config import StoreConfig

#: The first part of the namespaces: what a dead engine left can be told, and what a living one has is not evicted.
PREFIX = PRIVATE


def store_roots(config: StoreConfig) -> list[str]:
    """The directories of a store that hold its namespaces; none of others' stores."""
    tiers = [name.strip() for name in config.pipeline.split("|")]
    found = list(config.directories) if "Posix" in tiers else []
    return found + ([config.dram_directory] if {"Dram", "Cache"} & set(tiers) else [])


def remove_leftovers(root: str) -> None:
    """Delete the middles of engines that are gone: nobody can read them any more."""
    with suppress(OSError):
        for layout in namespaces(root):
            first, _, rest = layout.namespace.partition("/")
            owner = rest.rpartition("/")[0]
            if first == PREFIX and owner and is_stale(owner, 0.0, float("inf")):
                shutil.rmtree(layout.base, ignore_errors=True)
