"""Expose a group's KV cache in host memory as buffers that a store reads and writes in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.errors import UnknownLayoutError
from ucm.integration.vllm.connector.layout import fingerprint, group_layouts
from ucm.store.base import BlockGeometry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.integration.vllm.connector.groups import CacheGroup


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
        self._offsets = [layout.offsets for layout in self.layouts]
        self._storages = [_storage(kv_caches[layout.name]) for layout in self.layouts]
        for layout, storage in zip(self.layouts, self._storages, strict=True):
            end = layout.start + (layout.num_blocks - 1) * layout.block_stride + layout.offsets[-1] + layout.nbytes
            if end > len(storage):
                raise UnknownLayoutError(
                    f"the last block of the layer ends at byte {end} of a storage of {len(storage)}", where=layout.name
                )
        sizes = tuple(layout.nbytes for layout in self.layouts for _ in layout.offsets)
        self.geometry = BlockGeometry(sizes, fingerprint(self.layouts, about))

    def slice_count(self, layers: int) -> int:
        """Return the number of layer slices of the first ``layers`` layers."""
        return sum(len(offsets) for offsets in self._offsets[:layers])

    def buffers(self, block_id: int, layers: range) -> list[memoryview]:
        """Return the memory of a block's layer slices, for consecutive layers."""
        found = []
        for index in layers:
            layout, storage = self.layouts[index], self._storages[index]
            base = layout.start + block_id * layout.block_stride
            for offset in self._offsets[index]:
                start = base + offset
                found.append(storage[start : start + layout.nbytes])
        return found


def _storage(tensor: Any) -> memoryview:
    """Return all bytes of the storage behind a tensor."""
    import torch  # noqa: PLC0415 - this package is also imported without torch

    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(tensor.untyped_storage())
    return memoryview(flat.numpy())
