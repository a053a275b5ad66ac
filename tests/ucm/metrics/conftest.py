"""What the tests of the metrics share: the lines that are logged."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The lines that are logged during a test."""
    handler = _Lines()
    logger = get_logger()
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)
