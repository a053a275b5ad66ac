"""Stand-ins for torch tensors over NumPy memory, laid out as vLLM lays out its KV caches."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Storage:
    """The result of ``untyped_storage``."""

    raw: NDArray[np.uint8]

    def data_ptr(self) -> int:
        return int(self.raw.ctypes.data)


@dataclass(frozen=True)
class Tensor:
    """The part of a ``torch.Tensor`` that is used; strides and offset in elements, as in torch."""

    raw: NDArray[np.uint8]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int = 0

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return self.dtype.itemsize

    def storage_offset(self) -> int:
        return self.offset

    def data_ptr(self) -> int:
        return int(self.raw.ctypes.data) + self.offset * self.dtype.itemsize

    def untyped_storage(self) -> Storage:
        return Storage(self.raw)

    def view(self) -> NDArray[Any]:
        """Return the elements as a NumPy array."""
        return as_strided(
            self.raw[self.offset * self.dtype.itemsize :].view(self.dtype),
            self.shape,
            [stride * self.dtype.itemsize for stride in self.strides],
        )

    def places(self) -> NDArray[np.int64]:
        """Return the byte offset of each element in the storage, in the tensor's shape."""
        found = np.full(self.shape, self.offset, np.int64)
        for axis, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            found += (np.arange(size) * stride).reshape([-1 if i == axis else 1 for i in range(len(self.shape))])
        return found * self.dtype.itemsize


def tensor(
    shape: Sequence[int],
    order: Sequence[int] | None = None,
    dtype: str = "float16",
    gaps: Sequence[int] | None = None,
    offset: int = 0,
) -> Tensor:
    """Return a tensor in new memory with random bytes.

    Args:
        shape: Its sizes.
        order: Its dimensions in memory order, outermost first; default: as in the shape.
        dtype: NumPy's name of the type.
        gaps: The number of unused elements after each step of a dimension, in that order.
        offset: The number of elements before the first one.
    """
    order = range(len(shape)) if order is None else order
    gaps = [0] * len(shape) if gaps is None else gaps
    strides, step = [0] * len(shape), 1
    for dim, gap in zip(reversed(order), reversed(gaps), strict=True):
        strides[dim] = step + gap
        step = strides[dim] * shape[dim]
    kind = np.dtype(dtype)
    raw = np.random.default_rng(prod(shape)).integers(0, 256, (offset + step) * kind.itemsize, np.uint8)
    return Tensor(raw, tuple(shape), tuple(strides), kind, offset)


#: vLLM's ``KVCacheLayout`` since 0.29.0: the dimensions L, B, H, N, C in memory order, outermost first.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def layer_views(layout: str, sizes: Sequence[int], split: int = 1, padding: int = 0) -> list[Tensor]:
    """Return all layers as views of one allocation, like vLLM since 0.29.0.

    Args:
        layout: A name of ``LAYOUTS``.
        sizes: The number of layers, blocks, heads, tokens per block and elements per cell.
        split: Kernel blocks per block.
        padding: Unused elements after each page.
    """
    layers, blocks, heads, tokens, cell = sizes
    shape = (layers, blocks * split, heads, tokens // split, cell)
    order = LAYOUTS[layout]
    innermost = max(order.index(0), order.index(1))
    whole = tensor(shape, order, gaps=[padding if i == innermost else 0 for i in range(5)])
    return [
        Tensor(whole.raw, whole.shape[1:], whole.strides[1:], whole.dtype, layer * whole.strides[0])
        for layer in range(layers)
    ]
