"""Several engines in one environment with a single import of vLLM; see `inside/forked.py`."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.e2e.engine import IN_PROCESS, INSIDE, MODEL, variables
from tests.e2e.model import write_model
from tests.e2e.prefix_engine import Answer
from tests.e2e.prefix_workload import Played
from tests.e2e.workload import ENGINE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.e2e.workload import Request

#: Seconds for each engine; it is killed then.
PATIENCE = 300
Phases = dict[str, list[list["Request"]]]


@dataclass(frozen=True)
class Engine:
    """The specification of one engine.

    Attributes:
        arguments: Arguments of ``LLM`` that differ from `tests.e2e.workload.ENGINE`.
        phases: The batches of each phase.
        again: Phases that are repeated after all others, when their blocks are in the store and the engine's own
            prefix cache is empty.
        store: The store's directory.
        switches: Its environment variables.
    """

    arguments: Mapping[str, Any]
    phases: Phases
    again: Phases = field(default_factory=dict)
    store: Path | None = None
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
    directory.mkdir(parents=True)
    told = []
    for name, engine in engines.items():
        files = directory / name.replace(" ", "-")
        wanted = {**ENGINE, **engine.arguments}
        wanted.setdefault("model", str(write_model(MODEL)))
        places = {"log": f"{files}.log", "answers": f"{files}.json"}
        told.append({"arguments": wanted, "commands": _commands(engine), "switches": dict(engine.switches), **places})
    specification = directory / "engines.json"
    specification.write_text(json.dumps({"engines": told, "patience": PATIENCE}), encoding="utf-8")
    path = os.pathsep.join((str(INSIDE), switches.get("PYTHONPATH", "")))
    of_all = {**switches, **IN_PROCESS, "PYTHONPATH": path}
    with (directory / "all.log").open("wb") as output:
        subprocess.run(
            [environment.python, INSIDE / "forked.py", specification],
            env=variables(directory, of_all),
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    common = (directory / "all.log").read_text(encoding="utf-8", errors="replace")
    return {name: _record(engine, directory / name.replace(" ", "-"), common) for name, engine in engines.items()}


def _commands(engine: Engine) -> list[list[Any]]:
    between: list[list[Any]] = [["wait", str(engine.store)], ["reset"]] if engine.again else []
    return [*_playing(engine.phases), *between, *_playing(engine.again)]


def _playing(phases: Phases) -> list[list[Any]]:
    told: list[list[Any]] = []
    for batches in phases.values():
        told += [["counters"], *(["generate", batch] for batch in batches), ["counters"]]
    return told


def _record(engine: Engine, files: Path, common: str) -> Record:
    log, answers = files.with_name(f"{files.name}.log"), files.with_name(f"{files.name}.json")
    text = common + (log.read_text(encoding="utf-8", errors="replace") if log.exists() else "")
    if not answers.exists():
        return Record({}, {}, text)
    found = iter(json.loads(answers.read_text(encoding="utf-8")))
    phases = {name: _played(batches, found) for name, batches in engine.phases.items()}
    if engine.again and not (next(found), next(found))[1]:
        raise RuntimeError(f"{files.name}: the engine's own prefix cache could not be emptied")
    again = {name: _played(batches, found) for name, batches in engine.again.items()}
    return Record(phases, again, text)


def _played(batches: Sequence[Sequence[Request]], found: Any) -> Played:
    before = next(found)
    answers = [Answer(**answer) for _ in batches for answer in next(found)]
    rise = {name: value - before.get(name, 0) for name, value in next(found).items()}
    return Played([one for batch in batches for one in batch], [len(batch) for batch in batches], answers, rise)
