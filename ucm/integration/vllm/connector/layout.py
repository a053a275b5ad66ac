"""Locate the bytes of a KV block in the tensors that vLLM registers.

A layer's tensor holds all blocks of that layer. Two orders are supported: *blocks first*, ``(num_blocks, …)``, and
*planes first*, ``(2, num_blocks, …)`` with one plane for K and one for V. All further dimensions (heads before or after
tokens, K and V interleaved, packed for an instruction set) stay inside the block and are copied unchanged. The strides
determine which byte ranges a block covers, also if all layers are views of one allocation. vLLM may split a block into
several blocks for its kernels, so that the tensor has a multiple of ``num_blocks`` rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.errors import UnknownLayoutError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.integration.vllm.connector.groups import CacheGroup

PLANES = 2


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The byte ranges of one layer's blocks within the storage of its tensor.

    Args:
        name: The layer's name in vLLM.
        num_blocks: The number of blocks.
        start: The byte offset of block 0 in the storage.
        block_stride: Bytes from one block to the next.
        outer: The count and the stride in bytes of each dimension outside the contiguous ranges, widest stride first.
        nbytes: The length of each contiguous range.
        description: The dtype and memory order of a block's content, as text; part of the fingerprint. The distances
            between the ranges are not in it, because they may depend on the number of blocks.
    """

    name: str
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
    def block_bytes(self) -> int:
        """The bytes of one block in this layer."""
        return prod(count for count, _ in self.outer) * self.nbytes


def layer_layout(name: str, tensor: Any, num_blocks: int | None, page_size_bytes: int | None) -> LayerLayout:
    """Derive a layer's layout and check it against the cache configuration.

    Args:
        name: The layer's name.
        tensor: The layer's KV cache, a ``torch.Tensor`` of at least two dimensions.
        num_blocks: Blocks that the KV-cache manager allocates from; None in releases that do not provide the number in
            time.
        page_size_bytes: The size of a block of the layer in bytes, without padding, by the KV-cache configuration; None
            where the release does not provide it.

    Raises:
        UnknownLayoutError: If the tensor fits no known order, fits both, or contradicts the configuration.
    """
    shape, strides, itemsize = list(tensor.shape), list(tensor.stride()), tensor.element_size()
    where = f"{name}: shape {tuple(shape)}, strides {tuple(strides)}, {num_blocks} blocks"
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
    outer, run = _merge([(size, stride) for size, stride, _ in ordered])
    layout = LayerLayout(
        name=name,
        num_blocks=num_blocks,
        start=tensor.storage_offset() * itemsize,
        block_stride=block_stride,
        outer=tuple((count, stride * itemsize) for count, stride in outer),
        nbytes=run * itemsize,
        description=f"{tensor.dtype} blocks=dim{axis} {' '.join(f'{dim}:{size}' for size, _, dim in ordered)}",
    )
    if page_size_bytes is not None and layout.block_bytes != page_size_bytes:
        raise UnknownLayoutError(
            f"a block of the layer has {layout.block_bytes} bytes in its tensor but {page_size_bytes} by configuration",
            where=where,
            fix="report the vLLM release, the platform and this line; run without the connector meanwhile",
        )
    return layout


def group_layouts(group: CacheGroup, kv_caches: Mapping[str, Any], num_blocks: int | None) -> list[LayerLayout]:
    """Return the layouts of a group's layers, each KV cache once.

    Args:
        group: The group.
        kv_caches: The registered tensors by layer name.
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
    layouts: dict[tuple[int, int], LayerLayout] = {}
    for name in names:
        tensor = kv_caches[name]
        # Layers that share one KV cache are registered under each of their names.
        place = (tensor.data_ptr(), tensor.untyped_storage().data_ptr())
        if place not in layouts:
            layouts[place] = layer_layout(name, tensor, num_blocks, group.page_sizes.get(name))
    return list(layouts.values())


def fingerprint(layers: list[LayerLayout], about: Mapping[str, object]) -> bytes:
    """Return 16 bytes that identify the meaning of a block's bytes: layers, order, dtypes, ranges and other facts."""
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(about):
        digest.update(f"{key}={about[key]}\n".encode())
    for layer in layers:
        digest.update(f"{layer.name} {layer.description} {layer.block_bytes}\n".encode())
    return digest.digest()


def _block_axis(shape: list[int], num_blocks: int, where: str) -> int:
    blocks_first = shape[0] % num_blocks == 0 and shape[0] >= num_blocks
    planes_first = len(shape) > 1 and shape[0] == PLANES and shape[1] % num_blocks == 0 and shape[1] >= num_blocks
    if blocks_first == planes_first:
        raise UnknownLayoutError(
            "this KV cache has its blocks " + ("in either of two places" if blocks_first else "in no known place"),
            where=where,
            fix="report the vLLM release, the platform and this line; run without the connector meanwhile",
        )
    return 0 if blocks_first else 1


def _only_axis(shape: list[int], where: str) -> int:
    """Return the block dimension in releases that do not give the number of blocks; those never split blocks."""
    if len(shape) > 1 and shape[0] == shape[1] == PLANES:
        raise UnknownLayoutError("this KV cache has its blocks in either of two places", where=where)
    return 1 if shape[0] == PLANES else 0


def _merge(ordered: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
    """Split dimensions, outermost stride first, into the outer ones and the number of contiguous elements."""
    run = 1
    while ordered and ordered[-1][1] == run:
        run *= ordered.pop()[0]
    return ordered, run
