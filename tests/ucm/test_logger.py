"""UCM's loggers, and how they follow vLLM's."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
from logging.config import dictConfig
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ucm.logger import LEVEL_VARIABLE, VLLM_CONFIGURES, VLLM_LEVEL_VARIABLE, get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ("ucm", "ucm.sparse.esa.method", "vllm")


@pytest.fixture(autouse=True)
def _fresh_loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in (LEVEL_VARIABLE, VLLM_LEVEL_VARIABLE, VLLM_CONFIGURES):
        monkeypatch.delenv(variable, raising=False)
    # Removed from the registry instead of emptied: pytest adds its handlers to every logger that does not propagate.
    loggers = logging.root.manager.loggerDict
    before = {name: loggers.pop(name, None) for name in NAMES}
    others = [(logger, logger.disabled) for logger in loggers.values() if isinstance(logger, logging.Logger)]
    yield
    for logger, disabled in others:
        logger.disabled = disabled
    for name, kept in before.items():
        loggers.pop(name, None)
        if kept is not None:
            loggers[name] = kept


class Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"level": record.levelname, "logger": record.name, "text": record.getMessage()})


class OfVllm(logging.Formatter):
    """Stands for vLLM's own formatters, which are recognised by their package."""


OfVllm.__module__ = "vllm.logging_utils.formatter"


def vllm_logs_to(stream: io.StringIO, formatter: logging.Formatter, level: int = logging.INFO) -> None:
    """Configure vLLM's logger as vLLM does."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    handler.setLevel(level)
    logger = logging.getLogger("vllm")
    logger.handlers = [handler]
    logger.setLevel(level)
    logger.propagate = False


def test_a_message_names_its_process(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger().info("[UCM.Sparse] %s is active", "Probe")
    get_logger().debug("unseen")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("INFO ")
    assert err.endswith(f" pid={os.getpid()} MainProcess [UCM.Sparse] Probe is active\n")


def test_a_module_has_a_logger_of_its_own() -> None:
    logger = get_logger("ucm.sparse.esa.method")
    assert logger.name == "ucm.sparse.esa.method"
    assert logger.getEffectiveLevel() == logging.INFO
    assert len(get_logger().handlers) == 1


def test_records_go_through_a_configured_formatter_once() -> None:
    stream = io.StringIO()
    logger = get_logger("ucm.sparse.esa.method")  # before vLLM has configured anything
    vllm_logs_to(stream, Json())
    logger.info("[UCM.Sparse] %d blocks", 3)
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [
        {"level": "INFO", "logger": "ucm.sparse.esa.method", "text": "[UCM.Sparse] 3 blocks"}
    ]


def test_beside_vllms_own_lines_ours_name_the_process() -> None:
    stream = io.StringIO()
    vllm_logs_to(stream, OfVllm())
    get_logger().info("[UCM.Patch] here")
    assert stream.getvalue().endswith(f" pid={os.getpid()} MainProcess [UCM.Patch] here\n")


def test_where_vllm_configures_nothing_the_root_logger_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VLLM_CONFIGURES, "0")
    get_logger("ucm.sparse.esa.method").warning("[UCM.Sparse] told")
    assert ("ucm.sparse.esa.method", logging.WARNING, "[UCM.Sparse] told") in caplog.record_tuples
    assert capsys.readouterr().err == ""


def test_a_configuration_that_names_our_logger_is_left_alone() -> None:
    stream = io.StringIO()
    get_logger().info("before")
    dictConfig(
        {
            "version": 1,
            "handlers": {"theirs": {"class": "logging.StreamHandler", "stream": stream}},
            "loggers": {"ucm": {"handlers": ["theirs"], "level": "ERROR"}},
        }
    )
    get_logger().warning("unseen")
    get_logger().error("seen")
    assert stream.getvalue() == "seen\n"


def test_a_configuration_that_disables_others_does_not_silence_us(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger().info("before")
    dictConfig({"version": 1, "loggers": {"vllm": {"level": "INFO"}}})
    get_logger().info("after")
    assert "after" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ours", "of_vllm", "level"),
    [
        (None, None, logging.INFO),
        (None, "warning", logging.WARNING),
        (None, "LOUD", logging.INFO),
        ("DEBUG", "WARNING", logging.DEBUG),
        ("error", None, logging.ERROR),
    ],
)
def test_the_level_is_vllms_unless_ours_is_set(
    monkeypatch: pytest.MonkeyPatch, ours: str | None, of_vllm: str | None, level: int
) -> None:
    for variable, value in ((LEVEL_VARIABLE, ours), (VLLM_LEVEL_VARIABLE, of_vllm)):
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert get_logger().level == level


def test_the_level_follows_vllms_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    get_logger()
    vllm_logs_to(io.StringIO(), Json(), logging.ERROR)
    assert get_logger().level == logging.ERROR
    stream = io.StringIO()
    vllm_logs_to(stream, Json(), logging.INFO)
    monkeypatch.setenv(LEVEL_VARIABLE, "DEBUG")
    get_logger().debug("wanted by us, though vLLM's handler is at INFO")
    assert "wanted by us" in stream.getvalue()


def test_an_unknown_level_is_said_and_vllms_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LEVEL_VARIABLE, "LOUD")
    assert get_logger().level == logging.INFO
    assert f"{LEVEL_VARIABLE}='LOUD' is not one of DEBUG, INFO, WARNING, ERROR" in capsys.readouterr().err


def test_a_level_that_somebody_set_is_kept() -> None:
    get_logger().setLevel(logging.ERROR)
    assert get_logger().level == logging.ERROR


def test_every_module_logs_under_its_own_name() -> None:
    calls = 0
    for path in (Path(__file__).parents[2] / "ucm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "get_logger":
                assert [ast.unparse(argument) for argument in node.args] == ["__name__"], (path, node.lineno)
                calls += 1
    assert calls
