"""``ucm doctor --run``: run a short real engine in a child process, and read its probe's counters."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.doctor.expected import V2_RUNNER, Expectation, Facts, expectations, unhooked_runners
from ucm.doctor.findings import Finding, Status
from ucm.errors import UcmError
from ucm.sparse.probe import ProcessReport, read_reports

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ucm.overlay.manifest import Manifest

CHECK = "run"
FINISHED, FAILED, TIMED_OUT = "finished", "failed", "timed out"
TAIL_LINES = 30
#: Lines that nanobind, used by Triton, prints after an error when the process exits.
_LEAK = re.compile(r"nanobind: | - leaked | - \.\.\. skipped |See https://nanobind\.")
#: The configuration of a tiny Llama with random weights.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
#: The child's environment variables, unless the operator has set them.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "UCM_PATCH_VERBOSE": "1",
}


@dataclass(frozen=True)
class HookResult:
    """One hook in a run.

    Attributes:
        expectation: Whether it had to fire.
        fired: How often it fired, by process id, in the processes of its role.
    """

    expectation: Expectation
    fired: dict[int, int]

    @property
    def missing(self) -> list[int]:
        """The processes in which it fired too seldom."""
        return [pid for pid, count in self.fired.items() if count < self.expectation.at_least]

    @property
    def status(self) -> str:
        """``ok``, ``missing`` or ``not expected``."""
        if not self.expectation.at_least:
            return "not expected"
        return "missing" if self.missing or not self.fired else "ok"


@dataclass(frozen=True)
class Run:
    """A run of the engine.

    Attributes:
        outcome: `FINISHED`, `FAILED` or `TIMED_OUT`.
        seconds: Its duration.
        pid: The child's process id, which is vLLM's main process.
        output: The kept log; None after a run without problems.
        tail: The end of the log; empty if the run finished.
        saw: The facts that the engine reported; empty unless it finished.
        processes: The probe's counters.
        hooks: The hooks of the seam; empty unless the run finished.
        unhooked: The model runners that ran, if the overlay has hooks in none of them.
    """

    outcome: str
    seconds: float
    pid: int
    output: Path | None = None
    tail: list[str] = field(default_factory=list)
    saw: dict[str, Any] = field(default_factory=dict)
    processes: list[ProcessReport] = field(default_factory=list)
    hooks: list[HookResult] = field(default_factory=list)
    unhooked: list[str] = field(default_factory=list)

    def name_of(self, pid: int) -> str:
        """Return a process's name for the operator."""
        return next((report.process for report in self.processes if report.pid == pid), "MainProcess")

    def as_data(self) -> dict[str, Any]:
        """Return the run as plain data; `ucm.doctor` describes the keys."""
        return {
            "outcome": self.outcome,
            "seconds": self.seconds,
            "output": str(self.output) if self.output else None,
            "tail": self.tail,
            "saw": self.saw or None,
            "processes": [
                {"pid": p.pid, "process": p.process, "roles": [role.value for role in p.roles], "counts": p.counts}
                for p in self.processes
            ],
            "hooks": [
                {
                    "hook": result.expectation.hook.name,
                    "role": result.expectation.hook.role.value,
                    "expected": result.expectation.at_least > 0,
                    "reason": result.expectation.reason or None,
                    "fired": {str(pid): count for pid, count in result.fired.items()},
                    "status": result.status,
                }
                for result in self.hooks
            ],
        }


