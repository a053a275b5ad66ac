"""Engines with a sparse method: each runs once, for many assertions."""

from __future__ import annotations

import itertools
import json
import os
from typing import TYPE_CHECKING, Any

from tests.e2e.engine import PATIENCE, Run, run_engine, variables, wait
from tests.e2e.processes import IN_PROCESS, INSIDE, start
from tests.e2e.workload import phases

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.e2e.environment import Environment


def run_sparse(
    environment: Environment,
    directory: Path,
    method: Mapping[str, Mapping[str, Any]] | None,
    *,
    engine: Mapping[str, Any] | None = None,
    batches: Mapping[str, Any] | None = None,
    in_process: bool = True,
) -> Run:
    """Run an engine to its end.

    Args:
        environment: An environment with the overlay.
        directory: A new one for its files.
        method: A method's name with its options; None for a dense engine. It may be in a module of `tests.e2e.inside`.
        engine: Arguments of ``LLM`` that differ from the usual ones.
        batches: The requests; those of `tests.e2e.workload` by default.
        in_process: Whether scheduler and worker run in the main process, which starts in half the time.
    """
    directory.mkdir()
    settings: dict[str, Any] = {} if method is None else {"additional_config": {"ucm_sparse_config": method}}
    path = {"PYTHONPATH": os.pathsep.join((str(directory / "plugin"), str(INSIDE)))}
    switches = {**path, **IN_PROCESS} if in_process else path
    return run_engine(environment, directory, engine={**settings, **(engine or {})}, switches=switches, batches=batches)


def run_script(
    environment: Environment, directory: Path, script: str, specification: Mapping[str, Any], **switches: str
) -> Any:
    """Run a script of `tests.e2e.inside`; return its output.

    Args:
        environment: An environment with vLLM.
        directory: A new one for its files.
        script: The file's name.
        specification: Its input.
        switches: Environment variables.
    """
    directory.mkdir()
    told, result, log = directory / "spec.json", directory / "result.json", directory / "log.txt"
    told.write_text(json.dumps(specification), encoding="utf-8")
    with log.open("wb") as output:
        process = start(
            environment,
            [INSIDE / script, told, result],
            directory=directory,
            variables={**variables(directory, {**IN_PROCESS, **switches}), "PYTHONPATH": ""},
            output=output,
        )
        code = wait(process, PATIENCE)
    assert code == 0, log.read_text(encoding="utf-8", errors="replace")[-4000:]
    return json.loads(result.read_text(encoding="utf-8"))


def prompts() -> int:
    """Return the number of requests in the workload."""
    return sum(len(list(itertools.chain(*batches))) for batches in phases().values())
