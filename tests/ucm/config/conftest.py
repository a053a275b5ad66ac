"""What the tests of the configuration share: what it logs, and files in UCM's format."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.config import load
from ucm.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

UPSTREAM = Path(__file__).parent / "upstream"


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines that a process logs; each test is a new process as to what was said before."""
    monkeypatch.setattr(load, "_said", set())
    handler = _Lines()
    logger = get_logger()
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files in UCM's format; what they call ${KV} is a new directory."""
    monkeypatch.setenv("KV", str(tmp_path / "kv"))
    return UPSTREAM
