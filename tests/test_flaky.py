"""`nox -s flaky` tells which tests fail, and how to repeat the round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import flaky

if TYPE_CHECKING:
    from collections.abc import Sequence


class Runs:
    """Stands in for pytest: the given rounds fail."""

    def __init__(self, **outputs: str) -> None:
        self.commands: list[Sequence[str]] = []
        self._outputs = outputs

    def __call__(self, command: Sequence[str]) -> tuple[int, str]:
        self.commands.append(command)
        output = self._outputs.get(f"round{len(self.commands)}")
        return (0, "...\n3 passed in 1s\n") if output is None else (1, output)


def test_each_round_has_another_order_and_number_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs()
    assert flaky.main(["--rounds", "4", "--seed", "7", "tests/some"], runs) == 0
    assert [command[4] for command in runs.commands] == [f"--randomly-seed={seed}" for seed in (7, 8, 9, 10)]
    assert {command[6] for command in runs.commands} == {"0", "2", "3", "4"}
    assert {command[7:] == ["tests/some"] for command in runs.commands} == {True}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "round 1, seed 7, 4 processes: 3 passed in 1s"
    assert lines[-1] == "passed 4 of 4"


def test_one_failure_fails_and_is_not_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    output = "F.\nFAILED tests/a.py::test_b[x] - assert 1\nERROR tests/a.py::test_c\n1 failed, 1 error in 2s\n"
    runs = Runs(round2=output)
    assert flaky.main(["--rounds", "3", "--seed", "7", "tests/a.py"], runs) == 1
    assert len(runs.commands) == 3
    out = capsys.readouterr().out
    assert "  failed: tests/a.py::test_b[x]\n  failed: tests/a.py::test_c\n" in out
    assert "  again: nox -s flaky -- --rounds 1 --seed 8 tests/a.py\n" in out
    assert out.endswith("passed 2 of 3\n")


def test_pytests_own_failure_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert flaky.main(["--rounds", "1"], Runs(round1="no module named x\n")) == 1
    assert "no module named x\n  again: " in capsys.readouterr().out


def test_no_round_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flaky.main(["--rounds", "0"], Runs())
    assert "--rounds 0: at least one round is needed" in capsys.readouterr().err


def test_the_burners_end_with_the_rounds() -> None:
    with flaky.busy() as burners:
        assert [burner.poll() for burner in burners] == [None, None]
    assert all(burner.returncode is not None for burner in burners)
