"""Track blocks that another connector loaded, where vLLM's ``MultiConnector`` has several.

The content of such blocks is unknown: it may come from other weights, or be approximate. vLLM keeps them in its own
prefix cache like blocks that it computed, so other requests find them there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: The most loads that are remembered; beyond that, any block of vLLM's own prefix cache may be one of theirs.
MOST = 100_000


class OtherLoads:
    """Remembers where loads of other connectors began, by block keys, each of which identifies its whole prefix."""

    def __init__(self) -> None:
        self._first: set[bytes] = set()
        self._any = False

    def add(self, keys: Sequence[bytes], block: int) -> None:
        """Note that another connector loaded blocks of a request.

        Args:
            keys: The keys of the request's full blocks.
            block: The index of the first block that is not entirely ours. A block that is not full yet has no key, so
                the block before is recorded instead.
        """
        begins = keys[block : block + 1] or keys[max(block - 1, 0) : block]
        self._first.update(begins)
        self._any |= not begins or len(self._first) > MOST

    def may_be_in(self, keys: Sequence[bytes]) -> bool:
        """Return whether another connector may have loaded some of these blocks, found in vLLM's prefix cache."""
        return bool(keys) and (self._any or not self._first.isdisjoint(keys))

    def rename(self) -> None:
        """Note that blocks get other keys from now on."""
        self._any |= bool(self._first)
        self._first.clear()

    def forget(self) -> None:
        """Note that vLLM's own prefix cache is empty."""
        self._first.clear()
        self._any = False
