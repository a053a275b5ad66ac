"""Engines with a sparse method: each runs once, one after the other, and serves many assertions."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

from tests.e2e.engine import INSIDE, Run, run_engine
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
) -> Run:
    """Run an engine to its end.

    Args:
        environment: A vLLM with the overlay.
        directory: A new one for its files.
        method: A method's name with its options; None for a dense engine. Modules of `tests.e2e.inside` may be named.
        engine: Arguments of ``LLM`` that differ from the usual ones.
        batches: The requests; those of `tests.e2e.workload` by default.
    """
    directory.mkdir()
    settings: dict[str, Any] = {} if method is None else {"additional_config": {"ucm_sparse_config": method}}
    path = {"PYTHONPATH": os.pathsep.join((str(directory / "plugin"), str(INSIDE)))}
    return run_engine(environment, directory, engine={**settings, **(engine or {})}, switches=path, batches=batches)


def prompts() -> int:
    """The requests of the workload."""
    return sum(len(list(itertools.chain(*batches))) for batches in phases().values())
