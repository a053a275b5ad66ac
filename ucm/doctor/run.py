"""``ucm doctor --run``: run a short real engine in a child process, and read its probe's counters.

The hooks that must fire are those in the overlay's manifest, except those for which this run had no occasion.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.doctor.findings import Finding, Status, has_error
from ucm.engine_process import TIMED_OUT, Ended, prepare_model, run_child
from ucm.integration.vllm import hooks as seam
from ucm.sparse import probe
from ucm.sparse.base import Role
from ucm.sparse.probe import METADATA_RECEIVED, ProcessReport, read_reports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ucm.overlay.manifest import Manifest

V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
V2_PACKAGE = "vllm.v1.worker.gpu."
MODELS = "vllm.model_executor.models."
OUTPUT = "vllm.v1.core.sched.output"
FIELDS = "scheduler_output fields"
#: The hooks around the forward call; a sparse method cannot work in a runner that has none of them.
FORWARD = {"execute_begin", "v2_execute_begin"}

CHECK = "run"
ENGINE = "ucm.doctor.engine_run"

#: The hooks that fire beside the scheduler; all others of the seam fire in workers.
SCHEDULER_HOOKS = frozenset(
    (
        *("scheduler_init", "kv_cache_memory", "block_hash_function", "engine_core_started", "request_added"),
        *("limit_new_tokens", "before_allocation", "scheduler_output_built", "request_preempted", "request_freed"),
    )
)
#: The counters of hooks that call the method's function of another name.
_COUNTERS = {
    FIELDS: (METADATA_RECEIVED,),
    "scheduler_output_built": ("build_metadata",),
    "v2_requests_finished": ("update_states", "requests_finished"),
}

#: The side of the engine that each hook of `ucm.integration.vllm.hooks` fires on.
HOOKS = {name: Role.SCHEDULER if name in SCHEDULER_HOOKS else Role.WORKER for name in (*seam.__all__, FIELDS)}


def counters_of(hook: str) -> tuple[str, ...]:
    """Return the probe's counters that show that a hook fired; none if its process only has to have its role."""
    called = hook.removeprefix("v2_").removeprefix("worker_")
    return _COUNTERS.get(hook, (called,) if called in probe.HOOKS else ())


@dataclass(frozen=True)
class Expectation:
    """Whether a hook must fire, and whether it did.

    Attributes:
        hook: The hook.
        role: The side of the engine that it fires on.
        expected: Whether it must fire.
        reason: Why it need not; None if it must.
        fired: How often it fired, by process id, in the processes of its role.
        status: ``ok``, ``missing`` or ``not expected``.
        at_least: How often it must fire in each of these processes; 0 if it need not.
    """

    hook: str
    role: str
    expected: bool
    reason: str | None
    fired: dict[int, int]
    status: str
    at_least: int


def expectations(
    manifest: Manifest, saw: Mapping[str, Any], processes: Sequence[ProcessReport] = ()
) -> list[Expectation]:
    """Return, for every hook of the seam, whether it must have fired, from what the engine reported, and how often."""
    found = []
    for hook, role in HOOKS.items():
        least, reason = _expected(hook, manifest, saw)
        fired = {
            p.pid: min((p.counts[counter] for counter in counters_of(hook)), default=1) if least else 0
            for p in processes
            if role in p.roles
        }
        seldom = min(fired.values(), default=0) < least
        status = "missing" if seldom else "ok" if least else "not expected"
        found.append(Expectation(hook, role.value, bool(least), reason or None, fired, status, least))
    return found


def _names(saw: Mapping[str, Any], of: str) -> set[str]:
    """Return the modules of the workers' model runners (``runner``), or of the model's classes (``model``)."""
    return {name for worker in saw["workers"] for name in worker[of]}


