"""In each process, shadowed modules come from the overlay, or from vLLM if they are switched off."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from ucm.overlay.manifest import Manifest, read_manifest
from ucm.overlay.switches import disabled_groups, variable_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.engine import Run
    from tests.e2e.scenarios import Runs

pytestmark = pytest.mark.e2e

NEEDED = {
    "MainProcess": {"vllm.v1.core.sched.output"},
    "EngineCore": {
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.core.sched.output",
        "vllm.v1.core.kv_cache_manager",
        "vllm.v1.engine.core",
    },
    "Worker": {
        "vllm.model_executor.layers.attention.attention",
        "vllm.v1.core.sched.output",
        "vllm.v1.worker.gpu_model_runner",
        "vllm.v1.worker.worker_base",
    },
}


@pytest.fixture(scope="module")
def manifest(runs: Runs) -> Manifest:
    return read_manifest(runs.environments.overlay.overlay)


def _shadowed(run: Run, manifest: Manifest) -> dict[str, dict[str, bool]]:
    """Return the shadowed modules that each process has loaded, and whether from the overlay."""
    found = {}
    for report in run.reports:
        process = "Worker" if "Worker" in report["process"] else report["process"].partition("_")[0]
        loaded = {name: origin for name, origin in report["modules"].items() if name in manifest.modules}
        found[process] = {name: _below(origin, manifest.directory) for name, origin in loaded.items()}
    return found


def _below(origin: str, directory: Path) -> bool:
    return origin.startswith(f"{directory}/modules/")


def test_all_that_a_process_has_loaded_is_the_overlays(runs: Runs, manifest: Manifest) -> None:
    shadowed = _shadowed(runs["overlay"], manifest)
    assert set(shadowed) == set(NEEDED)
    for process, modules in shadowed.items():
        assert set(modules) >= NEEDED[process]
        assert all(modules.values()), (process, modules)
    assert all(report["finder_first"] == "ucm_vllm_overlay._boot" for report in runs["overlay"].reports)


def test_the_log_names_each_with_its_process(runs: Runs, manifest: Manifest) -> None:
    log = runs["overlay"].log.splitlines()
    for report in runs["overlay"].reports:
        about = f"pid={report['pid']} {report['process']} [UCM.Patch]"
        logged = {line.split("[UCM.Patch] ")[1].split()[0] for line in log if about in line}
        assert logged == set(report["modules"]) & set(manifest.modules)


@pytest.mark.newest_only
def test_the_kill_switch_leaves_pure_upstream(runs: Runs, manifest: Manifest) -> None:
    shadowed = _shadowed(runs["disabled"], manifest)
    assert set(shadowed) == set(NEEDED)
    assert not any(any(modules.values()) for modules in shadowed.values())
    assert "[UCM" not in runs["disabled"].log


@pytest.mark.parametrize("group", ["attention", "scheduler"])
def test_a_group_switch_leaves_that_group_upstreams(runs: Runs, manifest: Manifest, group: str) -> None:
    run = runs[f"{group} off"]
    with patch.dict(os.environ, {variable_of(group): "1"}):
        off = disabled_groups(manifest.needs)
    assert group in off
    for modules in _shadowed(run, manifest).values():
        assert modules == {name: manifest.modules[name].group not in off for name in modules}
    assert all(f"[UCM.Patch] group {name} stays upstream's: {reason}" in run.log for name, reason in off.items())
