"""A directory for the Dram tier."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def shared_memory() -> Iterator[Path]:
    """Make a private directory in shared memory, and delete it."""
    with tempfile.TemporaryDirectory(prefix="ucm-test-", dir="/dev/shm") as name:
        yield Path(name)
