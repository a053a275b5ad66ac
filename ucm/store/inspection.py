"""What lies in a store's directories, for whoever looks from outside: lists, checks and cleaning of whole roots.

Everything here works on a root that engines are using.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.store.errors import BlockCorruptError, BlockForeignError, BlockMissingError, StoreUnavailableError
from ucm.store.format import namespace_digest, verify
from ucm.store.posix_aside import set_aside
from ucm.store.posix_layout import buckets, key_of, namespaces
from ucm.store.posix_survey import evict, survey
from ucm.store.posix_tidy import tidy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.store.base import BlockKey
    from ucm.store.errors import StoreError
    from ucm.store.posix_layout import Layout


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block's file, as far as its directory entry tells."""

    layout: Layout
    key: BlockKey
    nbytes: int
    used: float  #: when it was last used, in seconds since the epoch

    @property
    def path(self) -> str:
        """Where it is."""
        return self.layout.block(self.key)


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What a cleaning deleted."""

    left_over: int  #: files and leases of dead owners
    blocks: int
    nbytes: int  #: of the blocks


def stored_blocks(root: str, namespace: str | None = None) -> Iterator[StoredBlock]:
    """Every block of a root, or of one of its namespaces; those that vanish meanwhile are left out.

    Raises:
        OSError: The root cannot be listed.
    """
    for layout in namespaces(root):
        if namespace is not None and layout.namespace != namespace:
            continue
        for bucket in buckets(layout):
            with suppress(FileNotFoundError), os.scandir(bucket) as entries:
                for entry in entries:
                    key = key_of(bucket, entry.name)
                    with suppress(FileNotFoundError):
                        if key is not None:
                            status = entry.stat(follow_symlinks=False)
                            yield StoredBlock(layout, key, status.st_size, status.st_mtime)


def check_block(block: StoredBlock) -> StoreError | None:
    """Read a block and compare every checksum: what is wrong with it, or None."""
    try:
        content = memoryview(Path(block.path).read_bytes())
        header = verify(content, block.key)
    except FileNotFoundError:
        return BlockMissingError("the block is gone", where=block.path)
    except OSError as error:
        return StoreUnavailableError(f"the block cannot be read: {error.strerror}", where=block.path)
    except (BlockCorruptError, BlockForeignError) as error:
        error.where = block.path
        return error
    if header.namespace_digest != namespace_digest(block.layout.namespace):
        return BlockForeignError("the block belongs to another namespace", where=block.path)
    return None


def put_aside(block: StoredBlock, error: StoreError, keep: int) -> bool:
    """Take a damaged block out of the way, as an engine that meets it does; see ``set_aside``."""
    return set_aside(block.layout, block.key, error, keep)


def clean(root: str, capacity_bytes: int | None, stale_seconds: float) -> Cleaned:
    """Do at once what the engines that use a root do in time.

    Args:
        root: A configured directory.
        capacity_bytes: What it may hold; the least recently used blocks beyond it are deleted. None: no limit.
        stale_seconds: See ``StoreConfig``.

    Raises:
        OSError: The root cannot be listed.
    """
    left_over = tidy(root, stale_seconds)
    blocks = nbytes = 0
    if capacity_bytes is not None:
        found = survey(root)
        if found.nbytes > capacity_bytes:
            blocks, nbytes = evict(root, found, found.nbytes - capacity_bytes, lambda _: None)
    return Cleaned(left_over, blocks, nbytes)
