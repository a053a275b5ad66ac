"""Whole blocks of a worker's KV caches, byte for byte, as a method that moves them sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ucm.sparse.attention import AttentionView

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ucm.store.base import BlockGeometry


class BlockCopies(Protocol):
    """Copies between the KV caches of a worker's layers and host memory."""

    @property
    def layer_names(self) -> Sequence[str]:
        """The layers, in the order in which they are counted here."""
        ...

    @property
    def geometry(self) -> BlockGeometry:
        """What a store needs to know of a block; each layer is one layer slice."""
        ...

    def host_rows(self, layer: int, blocks: int) -> Tensor:
        """Host memory for blocks of a layer, page-locked beside a device: ``[blocks, bytes of a block]``, uint8."""
        ...

    def read(self, block_ids: Sequence[int]) -> list[Tensor]:
        """Copies of blocks: per layer ``[blocks, bytes of a block]``, uint8, complete on return."""
        ...

    def write(self, layer: int, block_ids: Sequence[int], rows: Tensor) -> None:
        """Write into blocks of a layer, in the order of the device's work.

        Args:
            layer: Its place among `layer_names`.
            block_ids: The blocks.
            rows: ``[blocks, bytes of a block]``, uint8, in memory from `host_rows`.
        """
        ...


class CopyingView(AttentionView, Protocol):
    """The attention layers of one worker, with copies of their blocks."""

    def block_copies(self, kv_caches: Mapping[str, Tensor]) -> BlockCopies:
        """Copies of whole blocks.

        Args:
            kv_caches: The caches by layer, as `SparseMethod.attention_begin` was given them.

        Raises:
            UcmError: If the blocks of a layer cannot be located.
        """
        ...
