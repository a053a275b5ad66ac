"""Describe KV-cache groups, the layers that share a block table, and which of their blocks a request needs.

A model with one kind of attention has one group. With hybrid KV-cache groups each group has its own block ids: full
attention needs every block of a prefix, a sliding window only the blocks that its window reaches from the prefix's end,
chunked local attention those of the attention chunk that the prefix ends in, and recurrent layers (Mamba, gated delta
nets, short convolutions) the one block with the state at the prefix's end. Of a ring with the keys of tokens that are
still to be compressed, nothing is needed: a prefix of full blocks leaves none.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, replace
from math import gcd, lcm, prod
from typing import TYPE_CHECKING, Any

from ucm.compat import layer_specs, optional, page_bytes
from ucm.errors import ConfigError
from ucm.integration.vllm.connector.failures import UnknownLayoutError, UnsupportedModelError
from ucm.store.base import BlockGeometry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from ucm.vllm_types import KVCacheConfig

#: Specifications by what their layers need of a prefix. Compared by exact class name, because a subclass may keep state
#: elsewhere.
FULL_ATTENTION = {"FullAttentionSpec", "MLAAttentionSpec"}
SLIDING_WINDOW = {"SlidingWindowSpec", "SlidingWindowMLASpec"}
LOCAL_ATTENTION = {"ChunkedLocalAttentionSpec"}
#: Of recurrent layers: a block holds the state after all tokens up to its end, whatever its layers keep there.
RECURRENT = {"MambaSpec"}
#: Of compressing layers: one block per request, with the keys of a group of tokens that is not full. Groups end where
#: blocks of the compressed KV end, so vLLM's own hits need no such block either.
RING = {"CircularBufferSpec"}
#: Layers whose KV heads can be stored apart, and vLLM's names for how their numbers may be stored.
SLICED, SLICED_NUMBERS = {"FullAttentionSpec", "SlidingWindowSpec"}, {"NONE", "FP8_PER_TENSOR"}
#: Why others are refused, where a reason is known.
_REFUSED = {
    "RSWASpec": "whose KV depends on where the prompt ended",
    "SinkFullAttentionSpec": "whose sinks lie outside of a request's blocks",
    "CrossAttentionSpec": "whose KV is that of an encoder's input",
    "HiddenStateCacheSpec": "whose hidden states a request must compute to have them extracted",
}
#: The attributes of specifications that decide how a block's bytes are read.
_SHAPE = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "kv_quant_mode", "shapes", "dtypes")
PLANES = 2
#: The dimension of KV heads in vLLM's ``(blocks, heads, tokens, content)``; on accelerators so from 0.26.0 on.
HEADS, DIMENSIONS = 1, 4
#: In place of a block's id: the block is not moved with its chunk.
NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """The properties of one KV-cache group that matter for moving its blocks.

    Args:
        index: The group's index in vLLM.
        block_size: Tokens per block of vLLM.
        window: Tokens that a sliding window reaches back, including the current one, or the tokens of an attention
            chunk; None for others.
        page_sizes: Bytes of a block by layer name, without padding; empty where the release does not provide them.
        layer_names: The group's layers; empty where the release does not provide them, meaning all registered ones.
        spec: vLLM's ``KVCacheSpec``; None where the release does not provide it.
        chunk_blocks: Consecutive blocks that are stored as one: a chunk, with the key of its last block.
        is_recurrent: Whether a block holds a state instead of KV. vLLM keeps a state for some block ends only, and says
            which, see `ucm.compat.boundary_states`.
        is_local: Whether tokens attend to those of their attention chunk only (chunked local attention).
        slices: The slices of KV heads that this rank's part of a block is stored in, see `in_slices`; 0: as it is.
        place: Of a group for one of these slices alone, which one.
    """

    index: int
    block_size: int
    window: int | None
    page_sizes: dict[str, int]
    layer_names: tuple[str, ...]
    spec: Any = None
    chunk_blocks: int = 1
    is_recurrent: bool = False
    is_local: bool = False
    slices: int = 0
    place: int = 0

    @property
    def parts(self) -> list[CacheGroup]:
        """The group for each slice of KV heads alone; the group itself if there are none."""
        return [replace(self, place=place) for place in range(self.slices)] or [self]

    @property
    def needs_all(self) -> bool:
        """Whether every block of a prefix is needed to continue after it."""
        return self.window is None and not self.is_recurrent

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk."""
        return self.block_size * self.chunk_blocks

    @property
    def stored_as(self) -> str:
        """What is stored as one, in the plural: vLLM's blocks, or chunks of them."""
        return "blocks" if self.chunk_blocks == 1 else "chunks"

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that two engines must have in common to read each other's blocks of this group."""
        specs = {} if self.spec is None else layer_specs(self.spec, self.layer_names)
        layers = {name: [*_shape(spec), str(self.page_sizes[name])] for name, spec in specs.items()}
        chunk = {"chunk_blocks": self.chunk_blocks} if self.chunk_blocks > 1 else {}
        return {"block_size": self.block_size, "window": self.window, "layers": layers, **chunk}

    def first_needed(self, num_tokens: int) -> int:
        """Return the index of the first block that is still read after ``num_tokens`` computed tokens."""
        if self.needs_all:
            return 0
        # A state is read like the last token of a window.
        reach = 1 if self.window is None else num_tokens % self.window if self.is_local else self.window - 1
        return max(0, num_tokens - reach) // self.block_size

    def depth(self, chunk: int) -> int:
        """Return how many tokens a prompt has up to the end of a chunk."""
        return (chunk + 1) * self.chunk_tokens

    def is_reached(self, chunk: int, step: int) -> bool:
        """Return whether a prefix of a multiple of ``step`` tokens needs a chunk: if any does, then the shortest."""
        return self.needs_all or chunk in self.needed(0, -(-self.depth(chunk) // step) * step)

    def most_blocks(self, num_tokens: int) -> int:
        """Return how many blocks a request of so many tokens holds at most, with one for the tokens to come."""
        if self.is_recurrent:  # the state that was found, that of the running step, and those after each drafted token
            return 3 + int(optional(self.spec, "num_speculative_blocks", 0))
        return num_tokens // self.block_size + 2

    def blocks_of(self, block_ids: Sequence[int], chunk: int) -> Sequence[int]:
        """Return the ids of a chunk's blocks, of those of consecutive chunks."""
        return block_ids[chunk * self.chunk_blocks : (chunk + 1) * self.chunk_blocks]

    def needed(self, computed: int, end: int) -> range:
        """Return the chunks to load to continue at ``end``, with ``computed`` tokens computed already."""
        return range(
            max(computed // self.chunk_tokens, self.first_needed(end) // self.chunk_blocks), end // self.chunk_tokens
        )

    def to_load(self, block_ids: Sequence[int], computed: int, end: int) -> list[int]:
        """Return the ids of the blocks of these chunks; `NO_BLOCK` for those that must not be written.

        These are blocks of computed tokens, which other requests may be reading, and those that a sliding window no
        longer reaches, which vLLM has not allocated.

        Args:
            block_ids: All blocks of a request.
            computed: See ``needed``.
            end: See ``needed``.
        """
        chunks = self.needed(computed, end)
        first = max(computed // self.block_size, self.first_needed(end))
        blocks = range(chunks.start * self.chunk_blocks, chunks.stop * self.chunk_blocks)
        return [block_ids[block] if block >= first else NO_BLOCK for block in blocks]

    def to_save(self, done: int, computed: int, end: int) -> range:
        """Return the chunks that a step fills, or that were filled before it and not saved; none of states.

        Args:
            done: How many chunks from the start need no save.
            computed: Computed tokens before the step; the blocks that it still reads are there.
            end: Computed tokens after the step.
        """
        if self.is_recurrent:
            return range(0)
        return range(max(done, -(-self.first_needed(computed) // self.chunk_blocks)), end // self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """All groups of a model.

    Args:
        groups: Those whose blocks are stored, in vLLM's order.
        rings: The others, of which a prefix needs nothing.
        layout: vLLM's name for the order of a block's dimensions; empty where the release does not provide it.
        shards: The slices of KV heads that a block is stored in on all ranks together; 0: each rank's part is one.
    """

    groups: tuple[CacheGroup, ...]
    layout: str = ""
    rings: tuple[CacheGroup, ...] = ()
    shards: int = 0

    @property
    def facts(self) -> dict[str, Any]:
        """The structure of the groups and their KV layout, as a part of the engine's identity."""
        shards = {"kv_head_shards": self.shards} if self.shards else {}
        return {"groups": [group.facts for group in self.groups], "layout": self.layout, **shards}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each group's window in tokens; None for others."""
        return tuple(group.window for group in (*self.groups, *self.rings))

    @property
    def has_states(self) -> bool:
        """Whether some layers are recurrent."""
        return any(group.is_recurrent for group in self.groups)

    @property
    def leading(self) -> int:
        """The index of the group whose blocks tell how long a prefix is: the first that needs all, if there is one."""
        return next((group.index for group in self.groups if group.needs_all), self.groups[0].index)

    @property
    def alignment(self) -> int:
        """The number of tokens at whose multiples every group has a chunk boundary."""
        return lcm(*(group.chunk_tokens for group in (*self.groups, *self.rings)))

    def staged_bytes(self, num_tokens: int, ranks: Mapping[int, int]) -> int:
        """Return the size in bytes of the rows that stage a prefix; 0 where the release does not provide page sizes.

        Args:
            num_tokens: The prefix's tokens.
            ranks: For each group, the number of ranks with different parts of it.
        """
        row = max(sum(group.page_sizes.values()) * group.chunk_blocks * ranks[group.index] for group in self.groups)
        return row * sum(len(group.needed(0, num_tokens)) for group in self.groups)


def cache_groups(vllm_config: Any, kv_cache_config: KVCacheConfig | None, chunk_tokens: int = 0) -> CacheGroups:
    """Read the groups from vLLM's configuration.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        kv_cache_config: vLLM's ``KVCacheConfig``; None in releases that do not pass it to connectors, where a model
            with a connector has one group.
        chunk_tokens: The tokens to store as one, see `in_chunks`; 0: each block alone.

    Raises:
        UnsupportedModelError: If a group has state that cannot be restored from blocks of tokens.
    """
    if kv_cache_config is None:
        size = vllm_config.cache_config.block_size
        return in_chunks(CacheGroups((CacheGroup(0, size, None, {}, ()),)), chunk_tokens)
    found = [_group(index, group) for index, group in enumerate(kv_cache_config.kv_cache_groups)]
    rings = {group.index for group in found if _kinds(group.spec) <= RING}
    stored = tuple(group for group in found if group.index not in rings)
    if not stored:
        raise UnsupportedModelError(
            "the model has no KV cache", where="kv_transfer_config", fix="run it without a connector"
        )
    if all(group.is_local for group in stored):
        raise UnsupportedModelError(
            "the model has chunked local attention alone: some prefixes need no block, and vLLM waits for a load",
            fix="run this model without a UCM connector",
        )
    others = tuple(group for group in found if group.index in rings)
    layout = optional(kv_cache_config, "kv_cache_layout") or ""
    return in_chunks(CacheGroups(stored, layout, others), chunk_tokens)


def in_chunks(groups: CacheGroups, tokens: int) -> CacheGroups:
    """Return groups whose blocks are stored in chunks of as many tokens, rounded up so that all groups' blocks fit.

    A chunk is saved as a whole, so a sliding window must reach all of its blocks when the last one is filled, and an
    attention chunk must contain whole ones. Other blocks are stored alone. Beside states all are: a hit ends with a
    chunk, and few chunks end with a state.

    Args:
        groups: The groups.
        tokens: The tokens of a chunk; 0: each block alone.
    """
    if groups.has_states:
        return groups
    size = -(-tokens // groups.alignment) * groups.alignment
    return replace(
        groups,
        groups=tuple(
            replace(group, chunk_blocks=size // group.block_size)
            if size and (group.window is None or (not group.window % size if group.is_local else group.window >= size))
            else group
            for group in groups.groups
        ),
    )


def in_slices(groups: CacheGroups, shards: int, vllm_config: Any) -> CacheGroups:
    """Return groups whose blocks are stored in slices of KV heads, which do not depend on the tensor-parallel size.

    Specifications and page sizes become those of one slice.

    Args:
        groups: The groups of one rank.
        shards: The slices of all ranks together; 0: each rank's part of a block is stored as it is.
        vllm_config: vLLM's ``VllmConfig``.

    Raises:
        ConfigError: The KV heads do not divide into so many slices, or these not into ranks.
        UnsupportedModelError: A layer keeps something else than whole KV heads.
    """
    if not shards:
        return groups
    ranks = vllm_config.parallel_config.tensor_parallel_size
    heads = int(vllm_config.model_config.get_total_num_kv_heads())
    if shards % ranks or heads % shards:
        raise ConfigError(
            f"the model has {heads} KV heads, and the engine {ranks} tensor-parallel ranks",
            where=f"kv_head_shards = {shards}",
            fix="choose a multiple of the ranks that divides the KV heads, or remove the setting",
        )
    own, sliced = shards // ranks, []
    if groups.rings or any(group.spec is None for group in groups.groups):
        raise _not_sliced("the KV cache")
    for group in groups.groups:
        for name, spec in layer_specs(group.spec, group.layer_names).items():
            packed = optional(spec, "num_head_slots"), optional(spec, "state_content_bytes")
            numbers = optional(spec, "kv_quant_mode.name", "NONE")
            whole = type(spec).__name__ in SLICED and numbers in SLICED_NUMBERS and packed == (None, None)
            if not whole or spec.num_kv_heads % own:
                raise _not_sliced(f"layer {name}: {type(spec).__name__}, {spec}")
        of_slice = divided(group.spec, own)
        pages = {name: _unpadded(spec) for name, spec in layer_specs(of_slice, group.layer_names).items()}
        sliced.append(replace(group, spec=of_slice, page_sizes=pages, slices=own))
    return replace(groups, groups=tuple(sliced), shards=shards)


def _not_sliced(where: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        "only layers with full attention or sliding windows that keep whole KV heads, unpacked and without scales of "
        "their own, are stored in slices of heads",
        where=where,
        fix="remove kv_head_shards",
    )


def divided(spec: Any, parts: int) -> Any:
    """Return the ``KVCacheSpec`` of one of several parts of the KV heads; of too few heads, each part has one."""
    inner = optional(spec, "kv_cache_specs")
    if inner is not None:
        return replace(spec, kv_cache_specs={name: divided(one, parts) for name, one in inner.items()})
    heads = optional(spec, "num_kv_heads")
    return spec if heads is None else replace(spec, num_kv_heads=max(1, heads // parts))


def _group(index: int, group: Any) -> CacheGroup:
    specs = layer_specs(group.kv_cache_spec, group.layer_names)
    for name, spec in specs.items():
        reason, fix = _refusal(group, spec)
        if reason:
            raise UnsupportedModelError(
                f"KV-cache group {index} is of kind {type(spec).__name__}, {reason}", where=f"layer {name}", fix=fix
            )
    first = next(iter(specs.values()))
    kinds = _kinds(group.kv_cache_spec)
    if len({kind in RECURRENT | RING and kind for kind in kinds}) > 1:
        raise UnsupportedModelError(
            f"KV-cache group {index} has recurrent layers and others", fix="run this model without a UCM connector"
        )
    windows = {_window(spec) for spec in specs.values()}
    return CacheGroup(
        index=index,
        block_size=first.block_size,
        window=None if None in windows else max(w for w in windows if w is not None),
        is_recurrent=kinds <= RECURRENT,
        is_local=kinds <= LOCAL_ATTENTION,
        page_sizes={name: _unpadded(spec) for name, spec in specs.items()},
        layer_names=tuple(group.layer_names),
        spec=group.kv_cache_spec,
    )


def _kinds(spec: Any) -> set[str]:
    """Return the class names of the layers' specifications in a group."""
    return {type(one).__name__ for one in layer_specs(spec).values()}


def _refusal(group: Any, spec: Any) -> tuple[str, str]:
    """Return why a layer's KV cannot be restored from stored blocks, and what to do; empty if it can."""
    kind, fix = type(spec).__name__, "run this model without a UCM connector"
    if not optional(group, "enable_kv_transfer", True) or optional(group, "host_resident"):
        return "whose blocks vLLM keeps elsewhere", fix
    if optional(spec, "prefix_replay_tokens"):
        return "whose window vLLM rebuilds after a hit from fewer tokens", "start vLLM with --no-swa-bounded-replay"
    if optional(spec, "non_causal"):
        return "whose tokens attend to later ones", fix
    if kind in FULL_ATTENTION | SLIDING_WINDOW | LOCAL_ATTENTION | RECURRENT | RING:
        return "", ""
    return _REFUSED.get(kind, "which cannot be restored from stored blocks"), fix


def _shape(spec: Any) -> list[str]:
    """Return the properties of a block in a specification, except its size in bytes."""
    return [type(spec).__name__, *(str(optional(spec, name, "")) for name in _SHAPE)]


def _window(spec: Any) -> int | None:
    kind = type(spec).__name__
    if kind in LOCAL_ATTENTION:
        return int(spec.attention_chunk_size)
    if kind in SLIDING_WINDOW:
        return int(spec.sliding_window) + int(optional(spec, "extra_retained_tokens", 0))
    return None


def _unpadded(spec: Any) -> int:
    found = page_bytes(spec)
    if found is None:
        raise UnsupportedModelError(
            f"{type(spec).__name__} does not say how large its blocks are", fix="run this model without a UCM connector"
        )
    return found


def longest_hit(groups: Sequence[CacheGroup], present: Sequence[Sequence[bool]], num_tokens: int, step: int) -> int:
    """Return the most tokens, a multiple of ``step``, for which every group has all the chunks that it still reads.

    Args:
        groups: The groups.
        present: For each group and each of its chunks from the start of the request, whether the chunk is available.
        num_tokens: The upper bound, in tokens.
        step: The groups' alignment in tokens.
    """
    full = [i for i, group in enumerate(groups) if group.needs_all]
    limit = num_tokens
    for i in full:
        row = present[i]
        gap = next((n for n, there in enumerate(row) if not there), len(row))
        limit = min(limit, gap * groups[i].chunk_tokens)
    limit -= limit % step
    ends = [i for i, group in enumerate(groups) if not group.needs_all]
    while limit > 0 and not all(
        chunk < len(present[i]) and present[i][chunk] for i in ends for chunk in groups[i].needed(0, limit)
    ):
        limit -= step
    return limit


def lacking(groups: CacheGroups, present: Sequence[Sequence[bool]], end: int, limit: int) -> tuple[int, int] | None:
    """Return which chunk a hit lacks for the next tokens, after its group's place; None if none that was asked for.

    Args:
        groups: The groups.
        present: See `longest_hit`.
        end: Where the hit ends, in tokens.
        limit: The upper bound, in tokens.
    """
    for place, (group, row) in enumerate(zip(groups.groups, present, strict=True)):
        for chunk in group.needed(end if group.needs_all else 0, min(end + groups.alignment, limit)):
            if chunk >= len(row) or not row[chunk]:
                return place, chunk
    return None


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The byte ranges of blocks within the storage of one tensor.

    Args:
        num_blocks: The number of blocks.
        start: The byte offset of block 0 in the storage.
        block_stride: Bytes from one block to the next.
        outer: The count and the stride in bytes of each dimension outside the contiguous ranges, widest stride first.
        nbytes: The length of each contiguous range.
        description: The dtype and memory order of a block's content, as text; part of the fingerprint. The distances
            between the ranges are not in it, because they may depend on the number of blocks.
    """

    num_blocks: int
    start: int
    block_stride: int
    outer: tuple[tuple[int, int], ...]
    nbytes: int
    description: str

    @property
    def offsets(self) -> tuple[int, ...]:
        """The start of each contiguous range, relative to the block, in order."""
        offsets = [0]
        for count, stride in self.outer:
            offsets = [offset + i * stride for offset in offsets for i in range(count)]
        return tuple(offsets)

    @property
    def end(self) -> int:
        """The byte offset behind the last block in the storage."""
        return self.start + (self.num_blocks - 1) * self.block_stride + self.offsets[-1] + self.nbytes

    @property
    def block_bytes(self) -> int:
        """The bytes of one block in this tensor."""
        return prod(count for count, _ in self.outer) * self.nbytes


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Where the blocks of one layer lie.

    Args:
        name: The layer's name in vLLM.
        parts: One layout per tensor; a block's bytes are those of its parts, one after the other.
    """

    name: str
    parts: tuple[TensorLayout, ...]

    @property
    def block_bytes(self) -> int:
        """The bytes of one block in this layer."""
        return sum(part.block_bytes for part in self.parts)

    @property
    def description(self) -> str:
        """The dtype and memory order of a block's content, as text; part of the fingerprint."""
        return " + ".join(part.description for part in self.parts)


def tensors_of(kv_cache: Any) -> tuple[Tensor, ...]:
    """Return the tensors of a layer's KV cache: vLLM registers one, vLLM Ascend one for K and one for V."""
    return tuple(kv_cache) if isinstance(kv_cache, (tuple, list)) else (kv_cache,)


def layer_layout(
    name: str, kv_cache: Any, num_blocks: int | None, page_size_bytes: int | None, group: CacheGroup | None = None
) -> LayerLayout:
    """Derive a layer's layout and check it against the cache configuration.

    Args:
        name: The layer's name.
        kv_cache: The layer's KV cache: a ``torch.Tensor`` of at least two dimensions, or several of them.
        num_blocks: Blocks that the KV-cache manager allocates from; None in releases that do not provide the number in
            time.
        page_size_bytes: The size of a block of the layer in bytes, without padding, by the KV-cache configuration; None
            where the release does not provide it.
        group: The layer's group, if only a slice of the KV heads is meant.

    Raises:
        UnknownLayoutError: If a tensor fits no known order, fits both, or contradicts the configuration.
        UnsupportedModelError: If a slice is meant, and the KV cache has not one tensor with a dimension of heads.
    """
    heads = _slice(name, kv_cache, group) if group is not None and group.slices else None
    parts = tuple(_tensor_layout(name, tensor, num_blocks, heads) for tensor in tensors_of(kv_cache))
    layout = LayerLayout(name, parts)
    if page_size_bytes is not None and layout.block_bytes != page_size_bytes:
        raise UnknownLayoutError(
            f"a block of the layer has {layout.block_bytes} bytes in its tensor but {page_size_bytes} by configuration",
            where=" + ".join(_shown(name, tensor, num_blocks) for tensor in tensors_of(kv_cache)),
            fix="report the vLLM release, the platform and this line; run without the connector meanwhile",
        )
    return layout


def _slice(name: str, kv_cache: Any, group: CacheGroup) -> range:
    """Return the KV heads of a slice, by their places in the tensor."""
    (tensor, *others), count = tensors_of(kv_cache), layer_specs(group.spec, group.layer_names)[name].num_kv_heads
    if others or len(tensor.shape) != DIMENSIONS or tensor.shape[HEADS] != count * group.slices:
        raise _not_sliced(_shown(name, tensor, None))
    return range(group.place * count, (group.place + 1) * count)


def _shown(name: str, tensor: Tensor, num_blocks: int | None) -> str:
    return f"{name}: shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}, {num_blocks} blocks"


def _tensor_layout(name: str, tensor: Tensor, num_blocks: int | None, heads: range | None = None) -> TensorLayout:
    shape, strides, itemsize = list(tensor.shape), list(tensor.stride()), tensor.element_size()
    where, first, most = _shown(name, tensor, num_blocks), tensor.storage_offset(), sys.maxsize
    if heads is not None:
        # Ranges end with the heads also where the slice has all of them, so that they are the same on any rank.
        first, most = first + heads.start * strides[HEADS], shape[HEADS] * strides[HEADS]
        shape[HEADS] = len(heads)
    if num_blocks is None:
        axis = _only_axis(shape, where)
        num_blocks = shape[axis]
    else:
        axis = _block_axis(shape, num_blocks, where)
    split = shape[axis] // num_blocks
    block_stride = strides[axis] * split * itemsize
    dims = [(size, stride, f"dim{i}") for i, (size, stride) in enumerate(zip(shape, strides, strict=True)) if i != axis]
    dims.append((split, strides[axis], "kernel-block"))
    ordered = sorted((d for d in dims if d[0] > 1), key=lambda d: d[1], reverse=True)
    outer, run = _merge([(size, stride) for size, stride, _ in ordered], most)
    return TensorLayout(
        num_blocks=num_blocks,
        start=first * itemsize,
        block_stride=block_stride,
        outer=tuple((count, stride * itemsize) for count, stride in outer),
        nbytes=run * itemsize,
        description=f"{tensor.dtype} blocks=dim{axis} {' '.join(f'{dim}:{size}' for size, _, dim in ordered)}",
    )


def group_layouts(group: CacheGroup, kv_caches: Mapping[str, Any], num_blocks: int | None) -> list[LayerLayout]:
    """Return the layouts of a group's layers, each KV cache once.

    Args:
        group: The group.
        kv_caches: The registered KV caches by layer name.
        num_blocks: Blocks that the KV-cache manager allocates from.

    Raises:
        UnknownLayoutError: If a layer's blocks cannot be located.
    """
    names = group.layer_names or tuple(kv_caches)
    missing = [name for name in names if name not in kv_caches]
    if missing:
        raise UnknownLayoutError(
            f"{len(missing)} layers of KV-cache group {group.index} have no registered KV cache",
            where=", ".join(missing[:4]),
            fix="run this model without a UCM connector",
        )
    layouts: dict[tuple[tuple[int, int], ...], LayerLayout] = {}
    for name in names:
        kv_cache = kv_caches[name]
        # Layers that share one KV cache are registered under each of their names.
        place = tuple((tensor.data_ptr(), tensor.untyped_storage().data_ptr()) for tensor in tensors_of(kv_cache))
        if place not in layouts:
            layouts[place] = layer_layout(name, kv_cache, num_blocks, group.page_sizes.get(name), group)
    return list(layouts.values())


def fingerprint(layers: list[LayerLayout], about: Mapping[str, object]) -> bytes:
    """Return 16 bytes that identify the meaning of a block's bytes: layers, order, dtypes, ranges and other facts."""
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(about):
        digest.update(f"{key}={about[key]}\n".encode())
    for layer in layers:
        digest.update(f"{layer.name} {layer.description} {layer.block_bytes}\n".encode())
    return digest.digest()


def geometry_of(
    group: CacheGroup, layers: list[LayerLayout], kv_caches: Mapping[str, Any], about: Mapping[str, object]
) -> BlockGeometry:
    """Return the geometry of a chunk, which is stored and verified as one: a single layer slice."""
    nbytes = layers_nbytes(group, layers)
    return BlockGeometry((nbytes,), fingerprint(layers, about), element_size(layers, kv_caches))


def layers_nbytes(group: CacheGroup, layers: Sequence[LayerLayout]) -> int:
    """Return the bytes of a chunk in some layers."""
    return group.chunk_blocks * sum(layer.block_bytes for layer in layers)


def element_size(layers: list[LayerLayout], kv_caches: Mapping[str, Any]) -> int:
    """Return the size of an element of the layers' KV caches in bytes; of several, what divides all."""
    return gcd(*(tensor.element_size() for layer in layers for tensor in tensors_of(kv_caches[layer.name])))


def _block_axis(shape: list[int], num_blocks: int, where: str) -> int:
    blocks_first = shape[0] % num_blocks == 0 and shape[0] >= num_blocks
    planes_first = len(shape) > 1 and shape[0] == PLANES and shape[1] % num_blocks == 0 and shape[1] >= num_blocks
    if blocks_first == planes_first:
        raise UnknownLayoutError(
            "this KV cache has " + ("two possible block dimensions" if blocks_first else "no block dimension"),
            where=where,
            fix="report the vLLM release, the platform and this line; run without the connector meanwhile",
        )
    return 0 if blocks_first else 1


def _only_axis(shape: list[int], where: str) -> int:
    """Return the block dimension in releases that do not give the number of blocks; those never split blocks."""
    if len(shape) > 1 and shape[0] == shape[1] == PLANES:
        raise UnknownLayoutError("this KV cache has two possible block dimensions", where=where)
    return 1 if shape[0] == PLANES else 0


def _merge(ordered: list[tuple[int, int]], most: int) -> tuple[list[tuple[int, int]], int]:
    """Split dimensions, outermost stride first, into the outer ones and the number of contiguous elements.

    Dimensions with a stride of ``most`` elements or more are outer ones.
    """
    run = 1
    while ordered and ordered[-1][1] == run < most:
        run *= ordered.pop()[0]
    return ordered, run


class HostMemory:
    """The KV blocks of one group in host memory, accessed without a copy.

    Args:
        group: The group.
        kv_caches: The registered tensors by layer name, on the CPU.
        num_blocks: Blocks that vLLM allocates from; None in releases that do not provide the number in time.
        about: Other facts that the bytes depend on, for the fingerprint.

    Raises:
        UnknownLayoutError: If a layer's blocks cannot be located.
    """

    def __init__(
        self, group: CacheGroup, kv_caches: Mapping[str, Any], num_blocks: int | None, about: Mapping[str, object]
    ) -> None:
        self.group = group
        self.layouts = group_layouts(group, kv_caches, num_blocks)
        #: By layer, each contiguous range of a block: the storage, its start in block 0, block stride and length.
        self._ranges = [list(_ranges(layout, kv_caches[layout.name])) for layout in self.layouts]
        self.geometry = geometry_of(group, self.layouts, kv_caches, about)

    def buffers(self, block_ids: Sequence[int], layers: range) -> list[memoryview]:
        """Return the memory of a chunk's bytes in consecutive layers: in each layer, block by block.

        Args:
            block_ids: The chunk's blocks; a `NO_BLOCK` gets memory of its own, which nobody reads.
            layers: The layers.
        """
        found = []
        for index in layers:
            for block_id in block_ids:
                for storage, first, stride, nbytes in self._ranges[index]:
                    start = first + block_id * stride
                    place = storage[start : start + nbytes] if block_id != NO_BLOCK else memoryview(bytearray(nbytes))
                    found.append(place)
        return found


def _ranges(layout: LayerLayout, kv_cache: Any) -> Iterator[tuple[memoryview, int, int, int]]:
    for part, tensor in zip(layout.parts, tensors_of(kv_cache), strict=True):
        storage = _storage(tensor)
        if part.end > len(storage):
            raise UnknownLayoutError(
                f"the last block of the layer ends at byte {part.end} of a storage of {len(storage)}",
                where=layout.name,
            )
        for offset in part.offsets:
            yield storage, part.start + offset, part.block_stride, part.nbytes


def _storage(tensor: Tensor) -> memoryview:
    """Return all bytes of the storage behind a tensor."""
    import torch  # noqa: PLC0415 - this package is also imported without torch

    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage())
    return memoryview(flat.numpy())


#: Ranges and strides that are multiples of this are copied as 8-byte elements instead of bytes.
WORD = 8


class DeviceMemory:
    """The KV blocks of one group on a device; see `HostMemory`, but for the tensors, which are all on one device."""

    def __init__(
        self, group: CacheGroup, kv_caches: Mapping[str, Any], num_blocks: int | None, about: Mapping[str, object]
    ) -> None:
        self.group = group
        self.layouts = group_layouts(group, kv_caches, num_blocks)
        self.device = tensors_of(kv_caches[self.layouts[0].name])[0].device
        #: By layer, a view of each of its tensors with one row per block.
        self._blocks = [
            [_rows(tensor, part) for tensor, part in zip(tensors_of(kv_caches[layout.name]), layout.parts, strict=True)]
            for layout in self.layouts
        ]
        self.geometry = geometry_of(group, self.layouts, kv_caches, {**about, "staged": True})

    def staging(self, blocks: int) -> list[Tensor]:
        """Return page-locked host memory for blocks: per layer, uint8 of shape ``(blocks, block_bytes)``."""
        import torch  # noqa: PLC0415 - this package is also imported without torch

        pinned = self.device.type != "cpu"
        return [
            torch.empty((blocks, layout.block_bytes), dtype=torch.uint8, pin_memory=pinned) for layout in self.layouts
        ]

    def chunks(self, staged: Tensor) -> Any:
        """Return a layer's staging memory as an array of shape ``(chunks, bytes of a chunk in the layer)``."""
        return staged.numpy().reshape(len(staged) // self.group.chunk_blocks, -1)

    def gather(self, block_ids: Sequence[int], layers: range, staging: list[Tensor]) -> None:
        """Copy blocks to the first rows of the staging memory, asynchronously on the current stream."""
        index = self._index(block_ids)
        for layer in layers:
            target = staging[layer][: len(block_ids)]
            target.copy_(_gathered(self._blocks[layer], index), non_blocking=True)

    def scatter(self, rows: Sequence[int], block_ids: Sequence[int], layers: range, staging: list[Tensor]) -> None:
        """Copy staged rows into blocks, asynchronously on the current stream."""
        index = self._index(block_ids)
        for layer in layers:
            source = staging[layer]
            chosen = source[: len(rows)] if list(rows) == list(range(len(rows))) else source[list(rows)]
            moved = chosen.to(self.device, non_blocking=True)
            for blocks, own in zip(self._blocks[layer], _parts(moved, self.layouts[layer]), strict=True):
                blocks.index_copy_(0, index, own.view(blocks.dtype).view(len(rows), *blocks.shape[1:]))

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        import torch  # noqa: PLC0415 - this package is also imported without torch

        return torch.tensor(list(block_ids), dtype=torch.int64, device=self.device)


def _rows(tensor: Tensor, layout: TensorLayout) -> Tensor:
    """Return a view of a tensor with one row per block, in the order of the block's bytes."""
    import torch  # noqa: PLC0415 - this package is also imported without torch

    places = (layout.start, layout.block_stride, layout.nbytes, *(stride for _, stride in layout.outer))
    wide = all(place % WORD == 0 for place in places)
    size, dtype = (WORD, torch.int64) if wide else (1, torch.uint8)
    flat = torch.empty(0, dtype=dtype, device=tensor.device)
    flat.set_(tensor.untyped_storage())
    shape = (layout.num_blocks, *(count for count, _ in layout.outer), layout.nbytes // size)
    strides = (layout.block_stride // size, *(stride // size for _, stride in layout.outer), 1)
    return flat.as_strided(shape, strides, layout.start // size)


def _gathered(blocks: list[Tensor], index: Tensor) -> Tensor:
    """Return the bytes of some blocks of a layer, uint8 of shape ``(blocks, block_bytes)``, on the device."""
    import torch  # noqa: PLC0415 - this package is also imported without torch

    parts = [part.index_select(0, index).reshape(len(index), -1).view(torch.uint8) for part in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _parts(rows: Tensor, layout: LayerLayout) -> list[Tensor]:
    """Split bytes of blocks into those of each tensor of the layer, each flat and aligned."""
    if len(layout.parts) == 1:
        return [rows.flatten()]
    sizes = [part.block_bytes for part in layout.parts]
    return [part.clone().flatten() for part in rows.split(sizes, dim=1)]
