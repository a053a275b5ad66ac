"""The report as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ucm import cli
from ucm.doctor.findings import Finding, Status, worst
from ucm.errors import UcmError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ucm.doctor.site import Site


def test_the_text(site: Site) -> None:
    answer = site.doctor(VLLM_PLUGINS="", UCM_DISABLE_ATTENTION_PATCH="1")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[0] == "UCM's overlay is active: 3 of its 4 modules replace those of vLLM 0.32.0 at import."
    starts = {
        line.index(word)
        for line in lines
        for word in ("in place, number", "0.32.0 by content", "set: UCM")
        if word in line
    }
    assert len(starts) == 1, "what was found is aligned"
    assert any(
        line.split()[:5] == ["vllm.v1.core.sched.scheduler", "scheduler", "ok", "ok", "overlay"] for line in lines
    )
    assert any(line.endswith("vLLM: UCM_DISABLE_ATTENTION_PATCH is set") for line in lines)
    assert lines[-3:] == [
        "What to do next",
        "  - to switch it on again: unset UCM_DISABLE_ATTENTION_PATCH",
        "  - export VLLM_PLUGINS=ucm_overlay",
    ]


def test_all_is_well(site: Site) -> None:
    assert "What to do next" not in site.doctor().out


def test_what_would_not_load(site: Site) -> None:
    (site.packages / "vllm/v1/worker/worker_base.py").write_text("# edited\n")
    assert any(line.endswith("changed  ok    nowhere: ImportError") for line in site.doctor().out.splitlines())


def test_the_gravest_status() -> None:
    assert worst([]) is Status.OK
    assert worst([Finding("a", status, "") for status in (Status.WARNING, Status.ERROR, Status.OK)]) is Status.ERROR


def test_the_gravest_comes_first_in_what_to_do(site: Site) -> None:
    (site.packages / "ucm_vllm_overlay.pth").unlink()
    todo = site.doctor("--json", VLLM_PLUGINS="").data["next"]
    assert [line.split()[0] for line in todo] == ["reinstall", "install", "run", "export"]


def test_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert "required: COMMAND" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("ucm 0.")


def test_an_error_has_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(config: Path | None = None, model: Path | None = None) -> None:
        assert config is None
        assert model is None
        raise UcmError("it is broken", where="here", fix="mend it")

    monkeypatch.setattr("ucm.doctor.command.examine", fail)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "ucm: it is broken\n  where: here\n  to do: mend it\n"
