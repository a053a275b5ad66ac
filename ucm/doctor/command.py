"""The subcommand ``ucm doctor``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ucm.doctor.findings import Finding, Status, has_error
from ucm.doctor.overlay_checks import how_to_install
from ucm.doctor.render import render, wants_colour
from ucm.doctor.report import Report, as_data, examine
from ucm.doctor.run import CHECK, check_run, run_engine
from ucm.errors import UcmError
from ucm.overlay.switches import disabled_groups

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_TIMEOUT = 600.0


def add_parser(commands: Any) -> None:
    """Add the subcommand.

    Args:
        commands: The return value of ``ArgumentParser.add_subparsers``.
    """
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
        "--model", type=Path, metavar="DIR", help="with --run: the model's directory; default: a tiny random model"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        help=f"with --run: stop the engine after S seconds (default: {DEFAULT_TIMEOUT:.0f})",
    )
    parser.set_defaults(handle=handle)


def handle(options: argparse.Namespace) -> int:
    """Examine the environment and print the report.

    Raises:
        UcmError: If the options contradict each other, or the model does not exist.
    """
    if not options.run and (options.model is not None or options.timeout is not None):
        raise UcmError("--model and --timeout need --run", fix="add --run, or remove these options")
    report = examine(options.config)
    if options.run:
        report = _run(report, options)
    _print([json.dumps(as_data(report), indent=1) if options.json else render(report, colour=wants_colour())])
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
    _print([f"ucm: running a short engine, which takes about a minute (at most {timeout:.0f} s) …"], sys.stderr)
    run = run_engine(model, timeout, manifest, disabled_groups(manifest.needs))
    findings = check_run(run)
    if options.config is not None and not has_error(findings):
        from ucm.doctor.trial import try_settings  # noqa: PLC0415 - few runs try settings

        findings += try_settings(options.config, model, timeout)
    return report.with_findings(findings, run)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError("must be more than 0")
    return seconds


def _print(lines: Iterable[str], stream: Any = None) -> None:
    for line in lines:
        (stream or sys.stdout).write(f"{line}\n")
    (stream or sys.stdout).flush()
