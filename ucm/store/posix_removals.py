"""The log of removed blocks: who remembers which blocks are there learns here, in one call, which no longer are.

A namespace's file ``REMOVED`` holds a random mark of 8 bytes and then, for every block that was evicted or set aside,
the first 8 bytes of its key. It is only ever appended to, by single calls; when it has grown long, a new one with
another mark takes its place, and readers begin anew. It is a help and no truth: a block whose removal went unlogged
fails to load, as one that is removed between a lookup and the load does.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ucm.store.posix_layout import FILE_MODE, owner_name, unlink_private

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucm.store.base import BlockKey
    from ucm.store.posix_layout import Layout

    Prefixes = np.ndarray[tuple[int], np.dtype[np.uint64]]

PREFIX_BYTES = 8
#: About a million removals.
_LONGEST = 8 << 20
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reader has read: up to a length of the log with an inode and a mark; as below if there is none."""

    inode: int = 0
    mark: bytes = b""
    nbytes: int = 0


def removals_path(layout: Layout) -> str:
    """Where a namespace's log is."""
    return f"{layout.base}/REMOVED"


def log_removals(layout: Layout, keys: Iterable[BlockKey]) -> None:
    """Tell of blocks that are gone. Never raises: what cannot be logged is found out by loading."""
    record = b"".join([key[:PREFIX_BYTES] for key in keys])
    path = removals_path(layout)
    with suppress(OSError):
        try:
            descriptor = os.open(path, _APPEND)
        except FileNotFoundError:
            _begin(layout)
            descriptor = os.open(path, _APPEND)
        try:
            os.write(descriptor, record)
            long = os.fstat(descriptor).st_size > _LONGEST
        finally:
            os.close(descriptor)
        if long:
            _begin(layout)


def _begin(layout: Layout) -> None:
    private = f"{layout.temporary}/{owner_name()}"
    descriptor = os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            os.write(descriptor, os.urandom(PREFIX_BYTES))
        finally:
            os.close(descriptor)
        Path(private).rename(removals_path(layout))
    except OSError:
        unlink_private(private)
        raise


def read_removals(layout: Layout, since: Position | None) -> tuple[Position, Prefixes | None]:
    """What was removed since a position.

    Args:
        layout: The namespace.
        since: Where the last reading ended; None to begin at the end.

    Returns:
        Where this reading ended, and the first 8 bytes of each key; None in their place if nothing that was known
        before is to be relied on.

    Raises:
        OSError: The namespace cannot be reached, or is not there.
    """
    try:
        status = os.stat(removals_path(layout))  # noqa: PTH116 - a Path costs as much as the call
    except FileNotFoundError:
        os.stat(layout.base)  # noqa: PTH116
        now = Position()
        return now, _NONE if since in (None, now) else None
    if since is not None and (since.inode, since.nbytes) == (status.st_ino, status.st_size):
        return since, _NONE
    with Path(removals_path(layout)).open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        mark = file.read(PREFIX_BYTES)
        now = Position(status.st_ino, mark, status.st_size - status.st_size % PREFIX_BYTES)
        if since is None:
            return now, _NONE
        if (since.inode, since.mark) != (now.inode, mark):
            return now, None
        content = os.pread(file.fileno(), max(0, now.nbytes - since.nbytes), since.nbytes)
    return now, np.frombuffer(content[: len(content) - len(content) % PREFIX_BYTES], dtype=np.uint64)


_NONE: Prefixes = np.empty(0, dtype=np.uint64)
