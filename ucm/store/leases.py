"""Promises that blocks stay until they were loaded.

Between a lookup that promises a block and the load that brings it lie a scheduler's step and another process. Where a
failed load can be recomputed, a promise broken by an eviction costs time only; where it cannot, a lease keeps it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.store.base import KVStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockKey, BlockTransfer, Task


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks that stay.

    Args:
        token: Names the lease, also to another process's instance that loads; it ends at ``release``, or with the
            process that took it; to other hosts, which cannot see that, when it is older than
            ``StoreConfig.stale_seconds``.
        keys: The blocks that are held: not those that were missing.
    """

    token: str
    keys: frozenset[BlockKey]


class LeasingStore(KVStore):
    """A store that can give leases."""

    @abstractmethod
    def lease(self, keys: Sequence[BlockKey], *, verify: bool = False) -> Lease:
        """Keep blocks from being evicted.

        Args:
            keys: The blocks.
            verify: Whether to read each one whole and leave out those that are damaged. This blocks until it is done;
                otherwise a lease costs three metadata operations per key at most.
        """

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Let blocks go. A lease that was never released, or is again, does no harm."""

    @abstractmethod
    def load(self, blocks: Sequence[BlockTransfer], lease: str | None = None) -> Task:
        """Like ``KVStore.load``; a lease's token makes sure that its blocks are found."""
