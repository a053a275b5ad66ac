"""Several engines in one environment, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.e2e.prefix_engine import EngineFailedError, PrefixEngine
from tests.e2e.prefix_workload import Played, play_phase
from tests.e2e.processes import IN_PROCESS, INSIDE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.e2e.workload import Request

Phases = dict[str, list[list["Request"]]]


@dataclass(frozen=True)
class Engine:
    """The specification of one engine.

    Attributes:
        arguments: Arguments of ``LLM`` that differ from `tests.e2e.workload.ENGINE`.
        phases: The batches of each phase.
        again: Phases that are repeated after all others, when their blocks are in the store and the engine's own
            prefix cache is empty.
        switches: Its environment variables.
    """

    arguments: Mapping[str, Any]
    phases: Phases
    again: Phases = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """The result of one engine.

    Attributes:
        phases: By name; empty if it failed.
        again: The results of the repeated phases, by name.
        log: Its output.
    """

    phases: dict[str, Played]
    again: dict[str, Played]
    log: str

    @property
    def tokens(self) -> dict[str, list[list[int]]]:
        """Return the generated tokens of each request, by phase."""
        return {name: played.tokens for name, played in self.phases.items()}


def run_engines(
    environment: Environment, directory: Path, engines: Mapping[str, Engine], switches: Mapping[str, str]
) -> dict[str, Record]:
    """Run engines to their ends, one after the other; a failure is a result, not an exception.

    Args:
        environment: The environment with vLLM.
        directory: A new directory for their files.
        engines: The engines, by name.
        switches: Environment variables.
    """
    found = {}
    for name, engine in engines.items():
        own = {"PYTHONPATH": str(INSIDE), **IN_PROCESS, **switches, **engine.switches}
        started = PrefixEngine(environment, directory / name.replace(" ", "-"), engine.arguments, own)
        with started:
            try:
                phases = {phase: play_phase(started, batches) for phase, batches in engine.phases.items()}
                if engine.again:
                    started.settle()
                    if not started.reset():
                        raise RuntimeError(f"{name}: the engine's own prefix cache could not be emptied")
                again = {phase: play_phase(started, batches) for phase, batches in engine.again.items()}
            except EngineFailedError:
                phases, again = {}, {}
        found[name] = Record(phases, again, started.log)
    return found
