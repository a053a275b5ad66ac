"""Fixtures of the metrics tests: the logged lines."""

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
        self.levels: list[int] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.levels.append(record.levelno)


@pytest.fixture
def handler() -> Iterator[_Lines]:
    """The handler of a test's log."""
    handler = _Lines()
    logger = get_logger()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture
def said(handler: _Lines) -> list[str]:
    """The lines."""
    return handler.lines


@pytest.fixture
def levels(handler: _Lines) -> list[int]:
    """Their levels."""
    return handler.levels
