"""How much a namespace holds, whose it is, and what dead processes left in it; beside ``ucm.store.inspection``.

Nothing is changed, and engines may be at work meanwhile: what is gone by the time that it is looked at was not there.
"""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.errors import ConfigError
from ucm.store.inspection import stored_blocks
from ucm.store.posix_layout import (
    IDENTITY,
    MAX_IDENTITY_BYTES,
    Layout,
    buckets,
    check_namespace,
    is_stale,
    namespaces,
)

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class SideFile:
    """What lies in a namespace beside its blocks: a file, or a lease, which is a directory of links without a size."""

    path: str
    nbytes: int
    written: float  #: in seconds since the epoch


@dataclass(slots=True)
class NamespaceStock:
    """What a namespace holds in one directory; bytes are those of whole files, times seconds since the epoch."""

    namespace: str
    identity: dict[str, Any] | None  #: what its blocks depend on
    blocks: int = 0
    nbytes: int = 0
    oldest: float | None = None  #: the least recent use
    newest: float | None = None
    temporaries: int = 0  #: blocks being written
    leases: int = 0  #: promises to readers
    left_behind: int = 0  #: those of both whose owners are gone
    aside: int = 0  #: damaged blocks that were moved out of the way
    side_nbytes: int = 0  #: of temporaries and damaged blocks


def side_files(directory: str) -> list[SideFile]:
    """What lies in one of a namespace's directories beside its blocks; nothing if that is not there.

    Raises:
        OSError: It cannot be listed.
    """
    found = []
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                nbytes = status.st_size if stat.S_ISREG(status.st_mode) else 0
                found.append(SideFile(entry.path, nbytes, status.st_mtime))
    return found


def left_behind(layout: Layout, stale_seconds: float) -> list[SideFile]:
    """Temporary files and leases whose owners are gone.

    Args:
        layout: The namespace.
        stale_seconds: See ``StoreConfig``.

    Raises:
        OSError: The namespace cannot be listed.
    """
    now = time.time()
    return [
        file
        for directory in (layout.temporary, layout.leases)
        for file in side_files(directory)
        if is_stale(file.path.rpartition("/")[2], now - file.written, stale_seconds)
    ]


def identity(layout: Layout) -> dict[str, Any] | None:
    """What was written beside the blocks of a namespace; None if there is nothing, or nothing that can be read."""
    try:
        with Path(layout.base, IDENTITY).open("rb") as file:
            found = json.loads(file.read(MAX_IDENTITY_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def take_stock(layout: Layout, stale_seconds: float, step: Callable[[], object] = int) -> NamespaceStock:
    """Count what a namespace holds.

    Args:
        layout: The namespace.
        stale_seconds: See ``StoreConfig``.
        step: Called after each block.

    Raises:
        OSError: The namespace cannot be listed.
    """
    stock = NamespaceStock(layout.namespace, identity(layout))
    for block in stored_blocks(layout.root, layout.namespace):
        stock.blocks += 1
        stock.nbytes += block.nbytes
        stock.oldest = block.used if stock.oldest is None else min(block.used, stock.oldest)
        stock.newest = block.used if stock.newest is None else max(block.used, stock.newest)
        step()
    temporaries, aside = side_files(layout.temporary), side_files(layout.aside)
    stock.temporaries, stock.aside = len(temporaries), len(aside)
    stock.side_nbytes = sum(file.nbytes for file in (*temporaries, *aside))
    stock.leases = len(side_files(layout.leases))
    stock.left_behind = len(left_behind(layout, stale_seconds))
    return stock


def unmarked(root: str) -> list[str]:
    """Directories of a root that look like a namespace and lack its marker, so that nobody looks after them.

    Raises:
        OSError: The root cannot be listed.
    """
    known = {layout.base for layout in namespaces(root)}
    found = []
    for path in sorted(Path(root).iterdir()):
        with suppress(ConfigError):
            layout = Layout(root, check_namespace(path.name.replace("+", "/")))
            if layout.base not in known and path.is_dir() and buckets(layout) and Path(layout.temporary).is_dir():
                found.append(str(path))
    return found
