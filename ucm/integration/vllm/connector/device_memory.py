"""Gather blocks of a group's KV cache on an accelerator into page-locked host memory, and scatter them back.

A chunk of blocks is gathered on the device into one contiguous tensor per layer and copied to the host with one copy
per layer, on a separate stream. Loading copies each layer to the device once and scatters it there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.layout import LayerLayout, fingerprint, group_layouts
from ucm.store.base import BlockGeometry

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.integration.vllm.connector.groups import CacheGroup

#: Ranges and strides that are multiples of this are copied as 8-byte elements instead of bytes.
WORD = 8


class DeviceMemory:
    """The KV blocks of one group on a device.

    Args:
        group: The group.
        kv_caches: The registered tensors by layer name, all on one device.
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
        tensors = [kv_caches[layout.name] for layout in self.layouts]
        self.device = tensors[0].device
        self._blocks = [_rows(tensor, layout) for tensor, layout in zip(tensors, self.layouts, strict=True)]
        # Unlike in host memory, each layer of a block is copied as one contiguous range.
        self.geometry = BlockGeometry(
            tuple(layout.block_bytes for layout in self.layouts), fingerprint(self.layouts, {**about, "staged": True})
        )

    def staging(self, blocks: int) -> list[Any]:
        """Return page-locked host memory for a chunk: per layer, uint8 of shape ``(blocks, block_bytes)``."""
        import torch  # noqa: PLC0415 - this package is also imported without torch

        pinned = self.device.type != "cpu"
        return [
            torch.empty((blocks, layout.block_bytes), dtype=torch.uint8, pin_memory=pinned) for layout in self.layouts
        ]

    def gather(self, block_ids: Sequence[int], layers: range, staging: list[Any]) -> None:
        """Copy blocks to the first rows of the staging memory, asynchronously on the current stream."""
        index = self._index(block_ids)
        for layer in layers:
            rows = self._blocks[layer].index_select(0, index)
            target = staging[layer][: len(block_ids)]
            target.copy_(_as_bytes(rows, len(block_ids)), non_blocking=True)

    def scatter(self, rows: Sequence[int], block_ids: Sequence[int], layers: range, staging: list[Any]) -> None:
        """Copy staged rows into blocks, asynchronously on the current stream."""
        index = self._index(block_ids)
        for layer in layers:
            blocks = self._blocks[layer]
            source = staging[layer]
            chosen = source[: len(rows)] if list(rows) == list(range(len(rows))) else source[list(rows)]
            moved = chosen.to(self.device, non_blocking=True)
            blocks.index_copy_(0, index, moved.view(blocks.dtype).view(len(rows), *blocks.shape[1:]))

    def _index(self, block_ids: Sequence[int]) -> Any:
        import torch  # noqa: PLC0415 - this package is also imported without torch

        return torch.tensor(list(block_ids), dtype=torch.int64, device=self.device)


def _rows(tensor: Any, layout: LayerLayout) -> Any:
    """Return a view of a layer's KV cache with one row per block, in the order of the block's bytes."""
    import torch  # noqa: PLC0415 - this package is also imported without torch

    places = (layout.start, layout.block_stride, layout.nbytes, *(stride for _, stride in layout.outer))
    wide = all(place % WORD == 0 for place in places)
    size, dtype = (WORD, torch.int64) if wide else (1, torch.uint8)
    flat = torch.empty(0, dtype=dtype, device=tensor.device)
    flat.set_(tensor.untyped_storage())
    shape = (layout.num_blocks, *(count for count, _ in layout.outer), layout.nbytes // size)
    strides = (layout.block_stride // size, *(stride // size for _, stride in layout.outer), 1)
    return flat.as_strided(shape, strides, layout.start // size)


def _as_bytes(rows: Any, count: int) -> Any:
    import torch  # noqa: PLC0415 - this package is also imported without torch

    return rows.reshape(count, -1).view(torch.uint8)
