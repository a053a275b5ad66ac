"""Start a real engine in an environment and read what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e.model import write_model
from tests.e2e.workload import ENGINE, phases
from transforms.pipeline.package import BUILD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.e2e.environment import Environment

INSIDE = Path(__file__).parent / "inside"
MODEL = BUILD / "e2e" / "model"
#: An engine that hangs is a failure, told by this many seconds.
PATIENCE = 600
#: One process in place of three: starts in a third of the time.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
PLUGIN = "[vllm.general_plugins]\nucm_e2e_report = report_plugin:register\n"


@dataclass(frozen=True)
class Run:
    """What one engine did.

    Attributes:
        code: The exit code of its main process.
        log: All that its processes wrote.
        seconds: From start to end.
        phases: For each phase its tokens, cached tokens, duration and counters.
        reports: What each process has loaded.
        about: What else the main process told.
    """

    code: int
    log: str
    seconds: float
    phases: dict[str, Any] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> dict[str, list[list[int]]]:
        """The token ids of every request, by phase."""
        return {name: phase["tokens"] for name, phase in self.phases.items()}


def run_engine(
    environment: Environment,
    directory: Path,
    *,
    engine: Mapping[str, Any] | None = None,
    switches: Mapping[str, str] | None = None,
    batches: Mapping[str, Any] | None = None,
    patience: float = PATIENCE,
) -> Run:
    """Run an engine to its end; a failure of it is a result, not an exception.

    Args:
        environment: Where vLLM is installed.
        directory: An empty one for its files.
        engine: Arguments of ``LLM`` that differ from `ENGINE`.
        switches: Environment variables.
        batches: The requests; those of `tests.e2e.workload` by default.
        patience: Seconds after which it is stopped.
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
        process = subprocess.Popen(
            [environment.python, INSIDE / "generate.py", spec, result],
            env=variables(directory, switches),
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = _wait(process, patience)
    seconds = time.monotonic() - begin
    text = log.read_text(encoding="utf-8", errors="replace")
    told = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(reports.glob("*.json"))]
    return Run(code, text, seconds, told.pop("phases", {}), found, told)


def variables(directory: Path, switches: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an engine: this one's without UCM's switches, and with what makes runs alike."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("UCM_", "VLLM_", "PYTHON"))}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        # What vLLM finds out about a model in one more process, it keeps by the content of the model's file.
        "VLLM_CACHE_ROOT": str(BUILD / "e2e" / "vllm-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(BUILD / "e2e" / "inductor"),
        "PYTHONPATH": str(directory / "plugin"),
        "UCM_E2E_REPORTS": str(directory / "reports"),
        **(switches or {}),
    }


def _install_plugin(directory: Path) -> None:
    """Something that vLLM finds as an installed plugin, on a path that only this run has."""
    about = directory / "ucm_e2e_report-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ucm-e2e-report\nVersion: 0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(PLUGIN, encoding="utf-8")
    source = (INSIDE / "report_plugin.py").read_text(encoding="utf-8")
    (directory / "report_plugin.py").write_text(source, encoding="utf-8")


def _wait(process: subprocess.Popen[bytes], patience: float) -> int:
    """The exit code; the whole session of the process is ended, also what it has left behind."""
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        return -1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
