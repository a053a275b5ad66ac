"""Tell routers which blocks are in the store, by vLLM's own KV-cache events.

A block is announced once all of its ranks have reported that it is visible, or when it is loaded. The event has all
that a router needs to know the block by: its tokens, its parent, vLLM's own hash where it has one, and where it lies.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ucm.hashing.vllm_hashes import has_hashes
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ucm.integration.vllm.connector.groups import CacheGroup
    from ucm.store.base import BlockKey

#: Blocks that were planned to be saved and are not reported yet; the oldest are forgotten beyond it.
MOST_PENDING = 1 << 16
#: For each of our tiers, vLLM's words for its medium and for its place relative to this engine.
PLACES = {
    "dram": ("CPU", "LOCAL"),
    "posix": ("STORAGE", None),
    "redis": ("STORAGE", "REMOTE"),
    "s3": ("STORAGE", "REMOTE"),
}
#: Blocks that workers have made visible, by group and key: the tier by each rank's index among those that save a part.
Stored = dict[tuple[int, "BlockKey"], dict[int, str]]


@dataclass(slots=True)
class _Pending:
    """A block that is being saved: its number in the order of plans, its event, and its tier by rank."""

    number: int
    about: dict[str, Any]
    tiers: dict[int, str] = field(default_factory=dict)


class StoreEvents:
    """Collects events on the scheduler side, for one step after the other.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        ranks: For each KV-cache group, how many ranks save a part of each block.
        module: vLLM's module with the classes of events.
        convert: vLLM's conversion of a block hash for events; None in releases without it.
        kind_of: vLLM's name for the kind of attention of a ``KVCacheSpec``; None in releases without it.
    """

    def __init__(
        self,
        vllm_config: Any,
        ranks: Mapping[int, int],
        module: Any,
        convert: Callable[[bytes], Any] | None = None,
        kind_of: Callable[[Any], Any] | None = None,
    ) -> None:
        self._ranks = ranks
        self._module = module
        self._fields = frozenset(module.BlockStored.__struct_fields__)
        cache = vllm_config.cache_config
        self._hash_size = getattr(cache, "hash_block_size", None) or cache.block_size
        self._convert, self._kind_of = convert, kind_of
        self._number = 0
        self._pending: OrderedDict[tuple[int, BlockKey], _Pending] = OrderedDict()
        self._events: list[Any] = []

    def saving(
        self, request: Any, group: CacheGroup, first: int, keys: Sequence[BlockKey], parent: BlockKey | None
    ) -> None:
        """Note blocks that are going to be saved.

        Args:
            request: vLLM's request.
            group: The KV-cache group.
            first: The index of the first block in the request.
            keys: The blocks, in order.
            parent: The block before the first one, if there is one.
        """
        for key, about in self._describe(request, group, first, keys, parent):
            self._number += 1
            self._pending.setdefault((group.index, key), _Pending(self._number, about))
            self._pending.move_to_end((group.index, key))
        while len(self._pending) > MOST_PENDING:
            self._pending.popitem(last=False)

    def loading(
        self,
        request: Any,
        group: CacheGroup,
        first: int,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        tiers: Sequence[str],
    ) -> None:
        """Announce blocks that were found in the store; ``tiers`` names the tier of each, see ``saving``."""
        for (_, about), tier in zip(self._describe(request, group, first, keys, parent), tiers, strict=False):
            self._announce(about, tier)

    def stored(self, blocks: Stored) -> None:
        """Process the workers' report of blocks that have become visible; parents are announced first."""
        ready = []
        for name, tiers in blocks.items():
            pending = self._pending.get(name)
            if pending is not None:
                pending.tiers.update(tiers)
                if len(pending.tiers) >= self._ranks[name[0]]:
                    ready.append(self._pending.pop(name))
        for one in sorted(ready, key=lambda pending: pending.number):
            tier, *others = set(one.tiers.values())
            self._announce(one.about, "" if others else tier)

    def start_anew(self) -> None:
        """Announce that no block is found any more, because new keys are used from now on."""
        self._pending.clear()
        self._events = [self._module.AllBlocksCleared()]

    def take(self) -> list[Any]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def _describe(
        self, request: Any, group: CacheGroup, first: int, keys: Sequence[BlockKey], parent: BlockKey | None
    ) -> list[tuple[BlockKey, dict[str, Any]]]:
        """Return what an event says of each block, except its tier; nothing of blocks that tokens do not identify.

        As with vLLM's own offloading, blocks within sliding windows are not announced: alone they help no request.
        """
        inputs = ("mm_features", "mm_hashes", "cache_salt", "prompt_embeds")
        if group.window is not None or any(getattr(request, name, None) for name in inputs):
            return []
        size, adapter = group.block_size, getattr(request, "lora_request", None)
        names: list[Any] = [parent, *keys]
        if has_hashes(request) and size == self._hash_size:
            hashes = [None, *request.block_hashes][first : first + len(keys) + 1]
            names = [one if one is None or self._convert is None else self._convert(one) for one in hashes]
        kind = None if self._kind_of is None or group.spec is None else self._kind_of(group.spec).value
        found = []
        for at, (key, before, name) in enumerate(zip(keys, names, names[1:], strict=False), first):
            about = {
                "block_hashes": [name],
                "parent_block_hash": before,
                "token_ids": list(request.all_token_ids[at * size : (at + 1) * size]),
                "block_size": size,
                "lora_id": None if adapter is None else adapter.lora_int_id,
                "lora_name": None if adapter is None else adapter.lora_name,
                "group_idx": group.index,
                "kv_cache_spec_kind": kind,
            }
            found.append((key, about))
        return found

    def _announce(self, about: dict[str, Any], tier: str) -> None:
        medium, locality = PLACES.get(tier, ("STORAGE", None))
        said = {**about, "medium": medium, "locality": locality, "ownership": tier or None}
        self._events.append(self._module.BlockStored(**{name: said[name] for name in said if name in self._fields}))


def store_events(
    vllm_config: Any, ranks: Mapping[int, int], *, wanted: bool, takes_events: bool, hears_workers: bool
) -> StoreEvents | None:
    """Return the collector of events; None unless they are wanted and this vLLM can have them, which is logged.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        ranks: See ``StoreEvents``.
        wanted: The setting ``kv_events``.
        takes_events: Whether vLLM asks connectors for events.
        hears_workers: Whether workers can report to the scheduler side.
    """
    if not wanted:
        return None
    published = getattr(getattr(vllm_config, "kv_events_config", None), "enable_kv_cache_events", False)
    if takes_events and hears_workers and published:
        return StoreEvents(
            vllm_config,
            ranks,
            import_module("vllm.distributed.kv_events"),
            getattr(import_module("vllm.v1.core.kv_cache_utils"), "maybe_convert_block_hash", None),
            getattr(import_module("vllm.v1.kv_cache_interface"), "get_kv_cache_spec_kind", None),
        )
    reason = "vLLM publishes none: set kv_events_config" if takes_events and hears_workers else "this vLLM cannot"
    get_logger(__name__).warning("[UCM.Connector] kv_events is set, but no events are published: %s", reason)
    return None
