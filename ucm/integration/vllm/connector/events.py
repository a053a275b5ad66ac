"""Tell routers which blocks are in the store, by vLLM's own KV-cache events.

A block is announced once all of its ranks have reported that it is visible, or when it is loaded; a loaded one
again only after some time. The event has all that a router needs to know the block by: its tokens, its parent, vLLM's
own hash where it has one, and where it lies.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ucm.clock import SYSTEM
from ucm.compat import (
    adapter_of,
    block_hashes,
    cache_salt,
    has_media,
    optional,
    prompt_embeds,
    publishes_kv_events,
    vllm_module,
)
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence

    from ucm.clock import Clock
    from ucm.integration.vllm.connector.kv_cache import CacheGroup
    from ucm.store.base import BlockKey
    from ucm.vllm_types import Request, VllmConfig

#: Memory for blocks that are being saved and not reported yet; the oldest are forgotten beyond it.
MOST_PENDING_BYTES = 32 << 20
#: What such a block takes beside its tokens, about.
PENDING_BLOCK_BYTES = 1000
#: Announced blocks that are known; the oldest are forgotten beyond it.
MOST_TOLD = 1 << 16
#: After this many seconds a block may be announced again, for routers that forget what is not or have missed it.
AGAIN_SECONDS = 600.0
#: For each of our tiers, vLLM's words for its medium and for its place relative to this engine.
PLACES = {
    "dram": ("CPU", "LOCAL"),
    "posix": ("STORAGE", None),
    "redis": ("STORAGE", "REMOTE"),
    "mooncake": ("STORAGE", "REMOTE"),
    "s3": ("STORAGE", "REMOTE"),
}
#: Blocks that workers have made visible, by group and key: the tier by each rank's index among those that save a part.
Stored = dict[tuple[int, "BlockKey"], dict[int, str]]


@dataclass(slots=True)
class _Chunk:
    """What an event says of a chunk's blocks, and of one being saved its number in the order of plans and its tiers."""

    names: list[Any]
    parent: Any
    tokens: array[int]
    facts: Mapping[str, Any]  #: the same object for all chunks of a plan
    number: int = 0
    tiers: dict[int, str] = field(default_factory=dict)  #: by rank, of those that have it

    @property
    def nbytes(self) -> int:
        return PENDING_BLOCK_BYTES + self.tokens.itemsize * len(self.tokens)


