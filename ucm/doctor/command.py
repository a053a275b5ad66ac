"""The subcommand ``ucm doctor``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.commands.options import answer, positive, say_aside, table
from ucm.doctor.findings import Finding, Status, has_error, worst
from ucm.doctor.overlay_checks import how_to_install
from ucm.doctor.report import Report, as_data, examine
from ucm.doctor.run import CHECK, check_run, run_engine
from ucm.errors import UcmError
from ucm.overlay.switches import disabled_groups

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from ucm.doctor.overlay_checks import ModuleState
    from ucm.doctor.run import Run

COLOURS = {Status.OK: "32", Status.WARNING: "33", Status.ERROR: "31"}

DEFAULT_TIMEOUT = 600.0


def wants_colour() -> bool:
    """Return whether standard output is a terminal and ``NO_COLOR`` is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def render(report: Report, *, colour: bool) -> str:
    """Return the whole report as text."""
    blocks = [[_paint(report.verdict, worst(report.findings), colour=colour)], _findings(report.findings, colour)]
    if report.modules:
        blocks.append(_modules(report.modules))
    if report.run is not None:
        blocks.append(_of_run(report.run))
    if report.todo:
        blocks.append(["What to do next", *(f"  - {line}" for line in report.todo)])
    return "\n\n".join("\n".join(block) for block in blocks)


def _findings(findings: Sequence[Finding], colour: bool) -> list[str]:
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        status = _paint(f"{finding.status.value:<7}", finding.status, colour=colour)
        lines.append(f"  {status}  {finding.check:<{width}}  {finding.what}")
        lines += [f"{'':{width + 13}}{detail}" for detail in finding.details]
    return lines


def _modules(states: Sequence[ModuleState]) -> list[str]:
    rows = [("module", "group", "vLLM's", "ours", "loaded from")]
    for state in states:
        module = state.module
        rows.append((module.name, module.group, state.upstream, state.rewritten, _loads(state)))
    return [f"  {line}" for line in table(rows)]


def _loads(state: ModuleState) -> str:
    if state.disabled is not None:
        return f"vLLM: {state.disabled}"
    if state.loads is None:
        return "nowhere: ImportError"
    return "vLLM" if state.loads == state.origin else "overlay"


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
            counts = [_count(result.fired.get(pid, 0)) for pid in pids]
            rows.append((result.hook.name, *counts, result.status))
        lines += [*(f"  {line}" for line in table(rows, right=range(1, len(pids) + 1))), ""]
    idle: dict[str, list[str]] = {}
    for result in run.hooks:
        if not result.at_least:
            idle.setdefault(result.reason, []).append(result.hook.name)
    return [
        *lines,
        "  not expected in this run",
        *(f"    {reason}: {', '.join(hooks)}" for reason, hooks in idle.items()),
    ]


def _count(times: int) -> str:
    return str(times) if times else "·"


def _paint(text: str, status: Status, *, colour: bool) -> str:
    return f"\x1b[{COLOURS[status]}m{text}\x1b[0m" if colour else text


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="check whether the overlay is active in this vLLM",
        description="Check whether the overlay is active in this environment; if not, say why and what to do.",
        epilog="Exit code: 0 no error (there may be warnings), 1 an error was found, 2 wrong usage.",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; `pydoc ucm.doctor` describes its keys"
    )
    parser.add_argument(
        "--run",
        action="store_true",
        help="also run a small engine, and count the hook calls in each process; with --config, a second one tries the "
        "file's sparse method or blending",
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
        report = _run(report, options)
    answer(options, as_data(report), [render(report, colour=wants_colour())])
    return int(has_error(report.findings))


def _run(report: Report, options: argparse.Namespace) -> Report:
    model, timeout = options.model, options.timeout or DEFAULT_TIMEOUT
    manifest = report.overlays[0].manifest if report.overlays else None
    if not report.overlays and not has_error(report.findings):
        what = "no engine was started: no overlay is installed, so there are no hooks to count"
        return report.with_findings([Finding(CHECK, Status.WARNING, what, todo=how_to_install(report.vllm))])
    if manifest is None or has_error(report.findings):
        skipped = Finding(CHECK, Status.WARNING, "no engine was started because of the errors above")
        return report.with_findings([skipped])
    say_aside(f"ucm: running a short engine, which takes about a minute (at most {timeout:.0f} s) …")
    run = run_engine(model, timeout, manifest, disabled_groups(manifest.needs))
    findings = check_run(run)
    if options.config is not None and not has_error(findings):
        from ucm.doctor.run import try_settings  # noqa: PLC0415 - few runs try settings

        findings += try_settings(options.config, model, timeout)
    return report.with_findings(findings, run)
