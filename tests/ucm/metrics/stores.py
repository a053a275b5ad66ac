"""A store with only counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.store.base import TierStats


class Store:
    """The test sets its tiers."""

    def __init__(self) -> None:
        self.tiers: Mapping[str, TierStats] = {}
        self.looks = 0

    def stats(self) -> Mapping[str, TierStats]:
        self.looks += 1
        return self.tiers
