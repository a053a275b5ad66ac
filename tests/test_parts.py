"""The parts of a session: all run, the table says how each ended, and what runs beside ends with the session."""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import pytest

from tests.parts import (
    RELEASES,
    REPORT,
    Outcome,
    Part,
    Programs,
    main,
    parts_of_e2e,
    parts_of_tests,
    run_all,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

INSTALLED = Part("installation", ("install",), beside=True)
UNIT = Part("unit tests", ("unit",))
LOCKS = Part("locks", ("locks",))
CORE = Part("core", ("core",), after="installation")
PARTS = (INSTALLED, UNIT, LOCKS, CORE)


class Run:
    """Runs nothing: notes the parts, and fails those that it is told to."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.names = failing, list[str]()

    def __call__(self, part: Part, command: Sequence[str]) -> int:
        self.names.append(part.name)
        return int(part.name in self.failing)


def results(*failing: str) -> dict[str, str]:
    return {one.name: one.result for one in run_all(PARTS, Run(*failing))}


def test_all_parts_run_after_one_has_failed() -> None:
    assert results("unit tests") == {
        "installation": "passed",
        "unit tests": "failed",
        "locks": "passed",
        "core": "passed",
    }


def test_a_part_without_what_it_needs_is_not_run_and_the_others_are() -> None:
    said = "not run: installation failed"
    assert results("installation") == {
        "installation": "failed",
        "unit tests": "passed",
        "locks": "passed",
        "core": said,
    }


def test_a_part_beside_does_not_hold_up_the_others_but_what_needs_it() -> None:
    locks_ran, names = Event(), list[str]()

    def run(part: Part, command: Sequence[str]) -> int:
        if part.beside:
            locks_ran.wait()
        names.append(part.name)
        if part is LOCKS:
            locks_ran.set()
        return 0

    assert all(one.passed for one in run_all(PARTS, run))
    assert names[:2] == ["unit tests", "locks"]
    assert names[-1] == "core"


def test_parts_beside_run_one_at_a_time_and_in_order() -> None:
    run = Run()
    run_all([Part(f"{number}", (), beside=True) for number in range(5)], run)
    assert run.names == ["0", "1", "2", "3", "4"]


def test_an_interruption_ends_what_runs_beside() -> None:
    ended, begun = Event(), Event()

    def run(part: Part, command: Sequence[str]) -> int:
        if part.beside:
            begun.set()
            ended.wait()
            return 1
        begun.wait()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(PARTS, run, ended.set)
    assert ended.is_set()


def test_the_table_has_minutes_and_one_line_of_what_was_not_judged() -> None:
    def run(part: Part, command: Sequence[str]) -> int:
        Path(command[-1]).write_text("Mooncake, Redis" if part is told[0] else "Redis", encoding="utf-8")
        return 0

    told = [Part("unit tests", ("pytest", REPORT)), Part("core", ("pytest", REPORT))]
    ticks = count(0, 90)
    assert list(table(run_all(told, run, clock=lambda: next(ticks)))) == [
        "part        minutes  result",
        "unit tests      1.5  passed",
        "core            1.5  passed",
        "not judged here: Mooncake, Redis",
    ]


def test_a_table_of_which_everything_was_judged_says_no_more() -> None:
    assert list(table([Outcome("locks", "failed", 6)])) == ["part   minutes  result", "locks      0.1  failed"]


def test_the_session_fails_if_one_part_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Programs, "run", lambda self, part, command: int(part.name == "unit tests"))
    assert main(["tests"]) == 1
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[2:]] == [
        "passed",
        "failed",
        "passed",
        "passed",
    ]
    monkeypatch.setattr(Programs, "run", lambda self, part, command: 0)
    assert main(["tests"]) == 0


def test_sessions_name_the_releases_and_every_engine_waits_for_its_installation() -> None:
    for parts, releases in (
        (parts_of_tests(), RELEASES[:1]),
        (parts_of_e2e([]), RELEASES),
        (parts_of_e2e(["0.16.0"]), ("0.16.0",)),
    ):
        installed = [part for part in parts if "tests.e2e.install_vllm" in part.command]
        assert all(part.beside for part in installed)
        assert tuple(part.command[-1] for part in installed) == releases
        engines = [part for part in parts if part.environment]
        assert tuple(part.environment["UCM_E2E_RELEASE"] for part in engines) == releases
        assert {part.after for part in engines} == {part.name for part in installed}
    assert [part.command[2] for part in parts_of_e2e([])].count("tests.mutants") == 1
    with pytest.raises(SystemExit):
        main(["tests", "0.32.0"])


@pytest.mark.parametrize(
    ("releases", "until"), [([], ["1700001350", "1700001800"]), (["0.16.0"], ["1700001800"]), (["a", "b", "c"], None)]
)
def test_the_last_release_has_the_minutes_that_those_before_it_leave(
    releases: list[str], until: list[str] | None
) -> None:
    engines = [part for part in parts_of_e2e(releases, 1_700_000_000, 30) if part.environment]
    told = [part.command[part.command.index("--until") + 1] for part in engines]
    assert told == (until or ["1700001350", "1700001350", "1700001800"])
    assert not any("--until" in part.command for part in parts_of_e2e(releases, 1_700_000_000))


@pytest.mark.parametrize("arguments", [["tests", "--minutes", "9"], ["e2e", "--minutes", "0"]])
def test_minutes_are_of_e2e_and_above_none(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "minutes" in capsys.readouterr().err


# Real programs.


def test_output_beside_is_shown_only_if_the_program_fails(capfd: pytest.CaptureFixture[str]) -> None:
    for code in (0, 3):
        text = f"import os, sys; print('pip says', {code}, os.environ['WHAT']); sys.exit({code})"
        part = Part("installation", (sys.executable, "-c", text), {"WHAT": "x"}, beside=True)
        assert Programs().run(part, part.command) == code
    assert capfd.readouterr().out == "installation failed:\npip says 3 x\n\n"


def test_a_program_beside_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    """Its child holds one end of a pipe, which is closed when the child has ended, too."""
    pipe = tmp_path / "pipe"
    child = f"import signal; f = open({str(pipe)!r}, 'w'); f.write('up'); f.flush(); signal.pause()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    programs = Programs()
    installing = Part("installation", (sys.executable, "-c", parent), beside=True)
    os.mkfifo(pipe)

    def run(part: Part, command: Sequence[str]) -> int:
        if part.beside:
            return programs.run(part, command)
        with pipe.open() as held:
            assert held.read(2) == "up"
            programs.close()
            assert held.read() == ""
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all([installing, UNIT], run, programs.close)
