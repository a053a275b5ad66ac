"""Run a real engine in an environment, and read its results."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.e2e.model import write_model
from tests.e2e.processes import INSIDE, start
from tests.e2e.workload import ENGINE, phases
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.e2e.processes import Process

MODEL = BUILD / "e2e" / "model"
#: Seconds after which an engine counts as hanging, which is a failure.
PATIENCE = 600
#: vLLM's own message on a processor without these instructions.
FP8_NEEDS = "FP8 KV cache on CPU requires x86 with AVX-512 or AMX"
PLUGIN = "[vllm.general_plugins]\nucm_e2e_report = report_plugin:register\n"


@dataclass(frozen=True)
class Run:
    """The result of one engine.

    Attributes:
        code: The exit code of its main process.
        log: The output of all its processes.
        seconds: Its duration.
        phases: The tokens, cached tokens, duration and counters of each phase.
        reports: The modules that each process loaded.
        about: Other data from the main process.
    """

    code: int
    log: str
    seconds: float
    phases: dict[str, Any] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> dict[str, list[list[int]]]:
        """Return the token ids of every request, by phase."""
        return {name: phase["tokens"] for name, phase in self.phases.items()}


def run_engine(
    environment: Environment,
    directory: Path,
    *,
    engine: Mapping[str, Any] | None = None,
    switches: Mapping[str, str] | None = None,
    batches: Mapping[str, Any] | None = None,
    patience: float = PATIENCE,
    forked: bool = True,
) -> Run:
    """Run an engine to its end; its failure is a result, not an exception.

    Args:
        environment: The environment with vLLM.
        directory: An empty directory for its files.
        engine: Arguments of ``LLM`` that differ from `ENGINE`.
        switches: Environment variables.
        batches: The requests; those of `tests.e2e.workload` by default.
        patience: Seconds after which it is stopped.
        forked: Whether it may be forked from a process that has imported vLLM; not if imports are the subject.
    """
    reports = directory / "reports"
    _install_plugin(directory / "plugin")
    reports.mkdir()
    spec, result, log = directory / "spec.json", directory / "result.json", directory / "log.txt"
    arguments = {"model": str(write_model(MODEL)), **ENGINE, **(engine or {})}
    wanted = phases() if batches is None else batches
    spec.write_text(json.dumps({"engine": arguments, "phases": wanted, "reports": str(reports)}), encoding="utf-8")
    begin = time.monotonic()
    with log.open("wb") as output:
        command = [INSIDE / "generate.py", spec, result]
        process = start(
            environment,
            command,
            directory=directory,
            variables=variables(directory, switches),
            output=output,
            forked=forked,
        )
        code = wait(process, patience)
    seconds = time.monotonic() - begin
    text = log.read_text(encoding="utf-8", errors="replace")
    told = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(reports.glob("*.json"))]
    return Run(code, text, seconds, told.pop("phases", {}), found, told)


def variables(directory: Path, switches: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an engine's environment: this one without UCM's switches, plus settings for reproducible runs."""
    ours = ("UCM_", "VLLM_", "PYTHON", "PYTEST_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM inspects models in another process, and caches the result by the content of the model's file.
        "VLLM_CACHE_ROOT": str(BUILD / "e2e" / "vllm-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(BUILD / "e2e" / "inductor"),
        "PYTHONPATH": str(directory / "plugin"),
        "UCM_E2E_REPORTS": str(directory / "reports"),
        **(switches or {}),
    }


def _install_plugin(directory: Path) -> None:
    """Install a vLLM plugin on a path that only this run has."""
    about = directory / "ucm_e2e_report-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ucm-e2e-report\nVersion: 0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(PLUGIN, encoding="utf-8")
    source = (INSIDE / "report_plugin.py").read_text(encoding="utf-8")
    (directory / "report_plugin.py").write_text(source, encoding="utf-8")


def wait(process: Process, patience: float) -> int:
    """Return the exit code; end the process's whole session, including remaining processes."""
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
