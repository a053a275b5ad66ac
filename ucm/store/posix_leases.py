"""Promises that a block stays: a hard link per block in a directory of the reader's own.

Eviction leaves a file with more than one link alone, and should a block have been deleted in the moment before its
link was made, a load that names the lease reads the link. A lease that its owner never released goes when the owner is
gone; if another host looks after the directory, after ``stale_seconds``.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.store.posix_layout import make_directory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucm.store.base import BlockKey
    from ucm.store.posix_layout import Layout


def link_blocks(layout: Layout, lease: str, keys: Iterable[BlockKey]) -> set[BlockKey]:
    """Link the blocks that are there.

    Args:
        layout: Where.
        lease: The lease's name.
        keys: The blocks.

    Returns:
        Those that are linked.
    """
    directory = f"{layout.leases}/{lease}"
    held: set[BlockKey] = set()
    with suppress(OSError):
        make_directory(layout.leases)
        make_directory(directory)
        for key in keys:
            with suppress(FileNotFoundError):
                os.link(layout.block(key), f"{directory}/{key.hex()}")
                held.add(key)
    return held


def leased_path(layout: Layout, lease: str, key: BlockKey) -> str:
    """Where a leased block is found."""
    return f"{layout.leases}/{lease}/{key.hex()}"


def unlink_blocks(layout: Layout, lease: str) -> bool:
    """Give the blocks of a lease back to eviction.

    Returns:
        Whether nothing is left of it; otherwise it may be tried again.
    """
    directory = Path(layout.leases, lease)
    with suppress(OSError):
        if directory.exists():
            shutil.rmtree(directory, ignore_errors=True)
            return not directory.exists()
        return True
    return False
