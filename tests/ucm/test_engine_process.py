"""Running an engine in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from ucm.engine_process import FAILED, FINISHED, run_child

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, from which `python -m` imports."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path


def write(directory: Path, *lines: str) -> None:
    (directory / "engine.py").write_text("\n".join(["import os, sys, time", *lines]))


def test_it_gets_its_plan_and_writes_its_result(directory: Path) -> None:
    write(directory, "open(sys.argv[2], 'w').write(open(sys.argv[1]).read() + os.environ['OWN'])")
    assert run_child("engine", directory, {"a": 1}, 60, {"OWN": "x"}).outcome == FINISHED
    assert (directory / "result.json").read_text() == '{"a": 1}x'


def test_the_operators_variables_win(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN", "operator")
    write(directory, "print(os.environ['OWN'])")
    assert run_child("engine", directory, {}, 60, {"OWN": "ours"}).lines == ["operator"]


def test_its_failure_is_an_outcome(directory: Path) -> None:
    write(directory, "print('nanobind: leaked 3 instances!')", "sys.exit('it is out of order')")
    ended = run_child("engine", directory, {}, 60)
    assert (ended.outcome, ended.tail) == (FAILED, ["it is out of order"])


def test_its_descendants_are_ended(directory: Path) -> None:
    """The pipe ends when the last of them has ended."""
    os.mkfifo(directory / "pipe")
    pipe = os.open(directory / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write(directory, "pipe = open('pipe', 'wb')", "if os.fork() == 0:", "    time.sleep(600)")
    assert run_child("engine", directory, {}, 60).outcome == FINISHED
    os.set_blocking(pipe, True)
    assert os.read(pipe, 1) == b""
    os.close(pipe)


def test_an_interrupt_while_it_is_started_ends_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the start and the caller's knowledge of it, nothing would end it."""
    started: list[subprocess.Popen[bytes]] = []

    class Popen(subprocess.Popen):  # type: ignore[type-arg] # its parameters are passed through
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    write(directory, "time.sleep(600)")
    with pytest.raises(KeyboardInterrupt):
        run_child("engine", directory, {}, 60)
    assert started[0].returncode == -signal.SIGKILL
