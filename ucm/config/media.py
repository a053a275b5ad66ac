"""Whether what a store is to be kept on is there, can be written, and is as large as was said."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from typing import TYPE_CHECKING

from ucm.config.problems import Place, wrong
from ucm.config.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ucm.errors import ConfigError


def directory_problem(directory: Path, place: Place, written: object, *, make: bool = True) -> ConfigError | None:
    """What keeps us from using a directory. Makes it, and a file in it for a moment: permissions alone do not tell.

    Args:
        directory: The directory, made if it is not there, for its owner alone.
        place: Where it is named.
        written: How it is named there.
        make: Whether it is; if not, a directory is made beside it, or beside the first that is missing above it, and
            deleted at once.
    """
    try:
        if make or directory.exists():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            with tempfile.TemporaryDirectory(dir=_nearest(directory)):
                return None
    except FileExistsError:
        return wrong(place, f"{directory} is not a directory", "name a directory", written)
    except OSError as error:
        what = f"{directory} is not there and cannot be made: {error.strerror or error}"
        return wrong(place, what, "make it, or name another", written)
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        what = f"no file can be made in {directory}: {error.strerror or error}"
        return wrong(place, what, "let the user who runs vLLM write there, or name another", written)
    return None


def capacity_problem(capacity: int, directories: Sequence[Path], place: Place, written: object) -> ConfigError | None:
    """Whether directories, or where they will be made, can hold their equal shares of so many bytes."""
    wanted: Counter[int] = Counter()
    total: dict[int, int] = {}
    for directory in directories:
        there = _nearest(directory)
        device = there.stat().st_dev
        wanted[device] += capacity // len(directories)
        total[device] = shutil.disk_usage(there).total
        if wanted[device] > total[device]:
            share = "" if len(directories) == 1 else ", in equal shares,"
            what = f"{format_size(capacity)}{share} are more than the file system of {there} has: "
            fix = "lower it, or add room (in a container, --shm-size sets that of /dev/shm)"
            return wrong(place, f"{what}{format_size(total[device])} in all", fix, written)
    return None


def _nearest(directory: Path) -> Path:
    """The directory, or the first above it that is there."""
    return next(one for one in (directory, *directory.parents) if one.exists())
