"""Check transfers against the geometry, to detect misuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ucm.store.format import MAX_KEY_BYTES, MIN_KEY_BYTES

if TYPE_CHECKING:
    from ucm.store.base import BlockTransfer
    from ucm.store.format import HeaderCodec


def check_transfer(block: BlockTransfer, codec: HeaderCodec) -> int:
    """Check a transfer and return its size in bytes.

    Raises:
        ValueError: A shard does not exist, or its memory is of the wrong size or not contiguous.
    """
    first, shards, sizes = block.first_shard, block.shards, codec.geometry.shard_sizes
    if not MIN_KEY_BYTES <= len(block.key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, not {len(block.key)}")
    given = tuple([shard.nbytes for shard in shards])
    if not given or first < 0 or given != sizes[first : first + len(given)]:
        raise ValueError(
            f"block {block.key.hex()}: shards from {first} on have {given} bytes; of a block's {len(sizes)} shards "
            f"those there have {sizes[first : first + len(given)]}"
        )
    if not all(shard.c_contiguous for shard in shards):
        raise ValueError(f"block {block.key.hex()}: the memory of a shard is not contiguous")
    return sum(given)


def check_memory(block: BlockTransfer) -> None:
    """Check that a transfer's memory is writable.

    Raises:
        ValueError: The memory is read-only.
    """
    if any(shard.readonly for shard in block.shards):
        raise ValueError(f"block {block.key.hex()} cannot be loaded into read-only memory")
