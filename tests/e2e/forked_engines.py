"""Several engines in one environment for the price of one import of vLLM; see `inside/forked.py`."""

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
    """What one engine is and does.

    Attributes:
        arguments: Those of ``LLM`` that differ from `tests.e2e.workload.ENGINE`.
        phases: For each phase its batches.
        again: Phases that are played when all others have been, what they saved lies in the store, and the engine's own
            cache is empty.
        store: The store's directory.
        switches: Environment variables of its own.
    """

    arguments: Mapping[str, Any]
    phases: Phases
    again: Phases = field(default_factory=dict)
    store: Path | None = None
    switches: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """What one engine did.

    Attributes:
        phases: By name; empty if it failed.
        again: The same of those that were played again.
        log: What it wrote.
    """

    phases: dict[str, Played]
    again: dict[str, Played]
    log: str

    @property
    def tokens(self) -> dict[str, list[list[int]]]:
        """What each request generated, by phase."""
        return {name: played.tokens for name, played in self.phases.items()}


def run_engines(
    environment: Environment, directory: Path, engines: Mapping[str, Engine], switches: Mapping[str, str]
) -> dict[str, Record]:
    """Run engines to their ends, one after the other; a failure of one is a result, not an exception.

    Args:
        environment: Where vLLM is installed.
        directory: One that is not there, for their files.
        engines: By name.
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
