"""A store of files in one directory, and what it logs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from ucm.logger import get_logger
from ucm.store.config import StoreConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
def config(tmp_path: Path) -> StoreConfig:
    root = tmp_path / "root"
    root.mkdir()
    return StoreConfig(directories=(str(root),), lookup_cache_keys=0)
