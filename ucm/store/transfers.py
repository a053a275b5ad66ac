"""Check transfers against the geometry, to detect misuse."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from ucm.store.format import MAX_KEY_BYTES, MIN_KEY_BYTES

if TYPE_CHECKING:
    from ucm.store.base import BlockTransfer
    from ucm.store.format import HeaderCodec

#: Called for every layer slice, and several times as fast as an expression in Python.
_NBYTES, _CONTIGUOUS, _READONLY = map(attrgetter, ("nbytes", "c_contiguous", "readonly"))


def check_transfer(block: BlockTransfer, codec: HeaderCodec) -> int:
    """Check a transfer and return its size in bytes.

    Raises:
        ValueError: A layer slice does not exist, or its memory is of the wrong size or not contiguous.
    """
    first, slices, sizes = block.first_slice, block.slices, codec.geometry.slice_sizes
    if not MIN_KEY_BYTES <= len(block.key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, not {len(block.key)}")
    given = tuple(map(_NBYTES, slices))
    if not given or first < 0 or given != sizes[first : first + len(given)]:
        raise ValueError(
            f"block {block.key.hex()}: layer slices from {first} on have {given} bytes; of a block's {len(sizes)} "
            f"layer slices those there have {sizes[first : first + len(given)]}"
        )
    if not all(map(_CONTIGUOUS, slices)):
        raise ValueError(f"block {block.key.hex()}: the memory of a layer slice is not contiguous")
    return sum(given)


def check_memory(block: BlockTransfer) -> None:
    """Check that a transfer's memory is writable.

    Raises:
        ValueError: The memory is read-only.
    """
    if any(map(_READONLY, block.slices)):
        raise ValueError(f"block {block.key.hex()} cannot be loaded into read-only memory")