def _kinds(saw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the kinds of attention layers; see `ucm.engine.WorkerFacts.ucm_facts`."""
    return [kind for worker in saw["workers"] for kind in worker["attention"]]


def unhooked_runners(manifest: Manifest, saw: Mapping[str, Any]) -> list[str]:
    """Return the model runners that ran, if the overlay of this release has hooks in none of them.

    Up to 0.15.1, for instance, it has none in the V2 runner; then no runner's hook would be expected to fire.
    """
    hooked = {m.name for m in manifest.modules.values() if FORWARD & set(m.hooks)}
    runners = _names(saw, "runner")
    return [] if hooked & runners else sorted(name for name in runners if name.endswith("model_runner"))


def _expected(hook: str, manifest: Manifest, saw: Mapping[str, Any]) -> tuple[int, str]:
    """Return how often a hook must fire, and why it need not."""
    disabled = manifest.disabled
    modules = [m for m in manifest.modules.values() if hook in m.hooks or (hook, m.name) == (FIELDS, OUTPUT)]
    if hook in manifest.left_out:
        build = manifest.command("build-overlay", f"{manifest.named or manifest.release} --hooks all")
        return 0, f"the overlay was built without it; one that has it: {build}"
    if not modules:
        return 0, f"vLLM {manifest.release} has no place for it"
    on = [m for m in modules if m.group not in disabled]
    if not on:
        return 0, f"group {modules[0].group} is off: {disabled[modules[0].group]}"
    reasons = [_unused(module.name, saw) for module in on]
    reason = reasons[0] if all(reasons) else _no_occasion(hook, disabled, saw)
    if reason:
        return 0, reason
    # The engine's own count, if it has one.
    counts = dict.fromkeys(("request_added", "request_freed"), saw["requests"])
    return {**counts, "request_preempted": saw["preemptions"] or 1}.get(hook, 1), ""


def _unused(module: str, saw: Mapping[str, Any]) -> str:
    """Return why the run did not execute a module; empty if it did."""
    v2, are_mla = V2_RUNNER in _names(saw, "runner"), [kind["mla"] for kind in _kinds(saw)]
    if module == V1_RUNNER and v2:
        return "the V2 model runner ran"
    if module.startswith(V2_PACKAGE) and not v2:
        return "the V1 model runner ran"
    if module.startswith(MODELS) and module not in _names(saw, "model"):
        return "the overlay does not rewrite this model's layers"
    if ".mla" in module and not any(are_mla):
        return "the model has no MLA layers"
    if module.endswith(".attention.attention") and all(are_mla):
        return "the model has MLA layers only"
    return ""


def _no_occasion(hook: str, disabled: Mapping[str, str], saw: Mapping[str, Any]) -> str:
    """Return why a hook in an executed module had no occasion to fire; empty if it had one."""
    if hook == "clear_row":
        return "called only by a sparse method that replaces blocks"
    if hook == FIELDS and "model_runner" in disabled:
        return f"group model_runner is off: {disabled['model_runner']}"
    if hook == "request_preempted" and saw["preemptions"] == 0:
        return "no request had to be preempted"
    separate = any(kind["separate_kv_write"] and not kind["mla"] for kind in _kinds(saw))
    if hook.startswith("kv_write_") and not separate:
        return "this backend writes keys and values inside its attention"
    return ""


@dataclass(frozen=True)
class Run:
    """A run of the engine.

    Attributes:
        ended: Its process; the files of a run without problems are deleted.
        seconds: Its duration.
        saw: The facts that the engine reported; empty unless it finished.
        processes: The probe's counters.
        hooks: The hooks of the seam; empty unless the run finished.
        unhooked: The model runners that ran, if the overlay has hooks in none of them.
    """

    ended: Ended
    seconds: float
    saw: dict[str, Any] = field(default_factory=dict)
    processes: list[ProcessReport] = field(default_factory=list)
    hooks: list[Expectation] = field(default_factory=list)
    unhooked: list[str] = field(default_factory=list)

    def name_of(self, pid: int) -> str:
        """Return a process's name for the operator."""
        return next((report.process for report in self.processes if report.pid == pid), "MainProcess")

    def as_data(self) -> dict[str, Any]:
        """Return the run as plain data; `ucm.doctor` describes the keys."""
        return {
            "outcome": self.ended.outcome,
            "seconds": self.seconds,
            "output": str(self.ended.log) if self.ended.log.exists() else None,
            "tail": self.ended.tail,
            "saw": self.saw or None,
            "processes": [{**asdict(one), "roles": [role.value for role in one.roles]} for one in self.processes],
            "hooks": [asdict(result) for result in self.hooks],
        }


def run_engine(model: Path | None, timeout: float, manifest: Manifest) -> Run:
    """Run the engine once.

    Args:
        model: A model's directory; None creates a tiny random model.
        timeout: Seconds after which the whole run is stopped.
        manifest: The overlay's manifest.
    """
    directory = Path(tempfile.mkdtemp(prefix="ucm-doctor-"))
    reports = directory / "reports"
    reports.mkdir()
    plan = {**prepare_model(model, directory), "report_dir": str(reports)}
    began = time.perf_counter()
    ended = run_child(ENGINE, directory, plan, timeout)
    run = Run(ended, round(time.perf_counter() - began, 1), processes=read_reports(reports))
    if ended.failure:
        return run
    (saw,) = ended.results()
    hooks = expectations(manifest, saw, run.processes)
    run = replace(run, saw=saw, hooks=hooks, unhooked=unhooked_runners(manifest, saw))
    if not has_error(check_run(run)):
        shutil.rmtree(directory)
    return run


def check_run(run: Run) -> list[Finding]:
    """Check that every expected hook fired in every process of its role."""
    if run.ended.failure:
        return [_broken(run)]
    findings = [_missing(run, result) for result in run.hooks if result.status == "missing"]
    if run.unhooked:
        findings.insert(0, _unhooked(run.unhooked))
    if findings:
        return findings
    expected = [result for result in run.hooks if result.at_least]
    what = (
        f"all {len(expected)} hooks expected in this run fired: {run.saw['requests']} requests, "
        f"{run.saw['preemptions']} preemptions, {run.seconds:.0f} s"
    )
    if not expected:
        what = f"vLLM served {run.saw['requests']} requests in {run.seconds:.0f} s; no hook was switched on"
    return [Finding(CHECK, Status.OK, what)]


def _broken(run: Run) -> Finding:
    return Finding(
        CHECK,
        Status.ERROR,
        f"the engine {run.ended.failure}, after {run.seconds:.0f} s",
        (f"its whole output: {run.ended.log}",),
        (
            "see the end of its output above",
            "check whether vLLM runs here without the overlay: run the same command with UCM_DISABLE_PATCHES=1",
            *(["give it more time: ucm doctor --run --timeout SECONDS"] if run.ended.outcome == TIMED_OUT else []),
        ),
    )


def _unhooked(runners: list[str]) -> Finding:
    what = f"this overlay has no hooks in the model runner that ran, so no sparse method can run: {runners[0]}"
    todo = "run vLLM's V1 runner: VLLM_USE_V2_MODEL_RUNNER=0"
    other = "or build an overlay with hooks in it"
    return Finding(CHECK, Status.ERROR, what, todo=(todo if V2_RUNNER in runners else other,))


def _missing(run: Run, result: Expectation) -> Finding:
    if not result.fired:
        what = f"no {result.role} process called {result.hook}"
    else:
        seldom = [pid for pid, count in result.fired.items() if count < result.at_least]
        places = [f"{run.name_of(pid)} (pid {pid})" for pid in seldom]
        times = f"{min(result.fired.values())} of at least {result.at_least} times"
        what = f"{', '.join(places)}: {result.hook} fired {times}"
    log = f"to see what each process loaded from the overlay: grep UCM.Patch {run.ended.log}"
    return Finding(CHECK, Status.ERROR, what, todo=(log, "report it with the output of: ucm doctor --run --json"))
