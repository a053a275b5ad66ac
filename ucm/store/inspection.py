"""List and check the blocks in a store's directories, for tools outside an engine.

All functions work on a root that engines are using.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ucm.store.errors import BlockCorruptError, BlockForeignError, BlockMissingError, BlockUnreadableError
from ucm.store.format import namespace_digest
from ucm.store.posix.files import check_file, quarantine
from ucm.store.posix.layout import buckets, key_of, namespaces
from ucm.store.posix.paths import list_directory
from ucm.store.segment import check_slot, delete_slot, segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ucm.store.authentication import Authenticator
    from ucm.store.base import BlockKey
    from ucm.store.errors import StoreError
    from ucm.store.posix.layout import Layout


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block's file, as described by its directory entry, or a block in memory."""

    layout: Layout
    key: BlockKey
    nbytes: int
    used: float  #: when it was last used, in seconds since the epoch
    slot: tuple[str, int] | None = None  #: in memory: the path of its segment and the number of its slot

    @property
    def path(self) -> str:
        """The path of the file."""
        return self.layout.block(self.key) if self.slot is None else f"{self.slot[0]}#{self.slot[1]}"


def stored_blocks(root: str, namespace: str | None = None, *, in_memory: bool = False) -> Iterator[StoredBlock]:
    """Yield every block of a root, or of one of its namespaces; skip those that vanish meanwhile.

    Args:
        root: The root.
        namespace: The namespace; None: all.
        in_memory: Whether the root is a Dram tier's, whose blocks lie in segments alone; see ``former_blocks``.

    Raises:
        OSError: The root cannot be listed.
    """
    for layout in namespaces(root):
        if namespace is not None and layout.namespace != namespace:
            continue
        for bucket in () if in_memory else buckets(layout):
            for name, status in list_directory(bucket):
                key = key_of(bucket, name)
                if key is not None:
                    yield StoredBlock(layout, key, status.st_size, status.st_mtime)
        for segment in segments(layout):
            for key, number in segment.blocks():
                yield StoredBlock(layout, key, segment.slot_nbytes, segment.used, (segment.path, number))


def check_block(
    block: StoredBlock, authenticator: Authenticator | None = None, authentic: Callable[[], object] = int
) -> StoreError | None:
    """Read a block and compare every checksum; return what is wrong with it, or None.

    Args:
        block: The block.
        authenticator: Checks the tags as well, of a block that is authenticated by its key.
        authentic: Called if these are right.
    """
    try:
        if block.slot is None:
            header = check_file(block.path, block.key, authenticator)
        else:
            header = check_slot(*block.slot, block.key, authenticator)
    except FileNotFoundError:
        return BlockMissingError("the block is gone", where=block.path)
    except OSError as error:
        return BlockUnreadableError(f"the block cannot be read: {error.strerror}", where=block.path)
    except BlockMissingError as error:
        return error
    except (BlockCorruptError, BlockForeignError) as error:
        error.where = block.path
        return error
    if header.namespace_digest != namespace_digest(block.layout.namespace):
        return BlockForeignError("the block belongs to another namespace", where=block.path)
    if header.tags:
        authentic()
    return None


def quarantine_block(block: StoredBlock, error: StoreError, keep: int) -> bool:
    """Move a damaged block away, as an engine that meets it does; see ``quarantine``. One in memory is deleted."""
    if block.slot is not None:
        return delete_slot(*block.slot, block.key)
    return quarantine(block.layout, block.key, error, keep)
