"""For the tests of commands that start vLLM."""

from __future__ import annotations

import pytest

from ucm.logger import LEVEL_VARIABLE


@pytest.fixture(autouse=True)
def _log_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the levels that these commands set only if unset, so that they do not leak into later tests."""
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv(LEVEL_VARIABLE, "WARNING")
