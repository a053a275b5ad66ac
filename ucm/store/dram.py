"""The tier in memory: files like those of the Posix tier, in a tmpfs that all engines of a user on a host share."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.errors import ConfigError
from ucm.store.posix_layout import DIRECTORY_MODE, make_directory

if TYPE_CHECKING:
    from ucm.store.config import StoreConfig

_MOUNTS = Path("/proc/self/mounts")
_MEMORY_TYPES = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


def prepare_dram(config: StoreConfig) -> tuple[str, int]:
    """Make the tier's directory.

    Returns:
        The directory, and the capacity in bytes.

    Raises:
        ConfigError: It cannot be made, is not ours alone, is on no tmpfs, or the tmpfs is smaller than the capacity.
    """
    path = config.dram_directory
    where = f"store: dram_directory: {path}"
    try:
        make_directory(path)
        status = Path(path).lstat()
        system = os.statvfs(path)
    except OSError as error:
        raise ConfigError(
            f"the Dram tier's directory cannot be made: {error.strerror}",
            where=where,
            fix="name a directory below an existing one in a tmpfs, for instance /dev/shm/ucm",
        ) from error
    mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not mine or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"the Dram tier's directory must be this user's own, with mode {DIRECTORY_MODE:o}: others could read the "
            "KV cache, or put theirs in its place",
            where=where,
            fix=f"delete it, or `chmod {DIRECTORY_MODE:o}` it if it is yours",
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


def in_memory(path: str) -> bool:
    """Whether a directory is in a file system that keeps its files in memory."""
    real = os.path.realpath(path)
    best, kind = "", ""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return True  # no way to tell: the operator named it
    for line in lines:
        _, point, found, *_ = line.split(" ")
        inside = point in ("/", real) or real.startswith(f"{point}/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind in _MEMORY_TYPES
