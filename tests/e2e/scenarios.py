"""The engines that the end-to-end tests look at: each runs once, two at a time, and serves many assertions."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.e2e.engine import Run, run_engine
from tests.e2e.environment import Environment, build_wheels, plain, with_overlay

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.workload import Request

#: Few requests for the engines that are not to get that far.
ONE_REQUEST: dict[str, list[list[Request]]] = {"one": [[{"prompt": [5, 6, 7], "params": {"max_tokens": 2}}]]}
TAMPERED = "vllm/v1/worker/gpu_model_runner.py"
EDITED = "vllm/v1/core/sched/scheduler.py"


@dataclass(frozen=True)
class Scenario:
    """One engine.

    Attributes:
        prepare: From the environments and a directory of its own to what it runs in.
        engine: Arguments of ``LLM``.
        switches: Environment variables.
        batches: Its requests; the whole workload by default.
    """

    prepare: Callable[[Environments, Path], Environment]
    engine: dict[str, Any] = field(default_factory=dict)
    switches: dict[str, str] = field(default_factory=dict)
    batches: dict[str, list[list[Request]]] | None = None


class Environments:
    """The environments of one release."""

    def __init__(self, release: str) -> None:
        self.release = release
        self.wheels = build_wheels(release)
        self.plain = plain(release)
        self.overlay = with_overlay(release, wheels=self.wheels)


def _plain(environments: Environments, _: Path) -> Environment:
    return environments.plain


def _overlay(environments: Environments, _: Path) -> Environment:
    return environments.overlay


def _tampered(environments: Environments, directory: Path) -> Environment:
    """A module that only workers load has one more line than was reviewed."""
    environment = with_overlay(environments.release, directory / "env", environments.wheels)
    with (environment.overlay / "modules" / TAMPERED).open("a", encoding="utf-8") as file:
        file.write("# not reviewed\n")
    return environment


def _edited(environments: Environments, directory: Path) -> Environment:
    """A copy of vLLM, in front of the real one, in which a module that only EngineCore loads was edited."""
    environment = with_overlay(environments.release, directory / "env", environments.wheels)
    copy = environment.site / "vllm"
    subprocess.run(["cp", "-rs", environments.plain.site / "vllm", copy], check=True)  # noqa: S607
    target = environment.site / EDITED
    source = target.read_text(encoding="utf-8")
    target.unlink()
    target.write_text(source + "# a local change\n", encoding="utf-8")
    return environment


SCENARIOS = {
    "plain": Scenario(_plain),
    "overlay": Scenario(_overlay, switches={"UCM_PATCH_VERBOSE": "1"}),
    "probe": Scenario(_overlay, {"additional_config": {"ucm_sparse_config": {"Probe": {"report_dir": "{}/probe"}}}}),
    "disabled": Scenario(_overlay, switches={"UCM_DISABLE_PATCHES": "1", "UCM_PATCH_VERBOSE": "1"}),
    "attention off": Scenario(_overlay, switches={"UCM_DISABLE_ATTENTION_PATCH": "1"}),
    "scheduler off": Scenario(_overlay, switches={"UCM_DISABLE_SCHEDULER_PATCH": "1"}),
    "tampered": Scenario(_tampered, batches=ONE_REQUEST),
    "edited": Scenario(_edited, batches=ONE_REQUEST),
    "on PYTHONPATH": Scenario(_plain, switches={"PYTHONPATH": "{overlay}"}, batches=ONE_REQUEST),
    "compiled plain": Scenario(_plain, {"enforce_eager": False}),
    "compiled overlay": Scenario(_overlay, {"enforce_eager": False}),
}


class Runs:
    """The scenarios of one release; all are started at once, and run two at a time."""

    def __init__(self, environments: Environments, directory: Path) -> None:
        self.environments = environments
        self._directory = directory
        self._pool = ThreadPoolExecutor(2)
        self._futures = {name: self._pool.submit(self._run, name) for name in SCENARIOS}

    def __getitem__(self, name: str) -> Run:
        return self._futures[name].result()

    def directory(self, name: str) -> Path:
        """Where a scenario keeps its files."""
        return self._directory / name.replace(" ", "-")

    def close(self) -> None:
        """Start no more."""
        self._pool.shutdown(cancel_futures=True)

    def _run(self, name: str) -> Run:
        scenario, directory = SCENARIOS[name], self.directory(name)
        directory.mkdir()
        environment = scenario.prepare(self.environments, directory)
        switches = {
            key: value.format(overlay=self.environments.overlay.site) for key, value in scenario.switches.items()
        }
        engine = _filled(scenario.engine, str(directory))
        return run_engine(environment, directory, engine=engine, switches=switches, batches=scenario.batches)


def _filled(value: Any, directory: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, directory) for key, item in value.items()}
    return value.replace("{}", directory) if isinstance(value, str) else value
