"""Whole blocks, byte for byte, between the KV caches of a worker's layers and host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ucm.integration.vllm.connector.device_memory import DeviceMemory
from ucm.integration.vllm.connector.groups import CacheGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor


class RawBlocks:
    """Implements `BlockCopies` on a device or on the host.

    Args:
        kv_caches: The caches by layer, all with as many blocks, on one device.
        block_size: Tokens in a block.

    Raises:
        UnknownLayoutError: If the blocks of a layer cannot be located.
    """

    def __init__(self, kv_caches: Mapping[str, Tensor], block_size: int) -> None:
        self._memory = DeviceMemory(CacheGroup(0, block_size, None, {}, tuple(kv_caches)), kv_caches, None, {})
        self.layer_names = tuple(layout.name for layout in self._memory.layouts)
        self.geometry = self._memory.geometry

    def host_rows(self, layer: int, blocks: int) -> Tensor:
        """See `BlockCopies.host_rows`."""
        import torch  # noqa: PLC0415 - vLLM brings it

        pinned = self._memory.device.type != "cpu"
        return torch.empty((blocks, self._memory.layouts[layer].block_bytes), dtype=torch.uint8, pin_memory=pinned)

    def read(self, block_ids: Sequence[int]) -> list[Tensor]:
        """See `BlockCopies.read`."""
        rows = self._memory.staging(len(block_ids))
        self._memory.gather(block_ids, range(len(self.layer_names)), rows)
        self._wait()
        return rows

    def write(self, layer: int, block_ids: Sequence[int], rows: Tensor) -> None:
        """See `BlockCopies.write`."""
        staged: list[Any] = [rows] * (layer + 1)
        self._memory.scatter(range(len(block_ids)), block_ids, range(layer, layer + 1), staged)

    def _wait(self) -> None:
        """Until the copies that were asked for are in host memory."""
        if self._memory.device.type != "cpu":
            import torch  # noqa: PLC0415 - vLLM brings it

            getattr(torch, self._memory.device.type).current_stream().synchronize()
