"""Run all static checks, and convert the report to plain data; `ucm.doctor` describes its keys."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import ucm
from ucm.doctor import config_checks, environment, overlay_checks
from ucm.doctor.findings import Finding, Status, has_error, worst
from ucm.overlay.switches import disabled_groups

if TYPE_CHECKING:
    from pathlib import Path

    from ucm.doctor.environment import ImportHooks, StartUpFile, Vllm
    from ucm.doctor.overlay_checks import ModuleState, Overlay
    from ucm.doctor.run import Run

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
        runtimes: Other distributions and copies of the package ``ucm``.
        vllm: The installed vLLM, if any.
        overlays: The installed overlays.
        hooks: The import hooks of this process.
        files: The start-up files that run code.
        switches: The kill switches that are set.
        modules: The shadowed modules of the active overlay.
        findings: The findings of the checks.
        run: The engine run, if there was one.
    """

    runtimes: list[str]
    vllm: Vllm | None
    overlays: list[Overlay]
    hooks: ImportHooks
    files: list[StartUpFile]
    switches: list[str]
    modules: list[ModuleState]
    findings: list[Finding]
    run: Run | None = None

    def with_findings(self, findings: list[Finding], run: Run | None = None) -> Report:
        """Return the report with further findings, and the run that they come from."""
        return replace(self, run=run, findings=self.findings + findings)

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
        on = sum(state.disabled is None for state in self.modules)
        if not on:
            return "UCM's overlay is installed and switched off: vLLM runs unchanged."
        manifest = self.overlays[0].manifest
        release = manifest.release if manifest else ""
        return (
            f"UCM's overlay is active: {on} of its {len(self.modules)} modules replace those of vLLM {release} "
            "at import."
        )

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
    early = environment.own_modules_of_vllm()
    runtimes, files, hooks, on = (
        environment.other_runtimes(),
        environment.start_up_files(),
        environment.import_hooks(),
        environment.switches(),
    )
    vllm, overlays = environment.find_vllm(), overlay_checks.find_overlays()
    overlay = overlays[0] if overlays else None
    manifest = overlay.manifest if overlay else None
    disabled = disabled_groups(manifest.needs) if manifest else {}
    active = hooks.position is not None
    states = (
        overlay_checks.states_of(manifest, vllm.directory if vllm else None, disabled, active=active)
        if manifest
        else []
    )
    settings = config_checks.check_config(config) if config is not None else []
    of_model, text = config_checks.check_model(model) if model is not None else (None, None)
    if config is not None and config_checks.asks_for_sparse_attention(settings) and not has_error(settings):
        settings += config_checks.check_latent(config, text, [found.manifest for found in overlays if found.manifest])
    of_overlay = overlay_checks.check_overlay(overlays, vllm, needed=config_checks.asks_for_sparse_attention(settings))
    findings = [
        environment.check_python(),
        environment.check_runtime(runtimes),
        environment.check_vllm(vllm, manifest.release if manifest else None),
        *(environment.check_metadata(vllm) if vllm is not None else ()),
        of_overlay,
    ]
    if overlay is not None:
        claimed = overlay_checks.claimed_modules(manifest, disabled, vllm)
        in_place = environment.check_import_hook(hooks, overlay.directory, early, claimed)
        findings += [environment.check_start_up_file(overlay.directory, hooks), in_place]
    findings += [*overlay_checks.check_further_overlays(), environment.check_others(hooks, files)]
    if manifest is not None and vllm is not None and active:
        findings += overlay_checks.check_modules(states, manifest, vllm)
    findings.append(environment.check_switches(on, manifest.needs if manifest else {}, disabled))
    if overlay is not None:
        findings.append(environment.check_plugins())
    # Without an overlay the connectors run, even where a sparse method needs one.
    broken = has_error(finding for finding in findings if overlays or finding is not of_overlay)
    findings += config_checks.check_connector(vllm, config, settings, broken=broken)
    findings += [*settings, *([of_model] if of_model else [])]
    return Report(runtimes, vllm, overlays, hooks, files, on, states, findings)


def as_data(report: Report) -> dict[str, Any]:
    """Return the report as the object that ``--json`` prints."""
    return {
        "schema": SCHEMA,
        "status": worst(report.findings).value,
        "verdict": report.verdict,
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "site_directories": [str(place) for place in environment.site_directories()],
        },
        "runtime": {
            "version": ucm.__version__,
            "directory": str(environment.runtime_directory()),
            "others": report.runtimes,
        },
        "vllm": _vllm(report.vllm) if report.vllm else None,
        "overlays": [
            {
                "version": overlay.version or None,
                "release": overlay.manifest.release if overlay.manifest else None,
                "directory": str(overlay.directory),
            }
            for overlay in report.overlays
        ],
        "import_hook": {
            "position": report.hooks.position,
            "ahead": report.hooks.ahead,
            "others": report.hooks.others,
        },
        "start_up_files": [{**asdict(file), "path": str(file.path)} for file in report.files],
        "switches": report.switches,
        "modules": [
            {
                "name": state.module.name,
                "group": state.module.group,
                "upstream": state.upstream,
                "rewritten": state.rewritten,
                "disabled": state.disabled,
                "loads": str(state.loads) if state.loads else None,
            }
            for state in report.modules
        ],
        "findings": [{**asdict(finding), "status": finding.status.value} for finding in report.findings],
        "run": report.run.as_data() if report.run else None,
        "next": report.todo,
    }


def _vllm(vllm: Vllm) -> dict[str, Any]:
    given = {name: value or None for name, value in asdict(vllm).items()}
    own = {"directory": str(vllm.directory), "differing": vllm.differing}
    return {**given, **own, "release": vllm.release, "agree": vllm.agree}
