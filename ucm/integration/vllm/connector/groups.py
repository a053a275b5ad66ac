"""Describe KV-cache groups, the layers that share a block table, and which of their blocks a request needs.

A model with one kind of attention has one group. With hybrid KV-cache groups each group has its own block ids: full
attention needs every block of a prefix, a sliding window only the blocks that its window reaches from the prefix's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.failures import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Specifications whose blocks hold everything that their layers need of a prefix. Compared by exact class name, because
#: a subclass may keep state elsewhere.
FULL_ATTENTION = {"FullAttentionSpec", "MLAAttentionSpec"}
SLIDING_WINDOW = {"SlidingWindowSpec"}
UNIFORM = "UniformTypeKVCacheSpecs"
#: The attributes of specifications that decide how a block's bytes are read.
_SHAPE = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The properties of one KV-cache group that matter for moving its blocks.

    Args:
        index: The group's index in vLLM.
        block_size: Tokens per block.
        window: Tokens that a sliding window reaches back, including the current one; None for full attention.
        page_sizes: Bytes of a block by layer name, without padding; empty where the release does not provide them.
        layer_names: The group's layers; empty where the release does not provide them, meaning all registered ones.
        spec: vLLM's ``KVCacheSpec``; None where the release does not provide it.
    """

    index: int
    block_size: int
    window: int | None
    page_sizes: dict[str, int]
    layer_names: tuple[str, ...]
    spec: Any = None

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that two engines must have in common to read each other's blocks of this group."""
        specs = {} if self.spec is None else _layer_specs(self.spec, self.layer_names)
        layers = {name: [*_shape(spec), str(self.page_sizes[name])] for name, spec in specs.items()}
        return {"block_size": self.block_size, "window": self.window, "layers": layers}

    def first_needed(self, num_tokens: int) -> int:
        """Return the index of the first block that is still read after ``num_tokens`` computed tokens."""
        if self.window is None:
            return 0
        return max(0, num_tokens - self.window + 1) // self.block_size


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """All groups of a model.

    Args:
        groups: In vLLM's order.
        layout: vLLM's name for the order of a block's dimensions; empty where the release does not provide it.
    """

    groups: tuple[CacheGroup, ...]
    layout: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """The structure of the groups and their KV layout, as a part of the engine's identity."""
        return {"groups": [group.facts for group in self.groups], "layout": self.layout}

    @property
    def alignment(self) -> int:
        """The number of tokens at whose multiples every group has a block boundary."""
        return lcm(*(group.block_size for group in self.groups))


def cache_groups(vllm_config: Any, kv_cache_config: Any) -> CacheGroups:
    """Read the groups from vLLM's configuration.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``; None in releases that do not pass it to connectors, where a model
            with a connector has one group.

    Raises:
        UnsupportedModelError: If a group has state that cannot be restored from blocks of tokens.
    """
    if kv_cache_config is None:
        size = vllm_config.cache_config.block_size
        return CacheGroups((CacheGroup(0, size, None, {}, ()),))
    found = [_group(index, group) for index, group in enumerate(kv_cache_config.kv_cache_groups)]
    if not found:
        raise UnsupportedModelError(
            "the model has no KV cache", where="kv_transfer_config", fix="run it without a connector"
        )
    return CacheGroups(tuple(found), str(getattr(kv_cache_config, "kv_cache_layout", None) or ""))


def _group(index: int, group: Any) -> CacheGroup:
    specs = _layer_specs(group.kv_cache_spec, group.layer_names)
    for name, spec in specs.items():
        kind = type(spec).__name__
        if kind not in FULL_ATTENTION | SLIDING_WINDOW or not getattr(group, "enable_kv_transfer", True):
            raise UnsupportedModelError(
                f"KV-cache group {index} is of kind {kind}, which cannot be restored from stored blocks",
                where=f"layer {name}",
                fix="run this model without a UCM connector",
            )
    first = next(iter(specs.values()))
    windows = {_window(spec) for spec in specs.values()}
    return CacheGroup(
        index=index,
        block_size=first.block_size,
        window=None if None in windows else max(w for w in windows if w is not None),
        page_sizes={name: _unpadded(spec) for name, spec in specs.items()},
        layer_names=tuple(group.layer_names),
        spec=group.kv_cache_spec,
    )


def _shape(spec: Any) -> list[str]:
    """Return the properties of a block in a specification, except its size in bytes."""
    return [type(spec).__name__, *(str(getattr(spec, name, "")) for name in _SHAPE)]


def _layer_specs(spec: Any, layer_names: Sequence[str]) -> dict[str, Any]:
    if type(spec).__name__ == UNIFORM:
        return dict(spec.kv_cache_specs)
    return dict.fromkeys(layer_names, spec)


def _window(spec: Any) -> int | None:
    if type(spec).__name__ not in SLIDING_WINDOW:
        return None
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def _unpadded(spec: Any) -> int:
    for attribute in ("unpadded_page_size_bytes", "real_page_size_bytes", "page_size_bytes"):
        value = getattr(spec, attribute, None)
        if value is not None:
            return int(value)
    raise UnsupportedModelError(
        f"{type(spec).__name__} does not say how large its blocks are", fix="run this model without a UCM connector"
    )


def longest_hit(groups: Sequence[CacheGroup], present: Sequence[Sequence[bool]], num_tokens: int, step: int) -> int:
    """Return the most tokens, a multiple of ``step``, for which every group has all the blocks that it still reads.

    Args:
        groups: The groups.
        present: For each group and each of its blocks from the start of the request, whether the block is available.
        num_tokens: The upper bound, in tokens.
        step: The groups' alignment in tokens.
    """
    full = [i for i, group in enumerate(groups) if group.window is None]
    limit = num_tokens
    for i in full:
        row = present[i]
        gap = next((n for n, there in enumerate(row) if not there), len(row))
        limit = min(limit, gap * groups[i].block_size)
    limit -= limit % step
    windowed = [i for i, group in enumerate(groups) if group.window is not None]
    while limit > 0 and not all(_reaches(groups[i], present[i], limit) for i in windowed):
        limit -= step
    return limit


def _reaches(group: CacheGroup, present: Sequence[bool], num_tokens: int) -> bool:
    needed = range(group.first_needed(num_tokens), num_tokens // group.block_size)
    return all(block < len(present) and present[block] for block in needed)
