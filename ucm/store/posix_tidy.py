"""Deleting what dead writers and readers have left behind."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from ucm.store.posix_layout import is_stale, namespaces


def tidy(root: str, stale_seconds: float) -> int:
    """Delete the temporary files and the leases of owners that are gone, in every namespace.

    Args:
        root: A configured directory.
        stale_seconds: See ``StoreConfig``.

    Returns:
        How many were deleted.

    Raises:
        OSError: The root cannot be listed.
    """
    count = 0
    now = time.time()
    for layout in namespaces(root):
        for directory in (layout.temporary, layout.leases):
            with suppress(FileNotFoundError), os.scandir(directory) as entries:
                for entry in entries:
                    with suppress(OSError):
                        # A lease is a directory: its links keep their blocks' own times.
                        age = now - entry.stat(follow_symlinks=False).st_mtime
                        if is_stale(entry.name, age, stale_seconds):
                            _delete(entry)
                            count += 1
    return count


def _delete(entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.path, ignore_errors=True)
    else:
        Path(entry.path).unlink()
