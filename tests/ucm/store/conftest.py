"""Where the tests keep their stores, and what these log."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.logger import get_logger
from ucm.store import health, recent
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory is made in it


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The lines that are logged."""
    handler = _Lines()
    logger = get_logger()
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


@pytest.fixture
def memory() -> Iterator[str]:
    """A directory to be, in a tmpfs."""
    if not SHARED_MEMORY.is_dir():
        pytest.skip("there is no /dev/shm for the Dram tier")
    parent = tempfile.mkdtemp(dir=SHARED_MEMORY)
    yield f"{parent}/tier"
    shutil.rmtree(parent)


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    root = tmp_path / "root"
    root.mkdir()
    return StoreConfig(directories=(str(root),), lookup_cache_keys=0)


class Clock:
    """A clock that stands still until the test moves it."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What tells when a rest is over, and what was seen is old."""
    found = Clock()
    monkeypatch.setattr(health, "time", found)
    monkeypatch.setattr(recent, "time", found)
    return found
