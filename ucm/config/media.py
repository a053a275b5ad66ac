"""Whether what a store is to be kept on is there, can be written, and is as large as was said."""

from __future__ import annotations

import shutil
import tempfile
from typing import TYPE_CHECKING

from ucm.config.problems import Place, wrong
from ucm.config.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ucm.errors import ConfigError


def directory_problem(directory: Path, place: Place, written: object) -> ConfigError | None:
    """What keeps us from using a directory. Makes it, and a file in it for a moment: permissions alone do not tell.

    Args:
        directory: The directory, made if it is not there, for its owner alone.
        place: Where it is named.
        written: How it is named there.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    """Whether directories, or where they will be made, can hold so many bytes; each file system counts once."""
    there = [next(one for one in (directory, *directory.parents) if one.exists()) for directory in directories]
    total = sum({directory.stat().st_dev: shutil.disk_usage(directory).total for directory in there}.values())
    if capacity <= total:
        return None
    what = f"{format_size(capacity)} are more than the file system has in all: {format_size(total)}"
    return wrong(place, what, "lower it, or add room (in a container, --shm-size sets that of /dev/shm)", written)
