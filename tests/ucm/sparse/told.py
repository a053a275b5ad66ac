"""Collect log records, once each, whatever other handlers the logger has."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Keeping(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def told_meanwhile() -> Iterator[list[logging.LogRecord]]:
    """Collect the records of UCM's loggers, in order."""
    handler = _Keeping()
    get_logger().addHandler(handler)
    try:
        yield handler.records
    finally:
        get_logger().removeHandler(handler)


def warnings(records: list[logging.LogRecord]) -> list[str]:
    """Return the warnings among the records."""
    return [record.getMessage() for record in records if record.levelno == logging.WARNING]
