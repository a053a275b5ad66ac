"""`ucm doctor --run`, with an engine that only calls hooks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.doctor.site import RELEASE, write_vllm
from ucm.doctor.run import Expectation, Run, check_run
from ucm.engine_process import FINISHED, Ended, prepare_model
from ucm.hashing.file_contents import changed_since
from ucm.sparse.base import Role
from ucm.sparse.probe import ProcessReport

if TYPE_CHECKING:
    from tests.ucm.doctor.site import Answer, Site


def hooks(answer: Answer) -> dict[str, Any]:
    return {hook["hook"]: hook for hook in answer.data["run"]["hooks"]}


def test_every_hook_fires(site: Site) -> None:
    answer = site.doctor("--run", "--json")
    assert answer.code == 0, answer.out
    run = answer.data["run"]
    assert list(run) == ["outcome", "seconds", "output", "tail", "saw", "processes", "hooks"]
    assert (run["outcome"], run["output"], run["tail"]) == ("finished", None, [])
    (process,) = run["processes"]
    assert (process["process"], process["roles"]) == ("MainProcess", ["scheduler", "worker"])
    added = hooks(answer)["request_added"]
    assert added == {
        "hook": "request_added",
        "role": "scheduler",
        "expected": True,
        "reason": None,
        "fired": {str(process["pid"]): 7},
        "status": "ok",
        "at_least": 7,
    }
    assert hooks(answer)["mla_begin"]["reason"] == "the model has no MLA layers"
    assert hooks(answer)["ffn_begin"]["reason"] == "vLLM 0.32.0 has no place for it"
    assert "running a short engine" in answer.err
    assert answer.finding("run")["what"].startswith("all 5 hooks expected in this run fired: 7 requests, ")


def test_its_table(site: Site) -> None:
    lines = site.doctor("--run").out.splitlines()
    added = next(line for line in lines if line.startswith("  request_added"))
    assert added.split() == ["request_added", "7", "ok"]
    assert "    the model has no MLA layers: mla_begin" in lines


def test_a_hook_is_forgotten(site: Site) -> None:
    answer = site.doctor("--run", "--json", FAKE_ENGINE="forget")
    assert answer.code == 1
    pid = answer.data["run"]["processes"][0]["pid"]
    assert answer.finding("run")["what"] == f"MainProcess (pid {pid}): request_freed fired 0 of at least 7 times"
    assert hooks(answer)["request_freed"]["status"] == "missing"
    assert Path(answer.data["run"]["output"]).is_file()
    assert hooks(answer)["request_added"]["status"] == "ok"


def test_the_runner_that_ran_has_no_hooks(site: Site) -> None:
    """This used to pass, because no hook of the other runner was expected to fire."""
    answer = site.doctor("--run", "--json", FAKE_ENGINE="v2")
    assert answer.code == 1
    first = next(finding for finding in answer.data["findings"] if finding["check"] == "run")
    assert first["what"].endswith("no sparse method can run: vllm.v1.worker.gpu.model_runner")
    assert first["todo"] == ["run vLLM's V1 runner: VLLM_USE_V2_MODEL_RUNNER=0"]


def test_the_engine_fails(site: Site) -> None:
    answer = site.doctor("--run", "--json", FAKE_ENGINE="fail")
    assert answer.code == 1
    run = answer.data["run"]
    assert (run["outcome"], run["hooks"]) == ("failed", [])
    assert run["tail"][-1] == "RuntimeError: the engine is out of order"
    output = Path(run["output"])
    assert "the engine is out of order" in output.read_text()
    found = answer.finding("run")
    assert found["what"].startswith("the engine failed")
    assert found["details"] == [f"its whole output: {output}"]
    text = site.doctor("--run", FAKE_ENGINE="fail").out
    assert "  | RuntimeError: the engine is out of order" in text


#: The command that stands after `-m ucm`, in a process in which the time of an engine is over as soon as it hangs.
TIME_IS_OVER = """
import os, subprocess, sys
from ucm.cli import main

class Process(subprocess.Popen):
    def wait(self, timeout=None):
        if timeout != 15.0:
            return super().wait(timeout)
        open(os.environ["FAKE_ENGINE_HANGS"]).read()
        raise subprocess.TimeoutExpired(self.args, timeout)

