"""Prepare the Dram tier's directory, in a tmpfs that all engines of a user on a host share.

Checking a configuration imports this module, also where numpy, which the tier itself needs, is not installed.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.errors import ConfigError
from ucm.store.posix.paths import DIRECTORY_MODE, distrust, group_id, make_directory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ucm.store.config import StoreConfig

_MOUNTS = Path("/proc/self/mounts")
_MEMORY_TYPES = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


def prepare_dram(config: StoreConfig) -> tuple[str, int]:
    """Make the tier's directory.

    Returns:
        The directory, and the capacity in bytes.

    Raises:
        ConfigError: It cannot be made, others can access it, it is not in a tmpfs, or the tmpfs is too small.
    """
    path = config.dram_directory
    where = f"store: dram_directory: {path}"
    parent, name = os.path.split(os.path.abspath(path))  # noqa: PTH100 - a link in its place is refused below
    try:
        with suppress(NotADirectoryError):  # reported below with what is there instead
            make_directory(f"{os.path.realpath(parent)}/{name}")
        status = Path(path).lstat()
        system = os.statvfs(path)
    except OSError as error:
        raise ConfigError(
            f"the Dram tier's directory cannot be created: {error.strerror}",
            where=where,
            fix="name a directory below an existing one in a tmpfs, for instance /dev/shm/ucm",
        ) from error
    group = group_id(config.trusted_group)
    reason = distrust(status, group)
    readers = stat.S_IRWXO if status.st_gid == group else stat.S_IRWXG | stat.S_IRWXO
    if reason or status.st_mode & readers:
        raise ConfigError(
            f"the Dram tier's directory must be this user's own, with mode {DIRECTORY_MODE:o}: others could read the "
            f"KV cache, or put theirs in its place{reason and f'; {reason}'}",
            where=where,
            fix=f"delete it, or `chmod {DIRECTORY_MODE:o}` it if it is yours; trusted_group shares it",
        )
    if not in_memory(path):
        raise ConfigError(
            "the Dram tier's directory is not in a tmpfs",
            where=where,
            fix="name one below /dev/shm, or use the Posix tier for a disk",
        )
    size = system.f_blocks * system.f_frsize
    capacity = config.dram_capacity_bytes or int(size * config.dram_capacity_fraction)
    if capacity > size:
        raise ConfigError(
            f"the Dram tier's capacity of {capacity} bytes is more than its tmpfs has: {size}",
            where="store: dram_capacity",
            fix="lower it, or enlarge the tmpfs (`--shm-size` of a container, `mount -o remount,size=` of a host)",
        )
    return path, capacity


def check_apart(dram_directory: str, directories: Iterable[str]) -> None:
    """Check that the Dram tier and the Posix tier do not share a directory: each deletes what the other stores.

    Raises:
        ConfigError: Directories are the same, or one is inside another; links are followed.
    """
    memory = os.path.realpath(dram_directory)
    for directory in directories:
        real = os.path.realpath(directory)
        if os.path.commonpath([memory, real]) in {memory, real}:
            how = "the same directory as" if memory == real else "inside, or contains,"
            raise ConfigError(
                f"the Dram tier's directory {dram_directory} is {how} the Posix tier's directory {directory}",
                where="store: dram_directory",
                fix="name one below /dev/shm that no other tier uses, or leave the setting out",
            )


def in_memory(path: str) -> bool:
    """Return whether a directory is on a file system that keeps its files in memory."""
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return True  # the mounts cannot be read: trust the operator
    for line in lines:
        _, point, found, *_ = line.split(" ")
        inside = point in ("/", real) or real.startswith(f"{point}/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind in _MEMORY_TYPES
