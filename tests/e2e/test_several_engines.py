"""Several engines in one process, with different methods or none, generate the same tokens as alone."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.engine import MODEL
from tests.e2e.model import VOCABULARY, write_model
from tests.e2e.sparse_runs import run_script, run_sparse
from tests.e2e.workload import ENGINE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

Turns = list[dict[str, list[list[int]]]]

WINDOW: dict[str, Any] = {"SinkWindow": {"sink_tokens": 32, "window_tokens": 64}}
TOP_K: dict[str, Any] = {
    "GSAOnDevice": {"token_budget": 128, "min_context": 0, "sink_tokens": 1, "recent_tokens": 1, "dense_layers": 0}
}


def engine(method: dict[str, Any] | None, **arguments: Any) -> dict[str, Any]:
    settings = {"additional_config": {"ucm_sparse_config": method}} if method else {}
    return {"model": str(write_model(MODEL)), **ENGINE, "enable_prefix_caching": False, **settings, **arguments}


def requests() -> list[dict[str, Any]]:
    source = random.Random(5)  # noqa: S311 - prompts, no secrets
    prompts = [[source.randrange(3, VOCABULARY) for _ in range(length)] for length in (300, 220, 260, 410)]
    params = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    return [{"prompt": prompt, "params": params} for prompt in prompts]


@pytest.fixture(scope="module")
def alone(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """The tokens of each engine when it is the only running one in the process."""
    engines = {
        "dense": engine(None),
        "own worker": engine(WINDOW, worker_cls="own_worker.OwnWorker"),
        "window": engine(WINDOW),
        "top-k": engine(TOP_K),
    }
    names = list(engines)
    plan = [names[:1], *([f"-{before}", name] for before, name in itertools.pairwise(names))]
    spec = {"engines": engines, "requests": requests(), "plan": plan}
    turns: Turns = run_script(
        environments.overlay, tmp_path_factory.mktemp("alone") / "run", "several_engines.py", spec
    )
    return {name: tokens for turn in turns for name, tokens in turn.items()}


@pytest.fixture(scope="module")
def together(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Turns:
    names = ["window", "dense", "top-k"]
    # vLLM destroys the process groups of all engines in a process when the first one ends.
    plan = [names[:1], names[1:2], names[:2], names, [*(f"-{name}" for name in names), "dense"]]
    spec = {
        "engines": {"window": engine(WINDOW), "dense": engine(None), "top-k": engine(TOP_K)},
        "requests": requests(),
        "plan": plan,
    }
    turns: Turns = run_script(
        environments.overlay, tmp_path_factory.mktemp("together") / "run", "several_engines.py", spec
    )
    return turns


def test_the_methods_make_a_difference(alone: dict[str, list[list[int]]]) -> None:
    """Otherwise the tests below would prove nothing."""
    assert alone["window"] != alone["dense"] != alone["top-k"] != alone["window"]


def test_each_gives_the_tokens_that_it_gives_alone(alone: dict[str, list[list[int]]], together: Turns) -> None:
    assert [len(turn) for turn in together] == [1, 1, 2, 3, 1]
    for number, turn in enumerate(together):
        for name, tokens in turn.items():
            assert tokens == alone[name], (number, name)


def test_a_worker_of_another_platform_runs_its_half(alone: dict[str, list[list[int]]]) -> None:
    assert alone["own worker"] == alone["window"]


def test_an_engine_whose_worker_does_not_run_its_half_is_refused(environments: Environments, tmp_path: Path) -> None:
    """Before the first request, with an error that names it."""
    run = run_sparse(
        environments.overlay,
        tmp_path / "run",
        WINDOW,
        engine={"worker_cls": "own_worker.Forgetful"},
        batches={"one": [requests()[:1]]},
    )
    assert run.code not in (0, -1)
    assert not run.phases
    assert "[UCM.Sparse] refused: not all workers run SinkWindow as the scheduler side does" in run.log
    assert "runs method None, the scheduler 'ucm.sparse.sink_window.SinkWindow'" in run.log
