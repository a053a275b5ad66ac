"""Pretend that the engine's process starts after a test has written its files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ucm.hashing import request_content

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the test's files older than the process, and keep digests apart from the user's."""
    monkeypatch.setattr(request_content, "process_started", lambda: float("inf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