subprocess.Popen = Process
raise SystemExit(main(sys.argv[3:]))
"""


def test_the_engine_hangs(site: Site, tmp_path: Path) -> None:
    pipe = tmp_path / "hangs"
    os.mkfifo(pipe)
    program = ("-c", TIME_IS_OVER)
    arguments = ("--run", "--json", "--timeout", "15")
    answer = site.doctor(*arguments, flags=program, FAKE_ENGINE="hang", FAKE_ENGINE_HANGS=str(pipe))
    assert answer.code == 1, answer.err
    run = answer.data["run"]
    assert (run["outcome"], run["tail"]) == ("timed out", ["about to hang"])
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout  # noqa: S607
    assert f"{site.python} -m ucm.doctor.engine_run" not in listed


def test_all_is_switched_off(site: Site) -> None:
    answer = site.doctor("--run", "--json", UCM_DISABLE_PATCHES="1")
    assert answer.code == 0
    assert answer.finding("run")["what"].endswith("no hook was switched on")
    assert hooks(answer)["request_added"]["reason"] == "group scheduler is off: UCM_DISABLE_PATCHES is set"


def test_nothing_is_started_when_something_is_wrong(bare: Site) -> None:
    answer = bare.doctor("--run", "--json")
    assert (answer.code, answer.data["run"]) == (1, None)
    assert answer.finding("run")["what"] == "no engine was started because of the errors above"


def test_nothing_is_started_without_an_overlay(bare: Site) -> None:
    write_vllm(bare.packages)
    answer = bare.doctor("--run", "--json")
    assert (answer.code, answer.data["run"]) == (0, None)
    assert answer.finding("run")["what"].endswith("no overlay is installed, so there are no hooks to count")
    assert answer.data["next"][0].endswith(f"nox -s build-overlay -- {RELEASE}")


def test_a_model_of_ones_own(site: Site, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert site.doctor("--run", "--model", str(tmp_path)).code == 0


def test_a_directory_without_a_model(site: Site, tmp_path: Path) -> None:
    answer = site.doctor("--run", "--json", "--model", str(tmp_path))
    assert (answer.code, answer.err, answer.finding("model")["status"]) == (1, "", "error")
    assert answer.finding("run")["what"] == "no engine was started because of the errors above"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [(("--timeout", "5"), "--timeout needs --run"), (("--model", "x"), "--model needs --run or --config")],
)
def test_options_of_a_run_without_one(site: Site, arguments: tuple[str, ...], what: str) -> None:
    answer = site.doctor(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert what in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_a_wrong_timeout(site: Site, seconds: str) -> None:
    answer = site.doctor("--run", f"--timeout={seconds}")
    assert answer.code == 2
    assert "argument --timeout" in answer.err


def test_no_process_took_the_role() -> None:
    nobody = Expectation("worker_init", "worker", True, None, {}, "missing", 1)
    (found,) = check_run(Run(Ended(FINISHED, Path(), 7), 1.0, hooks=[nobody]))
    assert found.what == "no worker process called worker_init"


def test_one_of_two_workers_is_named() -> None:
    workers = [ProcessReport(pid, f"Worker-{pid}", (Role.WORKER,), {}) for pid in (8, 9)]
    result = Expectation("execute_begin", "worker", True, None, {8: 3, 9: 0}, "missing", 1)
    (found,) = check_run(Run(Ended(FINISHED, Path(), 7), 1.0, processes=workers, hooks=[result]))
    assert found.what == "Worker-9 (pid 9): execute_begin fired 0 of at least 1 times"


def test_the_tiny_model_is_older_than_the_engine_that_loads_it(tmp_path: Path) -> None:
    """Otherwise the engine's connector would load and save nothing: the file might have changed since it was loaded."""
    started = "from ucm.hashing.file_contents import process_started; print(process_started())"
    for number in range(5):
        directory = tmp_path / str(number)
        directory.mkdir()
        model = Path(prepare_model(None, directory)["model"])
        child = subprocess.run([sys.executable, "-c", started], capture_output=True, check=True)
        assert not changed_since(model / "config.json", float(child.stdout))
