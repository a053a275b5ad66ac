"""Fixtures of the configuration tests: log lines, and files in UCM's format."""

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
    """The logged lines; each test starts with no notice logged before, like a new process."""
    monkeypatch.setattr(load, "_said", set())
    monkeypatch.setattr(load, "_silent", set())
    handler = _Lines()
    logger = get_logger()
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files in UCM's format; ${KV} in them is a new directory."""
    monkeypatch.setenv("KV", str(tmp_path / "kv"))
    return UPSTREAM
