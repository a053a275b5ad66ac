"""The commands: their results, exit codes and error messages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.ucm.overlay.miniature import RELEASE, write_miniature
from transforms.engine.errors import OverlayError
from transforms.pipeline.cli import _parser, chosen_releases, main, newest_reviewed
from transforms.pipeline.package import runtime_version
from transforms.pipeline.product import UCM
from transforms.place import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def run(repository: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "transforms", *arguments]
    environ = {**os.environ, "COLUMNS": "40", **variables}
    return subprocess.run(command, cwd=repository, check=False, capture_output=True, text=True, env=environ)


def test_build_overlay_writes_both_wheels(repository: Path, miniature: Path) -> None:
    done = run(repository, "build-overlay", "--from", str(miniature))
    assert done.returncode == 0, done.stderr
    wheels = repository / "build" / "wheels" / f"vllm-{RELEASE}"
    runtime = wheels / f"ucm_runtime-{runtime_version()}-py3-none-any.whl"
    overlay = wheels / f"ucm_vllm_overlay-{RELEASE}.post1-py3-none-any.whl"
    assert done.stdout.splitlines() == [str(runtime), str(overlay)]
    assert f"    /path/to/that/python -m pip install {wheels}/*.whl\n" in done.stderr
    assert runtime.is_file()
    assert overlay.is_file()
    assert (repository / "build" / "packages" / f"vllm-{RELEASE}" / "pyproject.toml").is_file()


def test_what_asks_the_index_is_imported_where_it_asks() -> None:
    """It takes a quarter of the start, and most commands find everything in the cache."""
    code = "import sys, transforms.pipeline.cli; print({'remotezip', 'requests', 'unearth'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_build_overlay_elsewhere_is_the_same(repository: Path, miniature: Path, tmp_path: Path) -> None:
    assert run(repository, "build-overlay", "--from", str(miniature)).returncode == 0
    done = run(repository, "build-overlay", RELEASE, "--from", str(miniature), "--out", str(tmp_path / "out"))
    wheels = list((repository / "build" / "wheels" / f"vllm-{RELEASE}").iterdir())
    assert len(wheels) == 2
    for wheel in wheels:
        assert (tmp_path / "out" / "wheels" / f"vllm-{RELEASE}" / wheel.name).read_bytes() == wheel.read_bytes()
    assert len(done.stdout.splitlines()) == 2


def test_build_overlay_refuses_what_was_not_reviewed(repository: Path, tmp_path: Path) -> None:
    edited = write_miniature(tmp_path / "edited")
    scheduler = edited / "vllm" / "v1" / "core" / "sched" / "scheduler.py"
    scheduler.write_text(scheduler.read_text() + "# mine\n")
    done = run(repository, "build-overlay", "--from", str(edited))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.lstrip().startswith(f"error: the overlay of vLLM {RELEASE} is not the one that was reviewed:\n")
    assert "    vllm/v1/core/sched/scheduler.py: the upstream file has changed\n" in done.stderr
    assert " --accept`\n" in done.stderr
    assert f"nox -s review -- {RELEASE} --from " in done.stderr
    assert not (repository / "build").exists()


def test_build_overlay_refuses_rules_that_do_not_apply(repository: Path, tmp_path: Path) -> None:
    moved = write_miniature(tmp_path / "moved")
    scheduler = moved / "vllm" / "v1" / "core" / "sched" / "scheduler.py"
    scheduler.write_text(scheduler.read_text().replace("def _free_request", "def _release_request"))
    done = run(repository, "build-overlay", "--from", str(moved))
    assert done.returncode == 1
    assert f"rules do not apply to vLLM {RELEASE}:\nmissing: scheduler.freed in " in done.stderr
    assert "def _release_request" in done.stderr
    assert f"  to do: `nox -s drift -- {RELEASE}` shows every rule" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (
            ["latest"],
            "'latest' is not a release\n  to do: name a version as the index does, for instance 0.32.0\n",
        ),
        (["--from", "none"], "there is no such file or directory\n  where: none\n  to do: name one that exists with "),
        (["--from", "ucm"], "this directory does not hold vLLM\n  where: ucm (looked for vllm/__init__.py)\n"),
        ([RELEASE], "no package index with vLLM can be reached, and the release is not in the cache\n"),
    ],
    ids=["no-release", "no-path", "no-vllm", "no-index"],
)
def test_an_error_is_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    what: str,
) -> None:
    """No line is wrapped at the terminal's width, so paths and commands can be copied."""
    quiet = {"UCM_OVERLAY_CACHE": str(tmp_path / "cache"), "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    for name, value in {"COLUMNS": "40", "PIP_NO_INDEX": "1", **quiet}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    assert main(["build-overlay", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.lstrip().startswith(f"error: {what}")


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bake"])
    assert caught.value.code == 2
    assert "invalid choice: 'bake'" in capsys.readouterr().err


def test_an_interrupted_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("transforms.pipeline.build.build_overlay", stop)
    assert main(["build-overlay", "0.32.0"]) == 130
    assert capsys.readouterr().err.endswith("stopped\n")


def test_what_follows_from_the_locks_is_written(repository: Path) -> None:
    lock = repository / "overlays" / f"vllm-{RELEASE}" / "lock.json"
    before = json.loads(lock.read_text())
    code = "from transforms.pipeline.generate import write_generated; write_generated()"
    subprocess.run([sys.executable, "-c", code], cwd=repository, check=True)
    known = json.loads((repository / "ucm" / "overlay" / "fingerprints.json").read_text())
    assert known == {RELEASE: {m["path"]: m["upstream_sha256"] for m in before["modules"]}}
    assert RELEASE in (repository / "docs" / "transforms.md").read_text()


def meant(*arguments: str) -> list[str | None]:
    return chosen_releases(_parser().parse_args(["build-overlay", *arguments]))


def test_which_releases_are_meant() -> None:
    assert meant() == [UCM.reviewed()[-1]] == [newest_reviewed()]
    assert meant("--from", "some/path") == [None]
    assert meant("--from", "some/path", "--release", "0.9.2") == ["0.9.2"] == meant("0.9.2", "--from", "some/path")
    assert meant("all") == UCM.reviewed()
    assert meant("0.9.2", "0.32.0") == ["0.9.2", "0.32.0"]


@pytest.mark.parametrize("several", [["all"], ["0.9.2", "0.32.0"], ["0.9.2", "--release", "0.32.0"]], ids=" ".join)
def test_one_copy_is_of_one_release(several: list[str]) -> None:
    with pytest.raises(OverlayError, match="--from takes the sources of one release, but several releases are given"):
        meant(*several, "--from", "some/path")


def test_nothing_reviewed_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transforms.pipeline.cli.UCM", replace(UCM, overlays=tmp_path))
    with pytest.raises(OverlayError, match="no overlay has been reviewed yet"):
        newest_reviewed()
