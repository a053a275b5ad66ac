"""A miniature of vLLM's KV-cache manager: blocks in least-recently-freed order, found by prefix keys."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.integration.vllm.connector.kv_cache import longest_hit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.ucm.integration.vllm.connector.simulation.request import Request
    from tests.ucm.integration.vllm.connector.simulation.truth import Keys
    from ucm.integration.vllm.connector.kv_cache import CacheGroups

#: Replaces a block that slid out of the window in a request's list.
NULL = 0


@dataclass(frozen=True)
class Blocks:
    """vLLM's ``KVCacheBlocks``."""

    ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.ids


class Pool:
    """All groups' blocks; block 0 is never allocated.

    Args:
        count: The number of blocks, including the null block.
        groups: The model's groups.
        keys: The block keys.
        caching: Whether prefix caching is on.
    """

    def __init__(self, count: int, groups: CacheGroups, keys: Keys, *, caching: bool) -> None:
        self.groups = groups
        self._keys = keys
        self._caching = caching
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))
        self._users = [0] * count
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._cached: dict[tuple[int, bytes], dict[int, None]] = {}
        self.of: dict[str, list[list[int]]] = {}

    def cached_prefix(self, request: Request) -> tuple[int, list[list[int]]]:
        """Return the tokens with cached KV, and their blocks by group."""
        chains = [self._keys.chain(request.all_token_ids, group.block_size) for group in self.groups.groups]
        rows = [[(index, key) in self._cached for key in chain] for index, chain in enumerate(chains)]
        hit = longest_hit(self.groups.groups, rows, request.num_tokens - 1, self.groups.alignment)
        blocks = []
        for index, group in enumerate(self.groups.groups):
            end, first = hit // group.block_size, group.first_needed(hit)
            found = [next(iter(self._cached[index, key])) for key in chains[index][first:end]]
            blocks.append([NULL] * first + found)
        return hit, blocks

    def admit(self, request: Request, had: list[list[int]], computed: int, new: int, *, caches: bool = True) -> bool:
        """Allocate a request's blocks for its computed tokens, some of which it has, and for new ones.

        Args:
            request: The request.
            had: Its existing blocks, by group.
            computed: Its computed tokens.
            new: Those to compute.
            caches: Whether its blocks may be found by others at once.

        Returns:
            Whether there was room; if not, nothing has changed.
        """
        taken = [block for row in had for block in row if block != NULL]
        fresh = 0
        for group, row in zip(self.groups.groups, had, strict=True):
            skipped = max(group.first_needed(computed), len(row))
            fresh += -(-(computed + new) // group.block_size) - skipped
        reserved = len({block for block in taken if not self._users[block]})
        if fresh > len(self._free) - reserved:
            return False
        self._use(taken)
        rows = [list(row) for row in had]
        for group, row in zip(self.groups.groups, rows, strict=True):
            row.extend([NULL] * (group.first_needed(computed) - len(row)))
        self.of[request.request_id] = rows
        self.grow(request, computed, new, caches=caches)
        return True

    def grow(
        self,
        request: Request,
        computed: int,
        new: int,
        lookahead: int = 0,
        *,
        certain: int | None = None,
        caches: bool = True,
    ) -> list[list[int]] | None:
        """Free the blocks that slid out of a window, and allocate blocks for new tokens.

        Args:
            request: The request.
            computed: Its computed tokens.
            new: Those to compute.
            lookahead: Room after them for drafts.
            certain: The computed tokens that cannot be rejected, by which a window slides; default: all.
            caches: Whether its blocks may be found by others at once.

        Returns:
            The new blocks by group; None if there is no room.
        """
        rows = self.of[request.request_id]
        for group, row in zip(self.groups.groups, rows, strict=True):
            slid = group.first_needed(computed if certain is None else certain)
            for index in reversed(range(min(slid, len(row)))):
                if row[index] != NULL:
                    self._release([row[index]])
                    row[index] = NULL
        end = computed + new + lookahead
        wanted = [-(-end // g.block_size) - len(row) for g, row in zip(self.groups.groups, rows, strict=True)]
        if sum(max(count, 0) for count in wanted) > len(self._free):
            return None
        grown = [self._take(max(count, 0)) for count in wanted]
        for row, more in zip(rows, grown, strict=True):
            row.extend(more)
        if caches:
            self.cache(request, min(computed + new, request.num_tokens))
        return grown

    def cache(self, request: Request, computed: int) -> None:
        """Make the full blocks of these tokens findable by their keys."""
        if not self._caching:
            return
        for index, (group, row) in enumerate(zip(self.groups.groups, self.of[request.request_id], strict=True)):
            keys = self._keys.chain(request.all_token_ids[:computed], group.block_size)
            for key, block in zip(keys, row, strict=False):
                if block != NULL and block not in self._key_of:
                    self._key_of[block] = (index, key)
                    self._cached.setdefault((index, key), {})[block] = None

    def free(self, request: Request) -> None:
        """Free a request's blocks; the last ones are reused first."""
        for row in self.of.pop(request.request_id, []):
            self._release([block for block in reversed(row) if block != NULL])

    def evict(self, blocks: Iterable[int]) -> None:
        """Remove these blocks from the prefix cache."""
        for block in blocks:
            self._forget(block)

    def fits(self, request: Request, had: list[list[int]], reserved: int) -> bool:
        """Return whether a whole request fits, with some blocks reserved."""
        return self._missing(request, had) <= len(self._free) - reserved

    def still_needed(self, request: Request) -> int:
        """Return the number of blocks that a request still needs."""
        return self._missing(request, self.of[request.request_id])

    def _missing(self, request: Request, rows: list[list[int]]) -> int:
        whole = [-(-(request.num_tokens + 1) // group.block_size) for group in self.groups.groups]
        unused = sum(not self._users[block] for row in rows for block in row if block != NULL)
        return sum(max(0, count - len(row)) for count, row in zip(whole, rows, strict=True)) + unused

    @property
    def in_use(self) -> int:
        """The number of allocated blocks."""
        return len(self._users) - 1 - len(self._free)

    def _use(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self._users[block]:
                del self._free[block]
            self._users[block] += 1

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def _take(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            self._forget(block)
            self._users[block] = 1
            taken.append(block)
        return taken

    def _forget(self, block: int) -> None:
        known = self._key_of.pop(block, None)
        if known is not None:
            del self._cached[known][block]
            if not self._cached[known]:
                del self._cached[known]
