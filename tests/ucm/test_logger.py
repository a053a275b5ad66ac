"""UCM's one logger."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest

from ucm.logger import LEVEL_VARIABLE, get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _fresh_logger() -> Iterator[None]:
    # Out of the registry rather than emptied: pytest adds handlers of its own to every logger that does not propagate.
    loggers = logging.root.manager.loggerDict
    before = loggers.pop("ucm", None)
    yield
    del loggers["ucm"]
    if before is not None:
        loggers["ucm"] = before


def test_a_message_names_its_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    get_logger().info("[UCM.Sparse] %s is active", "Probe")
    get_logger().debug("unseen")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("INFO ")
    assert err.endswith(f" pid={os.getpid()} MainProcess [UCM.Sparse] Probe is active\n")


def test_it_is_set_up_once_and_for_ucm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LEVEL_VARIABLE, raising=False)
    logger = get_logger()
    assert get_logger() is logger
    assert len(logger.handlers) == 1
    assert not logger.propagate


@pytest.mark.parametrize(("wanted", "level"), [("DEBUG", logging.DEBUG), ("warning", logging.WARNING), ("INFO", 20)])
def test_the_level_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, wanted: str, level: int) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, wanted)
    assert get_logger().level == level


def test_an_unknown_level_is_said_and_info_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "LOUD")
    assert get_logger().level == logging.INFO
    assert f"{LEVEL_VARIABLE}='LOUD' is not one of DEBUG, INFO, WARNING, ERROR" in capsys.readouterr().err
