"""Damaged blocks are moved out of the way, so that they are misses from then on, and a few are kept to be looked at."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ucm.store.posix_layout import make_directory
from ucm.store.posix_removals import log_removals

if TYPE_CHECKING:
    from ucm.store.base import BlockKey
    from ucm.store.errors import StoreError
    from ucm.store.posix_layout import Layout


def set_aside(layout: Layout, key: BlockKey, error: StoreError, keep: int) -> bool:
    """Move a block's file into the namespace's ``aside``, or delete it if that is impossible.

    Args:
        layout: Where.
        key: The block.
        error: What is wrong with it; its cause becomes part of the name.
        keep: How many such files stay; the oldest are deleted.

    Returns:
        Whether the block is out of the way. A file that is gone already is.
    """
    path = layout.block(key)
    try:
        make_directory(layout.aside)
        Path(path).rename(f"{layout.aside}/{time.time_ns()}-{key.hex()}-{error.cause}")
        names = sorted(os.listdir(layout.aside))  # noqa: PTH208 - names sort by time, and are all that is needed
        for name in names[: max(0, len(names) - keep)]:
            Path(layout.aside, name).unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except OSError:
        try:
            Path(path).unlink(missing_ok=True)
        except OSError:
            return False
    log_removals(layout, [key])
    return True
