"""Blocks that another connector has loaded, where vLLM's ``MultiConnector`` has several.

Nobody says what such blocks are: they may be of other weights, or approximate. vLLM keeps them in its own prefix cache
like those that it computed, so they reach other requests from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Loads that are remembered; beyond, every block of vLLM's own prefix cache may be one of theirs.
MOST = 100_000


class OtherLoads:
    """Remembers where the loads of other connectors began, by the names of blocks, each of which names its prefix."""

    def __init__(self) -> None:
        self._first: set[bytes] = set()
        self._any = False

    def add(self, keys: Sequence[bytes], block: int) -> None:
        """Another connector has loaded blocks of a request.

        Args:
            keys: Those of the request's whole blocks.
            block: The first that is not all ours. If it is not whole yet it has no name, and the one before stands for
                it.
        """
        begins = keys[block : block + 1] or keys[max(block - 1, 0) : block]
        self._first.update(begins)
        self._any |= not begins or len(self._first) > MOST

    def may_be_in(self, keys: Sequence[bytes]) -> bool:
        """Whether some of a request's blocks, which vLLM's own prefix cache had, may have come from another one."""
        return bool(keys) and (self._any or not self._first.isdisjoint(keys))

    def rename(self) -> None:
        """Blocks have other names from now on."""
        self._any |= bool(self._first)
        self._first.clear()

    def forget(self) -> None:
        """Nothing is in vLLM's own prefix cache any more."""
        self._first.clear()
        self._any = False