def run_engine(model: Path | None, timeout: float, manifest: Manifest, disabled: Mapping[str, str]) -> Run:
    """Run the engine once.

    Args:
        model: A model's directory; None creates a tiny random model.
        timeout: Seconds after which the whole run is stopped.
        manifest: The overlay's manifest.
        disabled: The groups that are off, with the reasons.

    Raises:
        UcmError: If the directory contains no model.
    """
    if model is not None and not (model / "config.json").is_file():
        raise UcmError("there is no config.json", where=str(model), fix="give a model's directory, or no --model")
    directory = Path(tempfile.mkdtemp(prefix="ucm-doctor-"))
    reports = directory / "reports"
    reports.mkdir()
    plan = {**prepare_model(model, directory), "report_dir": str(reports)}
    (directory / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    began = time.monotonic()
    outcome, pid = run_child(directory, timeout)
    seconds = round(time.monotonic() - began, 1)
    processes = read_reports(reports)
    output = directory / "output.log"
    if outcome != FINISHED:
        return Run(outcome, seconds, pid, output, tail_of(output), processes=processes)
    saw = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    facts = Facts.of(saw)
    hooks = [_result(expected, processes) for expected in expectations(manifest, disabled, facts)]
    unhooked = unhooked_runners(manifest, facts)
    if unhooked or any(result.status == "missing" for result in hooks):
        return Run(outcome, seconds, pid, output, saw=saw, processes=processes, hooks=hooks, unhooked=unhooked)
    shutil.rmtree(directory)
    return Run(outcome, seconds, pid, saw=saw, processes=processes, hooks=hooks)


def tail_of(output: Path) -> list[str]:
    """The end of an engine's output."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if not _LEAK.match(line)][-TAIL_LINES:]


def prepare_model(model: Path | None, directory: Path) -> dict[str, str]:
    """What a plan says of the model; a tiny one is made in a directory if there is none."""
    if model is not None:
        weights = any(any(model.glob(pattern)) for pattern in WEIGHTS)
        return {"model": str(model.resolve()), "load_format": "auto" if weights else "dummy"}
    model = directory / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return {"model": str(model), "load_format": "dummy"}


def run_child(directory: Path, timeout: float) -> tuple[str, int]:
    """Run a directory's plan in a fresh interpreter, with the overlay active or not, as for the operator's vLLM.

    Returns:
        The outcome, and the child's process id; its result and its output are in the directory.
    """
    command = [sys.executable, "-m", "ucm.doctor.engine_run", "plan.json", "result.json"]
    with (directory / "output.log").open("wb") as output:
        child = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            cwd=directory,
            env=ENVIRONMENT | os.environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return (FAILED if child.wait(timeout) else FINISHED), child.pid
        except subprocess.TimeoutExpired:
            return TIMED_OUT, child.pid
        finally:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and its remaining descendants, which all run in the child's own session."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        child.wait()


def _result(expectation: Expectation, processes: list[ProcessReport]) -> HookResult:
    hook = expectation.hook
    fired = {
        p.pid: min((p.counts[counter] for counter in hook.counters), default=1) if expectation.at_least else 0
        for p in processes
        if hook.role in p.roles
    }
    return HookResult(expectation, fired)


def check_run(run: Run) -> list[Finding]:
    """Check that every expected hook fired in every process of its role."""
    if run.outcome != FINISHED:
        return [_broken(run)]
    findings = [_missing(run, result) for result in run.hooks if result.status == "missing"]
    if run.unhooked:
        findings.insert(0, _unhooked(run.unhooked))
    if findings:
        return findings
    expected = [result for result in run.hooks if result.expectation.at_least]
    what = (
        f"all {len(expected)} hooks expected in this run fired: {run.saw['requests']} requests, "
        f"{run.saw['preemptions']} preemptions, {run.seconds:.0f} s"
    )
    if not expected:
        what = f"vLLM served {run.saw['requests']} requests in {run.seconds:.0f} s; no hook was switched on"
    return [Finding(CHECK, Status.OK, what)]


def _broken(run: Run) -> Finding:
    how = "did not finish in time" if run.outcome == TIMED_OUT else "failed"
    return Finding(
        CHECK,
        Status.ERROR,
        f"the engine {how}, after {run.seconds:.0f} s",
        (f"its whole output: {run.output}",),
        (
            "see the end of its output above",
            "check whether vLLM runs here without the overlay: run the same command with UCM_DISABLE_PATCHES=1",
            *(["give it more time: ucm doctor --run --timeout SECONDS"] if run.outcome == TIMED_OUT else []),
        ),
    )


def _unhooked(runners: list[str]) -> Finding:
    what = f"this overlay has no hooks in the model runner that ran, so no sparse method can run: {runners[0]}"
    todo = "run vLLM's V1 runner: VLLM_USE_V2_MODEL_RUNNER=0"
    other = "or build an overlay with hooks in it"
    return Finding(CHECK, Status.ERROR, what, todo=(todo if V2_RUNNER in runners else other,))


def _missing(run: Run, result: HookResult) -> Finding:
    hook, least = result.expectation.hook, result.expectation.at_least
    if not result.fired:
        what = f"no {hook.role.value} process called {hook.name}"
    else:
        places = [f"{run.name_of(pid)} (pid {pid})" for pid in result.missing]
        times = f"{min(result.fired.values())} of at least {least} times"
        what = f"{', '.join(places)}: {hook.name} fired {times}"
    log = f"to see what each process loaded from the overlay: grep UCM.Patch {run.output}"
    return Finding(CHECK, Status.ERROR, what, todo=(log, "report it with the output of: ucm doctor --run --json"))
