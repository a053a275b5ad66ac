"""The engines of the end-to-end tests: each runs once, on first use, for many assertions."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.e2e.engine import Run, run_engine
from tests.e2e.environment import Environment, build_wheels, plain, with_all_hooks, with_overlay, with_runtime
from tests.e2e.processes import IN_PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.shared import Shared
    from tests.e2e.workload import Request

#: A single request, for engines that must fail before it.
ONE_REQUEST: dict[str, list[list[Request]]] = {"one": [[{"prompt": [5, 6, 7], "params": {"max_tokens": 2}}]]}
OWN_CACHES = {"VLLM_CACHE_ROOT": "{directory}/cache", "TORCHINDUCTOR_CACHE_DIR": "{directory}/inductor"}
TAMPERED = "vllm/v1/worker/gpu_model_runner.py"
EDITED = "vllm/v1/core/sched/scheduler.py"


@dataclass(frozen=True)
class Scenario:
    """One engine.

    Attributes:
        prepare: Returns its environment, given the environments and a directory.
        engine: Arguments of ``LLM``.
        switches: Environment variables.
        batches: Its requests; default: the whole workload.
        forked: Whether it is forked from a process that has imported vLLM; not if imports are the subject.
    """

    prepare: Callable[[Environments, Path], Environment]
    engine: dict[str, Any] = field(default_factory=dict)
    switches: dict[str, str] = field(default_factory=dict)
    batches: dict[str, list[list[Request]]] | None = None
    forked: bool = False


@dataclass(frozen=True)
class Environments:
    """The environments of one release.

    Attributes:
        release: The vLLM.
        wheels: The wheels of the overlay and the runtime.
        plain: vLLM without our wheels.
        runtime: With only the runtime.
        overlay: With both.
        all_hooks: With the runtime and an overlay that also has the opt-in hooks.
    """

    release: str
    wheels: list[Path]
    plain: Environment
    runtime: Environment
    overlay: Environment
    all_hooks: Environment


def make_environments(release: str) -> Environments:
    """Build the wheels from this checkout, and install them."""
    overlay, runtime = wheels = build_wheels(release)
    return Environments(
        release,
        wheels=[overlay, runtime],
        plain=plain(release),
        runtime=with_runtime(release, wheels=[runtime]),
        overlay=with_overlay(release, wheels=wheels),
        all_hooks=with_all_hooks(release),
    )


def _plain(environments: Environments, _: Path) -> Environment:
    return environments.plain


def _overlay(environments: Environments, _: Path) -> Environment:
    return environments.overlay


def _all_hooks(environments: Environments, _: Path) -> Environment:
    return environments.all_hooks


def _tampered(environments: Environments, directory: Path) -> Environment:
    """Return an environment in which a rewritten module that only workers load has an extra line."""
    environment = with_overlay(environments.release, directory / "env", environments.wheels)
    with (environment.overlay / "modules" / TAMPERED).open("a", encoding="utf-8") as file:
        file.write("# not reviewed\n")
    return environment


def _edited(environments: Environments, directory: Path) -> Environment:
    """Return an environment with an edited copy of a vLLM module that only EngineCore loads."""
    environment = with_overlay(environments.release, directory / "env", environments.wheels)
    copy = environment.site / "vllm"
    subprocess.run(["cp", "-rs", environments.plain.site / "vllm", copy], check=True)  # noqa: S607
    target = environment.site / EDITED
    source = target.read_text(encoding="utf-8")
    target.unlink()
    target.write_text(source + "# a local change\n", encoding="utf-8")
    return environment


SCENARIOS = {
    "plain": Scenario(_plain, switches=IN_PROCESS, forked=True),
    "overlay": Scenario(_overlay, switches={"UCM_PATCH_VERBOSE": "1"}),
    "probe": Scenario(
        _all_hooks, {"additional_config": {"ucm_sparse_config": {"Probe": {"report_dir": "{}/probe"}}}}, forked=True
    ),
    "disabled": Scenario(_overlay, switches={"UCM_DISABLE_PATCHES": "1", "UCM_PATCH_VERBOSE": "1"}),
    "attention off": Scenario(_overlay, switches={"UCM_DISABLE_ATTENTION_PATCH": "1", **IN_PROCESS}),
    "scheduler off": Scenario(_overlay, switches={"UCM_DISABLE_SCHEDULER_PATCH": "1", **IN_PROCESS}),
    "tampered": Scenario(_tampered, batches=ONE_REQUEST),
    "edited": Scenario(_edited, batches=ONE_REQUEST),
    "on PYTHONPATH": Scenario(_plain, switches={"PYTHONPATH": "{overlay}"}, batches=ONE_REQUEST),
    "compiled plain": Scenario(_plain, {"enforce_eager": False}, {**IN_PROCESS, **OWN_CACHES}),
    "compiled overlay": Scenario(_overlay, {"enforce_eager": False}, {**IN_PROCESS, **OWN_CACHES}),
}


class Runs:
    """The scenarios of one release."""

    def __init__(self, environments: Environments, shared: Shared) -> None:
        self.environments = environments
        self._shared = shared

    def __getitem__(self, name: str) -> Run:
        return self._shared.get(f"engine {name}", lambda: self._run(name))

    def directory(self, name: str) -> Path:
        """Return the directory of a scenario's files."""
        return self._shared.directory / name.replace(" ", "-")

    def _run(self, name: str) -> Run:
        scenario, directory = SCENARIOS[name], self.directory(name)
        directory.mkdir()
        environment = scenario.prepare(self.environments, directory)
        paths = {"overlay": self.environments.overlay.site, "directory": directory}
        switches = {key: value.format(**paths) for key, value in scenario.switches.items()}
        engine = _filled(scenario.engine, str(directory))
        return run_engine(
            environment, directory, engine=engine, switches=switches, batches=scenario.batches, forked=scenario.forked
        )


def _filled(value: Any, directory: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, directory) for key, item in value.items()}
    return value.replace("{}", directory) if isinstance(value, str) else value
