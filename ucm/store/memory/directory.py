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
from ucm.store.posix.paths import DIRECTORY_MODE, distrust, file_system_of, group_id, make_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.config import StoreConfig

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
    if not in_memory(path):  # before it is made
        raise ConfigError(
            "the Dram tier's directory is not in a tmpfs",
            where=where,
            fix="name one below /dev/shm, or use the Posix tier for a disk",
        )
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
    size = system.f_blocks * system.f_frsize
    capacity = config.dram_capacity_bytes or int(size * config.dram_capacity_fraction)
    if capacity > size:
        raise ConfigError(
            f"the Dram tier's capacity of {capacity} bytes is more than its tmpfs has: {size}",
            where="store: dram_capacity",
            fix="lower it, or enlarge the tmpfs (`--shm-size` of a container, `mount -o remount,size=` of a host)",
        )
    return path, capacity


def check_apart(directories: Sequence[str], dram_directory: str | None = None) -> None:
    """Check that no directory of a store is another one of it, or inside another one.

    A directory of the Posix tier that is named twice gets the blocks of two, but has room for those of one; the Posix
    tier and the Dram tier delete what the other stores. Links are followed, and a directory that is mounted in two
    places is recognised. Directories need not exist.

    Args:
        directories: Those of the Posix tier.
        dram_directory: That of the Dram tier; None if there is none.

    Raises:
        ConfigError: Naming both directories.
    """
    named = [(f"the Posix tier's directory {path}", path) for path in directories]
    named += [] if dram_directory is None else [(f"the Dram tier's directory {dram_directory}", dram_directory)]
    if len(named) == 1:
        return
    known = [(name, *_places(path)) for name, path in named]
    for number, (name, place, parents) in enumerate(known):
        for other, its_place, its_parents in known[:number]:
            if place == its_place:
                how = f"{name} is the same as {other}"
            elif its_place in parents:
                how = f"{name} is inside {other}"
            elif place in its_parents:
                how = f"{other} is inside {name}"
            else:
                continue
            if number < len(directories):
                raise ConfigError(how, where="store: directories", fix="name each directory once, none inside another")
            raise ConfigError(
                how,
                where="store: dram_directory",
                fix="name one below /dev/shm that no other tier uses, or leave the setting out",
            )


def _places(path: str) -> tuple[tuple[object, ...], set[tuple[object, ...]]]:
    """Return what identifies a directory however it is named, and the same for each of its parents.

    That is the device and the number of it, or of its nearest existing parent with the names below that.
    """
    real = Path(os.path.realpath(path))
    found: list[tuple[object, ...]] = []
    for parent in (*reversed(real.parents), real):
        try:
            status = parent.stat()
        except OSError:
            found.append((*found[-1], parent.name))
        else:
            found.append((status.st_dev, status.st_ino))
    return found[-1], set(found[:-1])


def in_memory(path: str) -> bool:
    """Return whether a directory is on a file system that keeps its files in memory, or would be if it were made.

    An unknown file system is trusted.
    """
    place = os.path.realpath(path)
    while not os.path.exists(place):  # noqa: PTH110 - as everywhere here
        place = os.path.dirname(place)  # noqa: PTH120 - likewise
    return file_system_of(place) in {*_MEMORY_TYPES, ""}
