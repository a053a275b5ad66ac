"""How much may wait for being written, where dumps queue ahead of the store and not in it."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from ucm.store.errors import too_far_behind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockKey
    from ucm.store.errors import StoreFullError


class DumpRoom:
    """Lets blocks in until their bytes reach the limit, and remembers those that it turned away.

    One thread asks for room; any other gives it back.

    Args:
        limit: Bytes that may wait or be under way.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = Lock()
        self._taken = 0
        self._refused: set[BlockKey] = set()

    def take(self, keys: Sequence[BlockKey], nbytes: int) -> list[int]:
        """Room for blocks of this many bytes each; something is let in whenever nothing waits.

        A block that one layer was refused of cannot become whole: its further layers leave their room to others.

        Returns:
            The places in ``keys`` of those that have room.
        """
        places = []
        with self._lock:
            for place, key in enumerate(keys):
                if key in self._refused:
                    continue
                if self._taken and self._taken + nbytes > self._limit:
                    self._refused.add(key)
                    continue
                self._taken += nbytes
                places.append(place)
        return places

    def give_back(self, nbytes: int) -> None:
        """These bytes wait no longer."""
        with self._lock:
            self._taken -= nbytes

    def forget(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Those of the keys that were refused; they may be dumped anew."""
        found = self._refused.intersection(keys)
        self._refused -= found
        return found

    def error(self) -> StoreFullError:
        """Why there was no room."""
        return too_far_behind(self._limit)
