"""The subcommand ``ucm doctor``: run the checks, and report them as text or as plain data."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ucm
from ucm.commands.options import answer, positive, say_aside, table
from ucm.doctor import config_checks, environment, overlay_checks
from ucm.doctor.findings import Finding, Status, has_error, worst
from ucm.doctor.run import CHECK, check_run, run_engine
from ucm.errors import UcmError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from ucm.doctor.environment import Vllm
    from ucm.doctor.overlay_checks import Overlay
    from ucm.doctor.run import Run

DEFAULT_TIMEOUT = 600.0


SCHEMA = 1
#: What the verdict adds to its sentence on the overlay if one of these checks found an error.
_SENTENCES = {
    frozenset({config_checks.CONNECTOR}): "The prefix cache cannot run.",
    frozenset({config_checks.CHECK, config_checks.SPARSE}): "The settings are not valid.",
    frozenset({config_checks.MODEL}): "The model cannot be used.",
}


@dataclass(frozen=True)
class Report:
    """The result of all checks.

    Attributes:
        vllm: The installed vLLM, if any.
        overlays: The installed overlays.
        about: What was found about the environment, as ``--json`` prints it.
        findings: The findings of the checks.
        run: The engine run, if there was one.
    """

    vllm: Vllm | None
    overlays: list[Overlay]
    about: dict[str, Any]
    findings: list[Finding]
    run: Run | None = None

    @property
    def verdict(self) -> str:
        """The result in one sentence; others follow if the cache cannot run, or settings or model cannot be used."""
        wrong = {finding.check for finding in self.findings if finding.status is Status.ERROR}
        said = [sentence for checks, sentence in _SENTENCES.items() if checks & wrong]
        apart = frozenset[str]().union(*_SENTENCES)
        return " ".join([self._of_the_overlay([it for it in self.findings if it.check not in apart]), *said])

    def _of_the_overlay(self, findings: list[Finding]) -> str:
        if self.vllm is None:
            return "vLLM is not installed for this Python."
        if not self.overlays:
            if has_error(finding for finding in findings if finding.check == overlay_checks.OVERLAY):
                return "No UCM overlay is installed, and the configured sparse method needs one."
            return "No UCM overlay is installed. Sparse attention needs one, the prefix cache does not."
        if has_error(findings):
            count = sum(finding.status is Status.ERROR for finding in findings)
            return f"UCM's overlay is not working: {count} error{'s' if count > 1 else ''}."
        modules = self.about["modules"]
        on = sum(module["disabled"] is None for module in modules)
        if not on:
            return "UCM's overlay is installed and switched off: vLLM runs unchanged."
        manifest = self.overlays[0].manifest
        release = manifest.release if manifest else ""
        return f"UCM's overlay is active: {on} of its {len(modules)} modules replace those of vLLM {release} at import."

    @property
    def todo(self) -> list[str]:
        """The next steps, each once, most severe first."""
        graded = [f for status in reversed(Status) for f in self.findings if f.status is status]
        return list(dict.fromkeys(line for finding in graded for line in finding.todo))


def examine(config: Path | None = None, model: Path | None = None) -> Report:
    """Run all static checks, without importing vLLM or torch into this process.

    Args:
        config: A settings file to check too.
        model: The directory of the model that will run with it, if known.
    """
    runtimes, files = environment.other_runtimes(), environment.start_up_files()
    hooks, on = environment.import_hooks(), environment.switches()
    vllm, overlays = environment.find_vllm(), overlay_checks.find_overlays()
    overlay = overlays[0] if overlays else None
    manifest = overlay.manifest if overlay else None
    active = hooks.position is not None
    states = overlay_checks.states_of(manifest, vllm.directory if vllm else None, active=active) if manifest else []
    settings = config_checks.check_config(config) if config is not None else []
    of_model, text = config_checks.check_model(model) if model is not None else (None, None)
    if config is not None and config_checks.asks_for_sparse_attention(settings) and not has_error(settings):
        settings += config_checks.check_latent(config, text, [found.manifest for found in overlays if found.manifest])
    of_overlay = overlay_checks.check_overlay(overlays, vllm, needed=config_checks.asks_for_sparse_attention(settings))
    findings = [
        Finding("python", Status.OK, platform.python_version(), (sys.executable,)),
        environment.check_runtime(runtimes),
        environment.check_vllm(vllm, manifest.release if manifest else None),
        *(environment.check_metadata(vllm) if vllm is not None else ()),
        of_overlay,
    ]
    if manifest is not None:
        findings.append(overlay_checks.check_import_hook(hooks, manifest, vllm, files))
    findings += overlay_checks.check_further_overlays()
    if manifest is not None and vllm is not None and active:
        findings.append(overlay_checks.check_modules(states, manifest, vllm.directory, vllm.release))
    findings.append(environment.check_switches(on, manifest))
    if overlay is not None:
        findings.append(environment.check_plugins())
    # Without an overlay the connectors run, even where a sparse method needs one.
    broken = has_error(finding for finding in findings if overlays or finding is not of_overlay)
    findings += config_checks.check_connector(vllm, config, settings, broken=broken)
    findings += [*settings, *([of_model] if of_model else [])]
    about = {
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "site_directories": [str(place) for place in environment.site_directories()],
        },
        "runtime": {
            "version": ucm.__version__,
            "directory": str(environment.runtime_directory()),
            "others": runtimes,
        },
        "vllm": _vllm(vllm) if vllm else None,
        "overlays": [
            {
                "version": overlay.version or None,
                "release": overlay.manifest.release if overlay.manifest else None,
                "directory": str(overlay.directory),
            }
            for overlay in overlays
        ],
        "import_hook": {"position": hooks.position, "ahead": hooks.ahead},
        "start_up_files": [str(file) for file in files],
        "switches": on,
        "modules": [
            {
                "name": state.module.name,
                "group": state.module.group,
                "upstream": state.upstream,
                "rewritten": state.rewritten,
                "disabled": state.disabled,
                "loads": str(state.loads) if state.loads else None,
            }
            for state in states
        ],
    }
    return Report(vllm, overlays, about, findings)


def as_data(report: Report) -> dict[str, Any]:
    """Return the report as the object that ``--json`` prints."""
    return {
        "schema": SCHEMA,
        "status": worst(report.findings).value,
        "verdict": report.verdict,
        **report.about,
        "findings": [{**asdict(finding), "status": finding.status.value} for finding in report.findings],
        "run": report.run.as_data() if report.run else None,
        "next": report.todo,
    }


def _vllm(vllm: Vllm) -> dict[str, Any]:
    given = {name: value or None for name, value in asdict(vllm).items()}
    own = {"directory": str(vllm.directory), "differing": vllm.differing}
    return {**given, **own, "release": vllm.release, "agree": vllm.agree}


def render(report: Report) -> str:
    """Return the whole report as text."""
    blocks = [[report.verdict], _findings(report.findings)]
    if modules := report.about["modules"]:
        blocks.append(_modules(modules, str(report.overlays[0].directory)))
    if report.run is not None:
        blocks.append(_of_run(report.run))
    if report.todo:
        blocks.append(["What to do next", *(f"  - {line}" for line in report.todo)])
    return "\n\n".join("\n".join(block) for block in blocks)


def _findings(findings: Sequence[Finding]) -> list[str]:
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"  {finding.status.value:<7}  {finding.check:<{width}}  {finding.what}")
        lines += [f"{'':{width + 13}}{detail}" for detail in finding.details]
    return lines


def _modules(modules: Sequence[Mapping[str, Any]], overlay: str) -> list[str]:
    rows = [("module", "group", "vLLM's", "ours", "loaded from")]
    for module in modules:
        loads = "nowhere: ImportError"
        if module["disabled"] is not None:
            loads = f"vLLM: {module['disabled']}"
        elif module["loads"] is not None:
            loads = "overlay" if module["loads"].startswith(overlay) else "vLLM"
        rows.append((module["name"], module["group"], module["upstream"], module["rewritten"], loads))
    return [f"  {line}" for line in table(rows)]


def _of_run(run: Run) -> list[str]:
    if not run.hooks:
        tail = run.ended.tail or ["(nothing)"]
        return [f"The end of the engine's output ({run.ended.outcome})", *(f"  | {line}" for line in tail)]
    lines = []
    expected = [result for result in run.hooks if result.at_least]
    if expected:
        pids = list(dict.fromkeys([run.ended.pid, *(p.pid for p in run.processes)]))
        rows = [("hook", *(f"{run.name_of(pid)} {pid}" for pid in pids), "")]
        for result in expected:
            counts = [str(result.fired.get(pid, 0) or "·") for pid in pids]
            rows.append((result.hook, *counts, result.status))
        lines += [*(f"  {line}" for line in table(rows, right=range(1, len(pids) + 1))), ""]
    idle: dict[str, list[str]] = {}
    for result in run.hooks:
        if not result.at_least:
            idle.setdefault(str(result.reason), []).append(result.hook)
    return [
        *lines,
        "  not expected in this run",
        *(f"    {reason}: {', '.join(hooks)}" for reason, hooks in idle.items()),
    ]


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="check whether the overlay is active in this vLLM",
        description="Check whether the overlay is active in this environment; if not, say why and what to do.",
        epilog="Exit code: 0 no error (there may be warnings), 1 an error was found, 2 wrong usage.",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; `python -m pydoc ucm.doctor` describes its keys"
    )
    parser.add_argument(
        "--run",
        action="store_true",
        help="also run a small engine, and count the hook calls in each process",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="also check a settings file, as an engine does when it starts"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="the model's directory, whose config.json is read: with --config, also check whether its attention is "
        "hooked; with --run, run it (default: a tiny random model)",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        metavar="S",
        help=f"with --run: stop the engine after S seconds (default: {DEFAULT_TIMEOUT:.0f})",
    )
    parser.set_defaults(handle=handle)


def handle(options: argparse.Namespace) -> int:
    """Examine the environment and print the report.

    Raises:
        UcmError: If the options contradict each other.
    """
    if not options.run and options.timeout is not None:
        raise UcmError("--timeout needs --run", fix="add --run, or remove the option")
    if not options.run and options.config is None and options.model is not None:
        raise UcmError("--model needs --run or --config", fix="add one of them, or remove the option")
    report = examine(options.config, options.model)
    if options.run:
        findings, run = _run(report, options)
        report = replace(report, findings=report.findings + findings, run=run)
    answer(options, as_data(report), [render(report)])
    return int(has_error(report.findings))


def _run(report: Report, options: argparse.Namespace) -> tuple[list[Finding], Run | None]:
    """Run an engine if there are hooks to count; return what was found, and the run."""
    timeout = options.timeout or DEFAULT_TIMEOUT
    manifest = report.overlays[0].manifest if report.overlays else None
    if not report.overlays and not has_error(report.findings):
        what = "no engine was started: no overlay is installed, so there are no hooks to count"
        return [Finding(CHECK, Status.WARNING, what, todo=overlay_checks.how_to_install(report.vllm))], None
    if manifest is None or has_error(report.findings):
        return [Finding(CHECK, Status.WARNING, "no engine was started because of the errors above")], None
    say_aside(f"ucm: running a short engine, which takes about a minute (at most {timeout:.0f} s) …")
    run = run_engine(options.model, timeout, manifest)
    return check_run(run), run
