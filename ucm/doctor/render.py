"""Render the report as aligned text, with colours only in a terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from ucm.doctor.findings import Status, worst

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.doctor.findings import Finding
    from ucm.doctor.overlay_checks import ModuleState
    from ucm.doctor.report import Report
    from ucm.doctor.run import Run

COLOURS = {Status.OK: "32", Status.WARNING: "33", Status.ERROR: "31"}


def wants_colour() -> bool:
    """Return whether standard output is a terminal and ``NO_COLOR`` is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def render(report: Report, *, colour: bool) -> str:
    """Return the whole report as text."""
    blocks = [[_paint(report.verdict, worst(report.findings), colour=colour)], _findings(report.findings, colour)]
    if report.modules:
        blocks.append(_modules(report.modules))
    if report.run is not None:
        blocks.append(_run(report.run))
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
    return _table(rows)


def _loads(state: ModuleState) -> str:
    if state.disabled is not None:
        return f"vLLM: {state.disabled}"
    if state.loads is None:
        return "nowhere: ImportError"
    return "vLLM" if state.loads == state.origin else "overlay"


def _run(run: Run) -> list[str]:
    if not run.hooks:
        tail = run.tail or ["(nothing)"]
        return [f"The end of the engine's output ({run.outcome})", *(f"  | {line}" for line in tail)]
    lines = []
    expected = [result for result in run.hooks if result.expectation.at_least]
    if expected:
        pids = list(dict.fromkeys([run.pid, *(p.pid for p in run.processes)]))
        rows = [("hook", *(f"{run.name_of(pid)} {pid}" for pid in pids), "")]
        for result in expected:
            counts = [_count(result.fired.get(pid, 0)) for pid in pids]
            rows.append((result.expectation.hook.name, *counts, result.status))
        lines += [*_table(rows, right=range(1, len(pids) + 1)), ""]
    idle: dict[str, list[str]] = {}
    for result in run.hooks:
        if not result.expectation.at_least:
            idle.setdefault(result.expectation.reason, []).append(result.expectation.hook.name)
    return [
        *lines,
        "  not expected in this run",
        *(f"    {reason}: {', '.join(hooks)}" for reason, hooks in idle.items()),
    ]


def _count(times: int) -> str:
    return str(times) if times else "·"


def _table(rows: Sequence[tuple[str, ...]], right: Sequence[int] = ()) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def _paint(text: str, status: Status, *, colour: bool) -> str:
    return f"\x1b[{COLOURS[status]}m{text}\x1b[0m" if colour else text