class StoreEvents:
    """Collects events on the scheduler side, for one step after the other.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        ranks: For each KV-cache group, how many ranks save a part of each block.
        module: vLLM's module with the classes of events.
        convert: vLLM's conversion of a block hash for events; None in releases without it.
        kind_of: vLLM's name for the kind of attention of a ``KVCacheSpec``; None in releases without it.
        clock: Tells when a block was announced.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        ranks: Mapping[int, int],
        module: Any,
        convert: Callable[[bytes], Any] | None = None,
        kind_of: Callable[[Any], Any] | None = None,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        self._ranks = ranks
        self._module = module
        cache = vllm_config.cache_config
        self._hash_size = optional(cache, "hash_block_size") or cache.block_size
        self._convert, self._kind_of = convert, kind_of
        self._number = 0
        self._pending: OrderedDict[tuple[int, BlockKey], _Chunk] = OrderedDict()
        self._pending_bytes = 0
        #: The names of announced chunks' blocks, and when they were announced, by group, key and tier.
        self._told: OrderedDict[tuple[int, BlockKey, str], tuple[list[Any], float]] = OrderedDict()
        self._events: list[Any] = []

    def saving(
        self, request: Request, group: CacheGroup, first: int, keys: Sequence[BlockKey], parent: BlockKey | None
    ) -> None:
        """Note blocks that are going to be saved.

        Args:
            request: vLLM's request.
            group: The KV-cache group.
            first: The index of the first block in the request.
            keys: The blocks, in order.
            parent: The block before the first one, if there is one.
        """
        for at, block in self._describe(request, group, first, keys, parent):
            name = (group.index, keys[at])
            if name in self._pending:  # the ranks that have it already need not report it again
                self._pending.move_to_end(name)
                continue
            self._number += 1
            block.number = self._number
            self._pending[name] = block
            self._pending_bytes += block.nbytes
        while self._pending_bytes > MOST_PENDING_BYTES:
            self._pending_bytes -= self._pending.popitem(last=False)[1].nbytes

    def loading(
        self,
        request: Request,
        group: CacheGroup,
        first: int,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        tiers: Sequence[str],
    ) -> None:
        """Announce blocks that were found in the store; ``tiers`` names the tier of each, see ``saving``."""
        known = {at for at, (key, tier) in enumerate(zip(keys, tiers, strict=False)) if self._knows(group, key, tier)}
        if len(known) < len(keys):
            for at, block in self._describe(request, group, first, keys, parent, known):
                self._announce((group.index, keys[at], tiers[at]), block)

    def stored(self, blocks: Stored) -> None:
        """Process the workers' report of blocks that have become visible; parents are announced first."""
        ready = []
        for name, tiers in blocks.items():
            block = self._pending.get(name)
            if block is not None:
                block.tiers.update(tiers)
                if len(block.tiers) >= self._ranks[name[0]]:
                    ready.append((name, self._pending.pop(name)))
                    self._pending_bytes -= block.nbytes
        for name, block in sorted(ready, key=lambda one: one[1].number):
            tier, *others = set(block.tiers.values())
            self._announce((*name, "" if others else tier), block)

    def forget(self) -> None:
        """Take nothing as announced: with vLLM's prefix cache emptied, its event made routers forget all blocks."""
        self._told.clear()

    def start_anew(self) -> None:
        """Announce that no block is found any more, because new keys are used from now on.

        vLLM's ``AllBlocksCleared`` would also be of the blocks in its KV cache, which it may keep.
        """
        self._pending.clear()
        self._pending_bytes = 0
        names: dict[tuple[int, str], list[Any]] = {}
        for (group, _, tier), (of_chunk, _) in self._told.items():
            names.setdefault((group, tier), []).extend(of_chunk)
        self._told.clear()
        self._events = [
            _event(self._module.BlockRemoved, tier, {"block_hashes": found, "group_idx": group})
            for (group, tier), found in names.items()
        ]

    def take(self) -> list[Any]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _describe(
        self,
        request: Request,
        group: CacheGroup,
        first: int,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        known: Container[int] = (),
    ) -> Iterator[tuple[int, _Chunk]]:
        """Yield what an event says of each chunk but those ``known``; nothing of blocks that tokens do not identify.

        As with vLLM's own offloading, states and blocks within sliding windows are not announced: alone they help no
        request.
        Where vLLM hashes blocks, an event names each block of a chunk, else the chunk by its key.
        """
        more = has_media(request) or cache_salt(request) or prompt_embeds(request)[0] is not None
        if not group.needs_all or more:
            return
        size, blocks, adapter = group.chunk_tokens, 1, adapter_of(request)
        names: list[Any] = [parent, *keys]
        hashes = block_hashes(request)
        if hashes and isinstance(hashes[0], bytes) and group.block_size == self._hash_size:
            size, blocks = group.block_size, group.chunk_blocks
            hashes = hashes[max(first * blocks - 1, 0) : (first + len(keys)) * blocks]
            names = hashes if self._convert is None else [self._convert(one) for one in hashes]
            names = names if first else [None, *names]
        facts = {
            "block_size": size,
            "lora_id": None if adapter is None else adapter.lora_int_id,
            "lora_name": None if adapter is None else adapter.lora_name,
            "group_idx": group.index,
            "kv_cache_spec_kind": (
                None if self._kind_of is None or group.spec is None else self._kind_of(group.spec).value
            ),
        }
        for at in range((len(names) - 1) // blocks):
            if at not in known:
                begin, tokens = (first + at) * group.chunk_tokens, group.chunk_tokens
                before, *of_chunk = names[at * blocks : (at + 1) * blocks + 1]
                yield at, _Chunk(of_chunk, before, array("i", request.all_token_ids[begin : begin + tokens]), facts)

    def _knows(self, group: CacheGroup, key: BlockKey, tier: str) -> bool:
        """Return whether a block was announced a short time ago."""
        _, when = self._told.get((group.index, key, tier), (None, -AGAIN_SECONDS))
        return self._clock.monotonic() - when < AGAIN_SECONDS

    def _announce(self, where: tuple[int, BlockKey, str], chunk: _Chunk) -> None:
        self._told.pop(where, None)
        self._told[where] = (chunk.names, self._clock.monotonic())
        if len(self._told) > MOST_TOLD:
            self._told.popitem(last=False)
        said = {
            **chunk.facts,
            "block_hashes": chunk.names,
            "parent_block_hash": chunk.parent,
            "token_ids": list(chunk.tokens),
        }
        self._events.append(_event(self._module.BlockStored, where[2], said))


def _event(kind: Any, tier: str, said: Mapping[str, Any]) -> Any:
    """Return an event about blocks in a tier, with the fields that this release's class has."""
    medium, locality = PLACES.get(tier, ("STORAGE", None))
    said = {**said, "medium": medium, "locality": locality, "ownership": tier or None}
    return kind(**{name: said[name] for name in said if name in kind.__struct_fields__})


def store_events(
    vllm_config: VllmConfig,
    ranks: Mapping[int, int],
    *,
    wanted: bool,
    takes_events: bool,
    hears_workers: bool,
    clock: Clock = SYSTEM,
) -> StoreEvents | None:
    """Return the collector of events; None unless they are wanted and this vLLM can have them, which is logged."""
    if not wanted:
        return None
    published = publishes_kv_events(vllm_config)
    if takes_events and hears_workers and published:
        return StoreEvents(
            vllm_config,
            ranks,
            vllm_module("distributed.kv_events"),
            optional(vllm_module("v1.core.kv_cache_utils"), "maybe_convert_block_hash"),
            optional(vllm_module("v1.kv_cache_interface"), "get_kv_cache_spec_kind"),
            clock=clock,
        )
    reason = "vLLM publishes none: set kv_events_config" if takes_events and hears_workers else "this vLLM cannot"
    get_logger(__name__).warning("[UCM.Connector] kv_events is set, but no events are published: %s", reason)
    return None
