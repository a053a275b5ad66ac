"""Copies of whole blocks of a worker's KV caches, for methods that move blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ucm.sparse.attention import AttentionView

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ucm.store.base import BlockGeometry, Buffer


class BlockCopies(Protocol):
    """Copies between the KV caches of a worker's layers and host memory."""

    @property
    def layer_names(self) -> Sequence[str]:
        """The layers, in the order of their indices here."""
        ...

    @property
    def geometry(self) -> BlockGeometry:
        """The geometry of a block for a store; each layer is one layer slice."""
        ...

    def host_rows(self, layer: int, blocks: int) -> Tensor:
        """Allocate host memory for blocks of a layer, pinned for a device: ``[blocks, bytes of a block]``, uint8."""
        ...

    def memory(self, layer: int, block_id: int) -> Buffer | None:
        """Return the memory of a block of a layer, writable bytes; None if it is on a device or in several pieces."""
        ...

    def read(self, block_ids: Sequence[int]) -> list[Tensor]:
        """Copy blocks to host memory: per layer ``[blocks, bytes of a block]``, uint8, complete on return."""
        ...

    def write(self, layer: int, block_ids: Sequence[int], rows: Tensor) -> None:
        """Write into blocks of a layer, in stream order.

        Args:
            layer: Its index in `layer_names`.
            block_ids: The blocks.
            rows: ``[blocks, bytes of a block]``, uint8, in memory from `host_rows`.
        """
        ...


class CopyingView(AttentionView, Protocol):
    """An `AttentionView` that can also copy blocks."""

    def block_copies(self, kv_caches: Mapping[str, Tensor]) -> BlockCopies:
        """Return an interface for copies of whole blocks.

        Args:
            kv_caches: The caches by layer, as passed to `SparseMethod.attention_begin`.

        Raises:
            UcmError: If the blocks of a layer cannot be located.
        """
        ...
