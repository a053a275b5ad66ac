"""How much of a request the store has: the longest prefix that every group and every rank can continue from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from ucm.integration.vllm.connector.groups import longest_hit
from ucm.integration.vllm.connector.holding import Hold

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.integration.vllm.connector.groups import CacheGroup, CacheGroups
    from ucm.integration.vllm.connector.holding import BlockHolder
    from ucm.store.base import BlockKey, KVStore


class KeySource(Protocol):
    """Gives requests the keys of their blocks."""

    def of(self, request: Any, block_size: int, first: int = 0) -> list[bytes] | None:
        """The keys of a request's whole blocks of known tokens, from ``first`` on; None if it must not be cached."""

    def forget(self, request_id: str) -> None:
        """The request has ended."""


class PrefixLookup:
    """Looks requests up in the stores.

    Args:
        groups: The model's KV-cache groups.
        stores: For each group, the stores of all ranks that keep blocks of it, opened for lookup.
        key_source: The keys of a request's blocks.
        holder: Verifies and holds what is promised, where a broken promise could not be mended; else None.
    """

    def __init__(
        self,
        groups: CacheGroups,
        stores: Mapping[int, Sequence[KVStore]],
        key_source: KeySource,
        holder: BlockHolder | None = None,
    ) -> None:
        self.groups = groups
        self.key_source = key_source
        self._stores = stores
        self._holder = holder

    def keys(self, request: Any, group: CacheGroup, first: int, last: int) -> list[BlockKey]:
        """The keys of a group's blocks from ``first`` up to, but not including, ``last``, as far as they are known."""
        keys = self.key_source.of(request, group.block_size, first) or []
        return cast("list[BlockKey]", keys[: last - first])

    def find(self, request: Any, computed: int, limit: int) -> tuple[int, Hold]:
        """How far the store reaches.

        Args:
            request: vLLM's request.
            computed: Tokens that are computed, a multiple of the groups' alignment.
            limit: The most tokens to look for, a multiple of it too.

        Returns:
            The tokens up to which KV can be had, at least ``computed``; and what was taken to hold them.
        """
        rows = [self._present(request, group, computed, limit) for group in self.groups.groups]
        while True:
            end = max(computed, longest_hit(self.groups.groups, rows, limit, self.groups.alignment))
            if self._holder is None or end == computed:
                return end, Hold()
            needed = {group.index: self.needed(group, computed, end) for group in self.groups.groups}
            wanted = {
                group.index: self.keys(request, group, needed[group.index].start, needed[group.index].stop)
                for group in self.groups.groups
            }
            hold, whole = self._holder.hold(wanted)
            lost = False
            for row, group in zip(rows, self.groups.groups, strict=True):
                for place, key in zip(needed[group.index], wanted[group.index], strict=True):
                    if key not in whole[group.index]:
                        row[place], lost = False, True
            if not lost:
                return end, hold
            self._holder.release(hold)

    def needed(self, group: CacheGroup, computed: int, end: int) -> range:
        """The blocks of a group to load in order to go on from ``end`` with ``computed`` tokens computed already."""
        return range(max(computed // group.block_size, group.first_needed(end)), end // group.block_size)

    def has(self, group: CacheGroup, keys: Sequence[BlockKey]) -> bool:
        """Whether all ranks have all these blocks."""
        return all(all(store.lookup(keys)) for store in self._stores[group.index])

    def release(self, hold: Hold) -> None:
        """Let go of what was held."""
        if self._holder is not None and hold.leases:
            self._holder.release(hold)

    def _present(self, request: Any, group: CacheGroup, computed: int, limit: int) -> list[bool]:
        """For each block of a group up to the limit, whether all ranks have it; computed ones count as had."""
        first = computed // group.block_size
        keys = self.keys(request, group, first, limit // group.block_size)
        stores = self._stores[group.index]
        if group.window is None:
            count = len(keys)
            for store in stores:
                count = store.lookup_on_prefix(keys[:count])
            return [True] * (first + count)
        rows = [store.lookup(keys) for store in stores]
        return [True] * first + [all(row) for row in zip(*rows, strict=True)]
