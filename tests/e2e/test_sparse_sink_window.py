"""Sinks and a window in real engines: tokens equal dense ones if all fits, else a reference's; memory stays constant.

The reference (`inside/window_reference.py`) is the same model in plain torch with a mask. `tests/ucm/sparse/accounting`
uses vLLM's own scheduler with random steps; `test_inside.py` runs it with vLLM.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.engine import MODEL
from tests.e2e.model import VOCABULARY, write_model
from tests.e2e.sparse_runs import prompts, run_script, run_sparse
from tests.e2e.workload import BLOCK, ENGINE, TOKENS_PER_STEP
from ucm.sparse.blocks import TILE

if TYPE_CHECKING:
    from tests.e2e.engine import Run
    from tests.e2e.scenarios import Environments, Runs

pytestmark = pytest.mark.e2e

LONGEST = 8192
BLOCKS = LONGEST // BLOCK
#: Two blocks of sinks.
SINKS, WINDOW = 40, 100
SMALL = {"StreamingLLM": {"sink_tokens": SINKS, "window_tokens": WINDOW}}
#: Sinks; a window before a tile, not aligned to blocks; a chunk.
MOST_HELD = 2 + -(-(WINDOW + TILE - 1 + TOKENS_PER_STEP) // BLOCK) + 2
CROWD = 12
#: More than the number of steps until the last of them has started.
CROWD_ANSWERS = 240


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(seed)  # noqa: S311 - prompts, no secrets
    return [source.randrange(3, VOCABULARY) for _ in range(length)]


def request(tokens: list[int], count: int) -> dict[str, Any]:
    return {"prompt": tokens, "params": {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}}


FIRST, LONG, SHORT = prompt(700, 1), prompt(4000, 2), prompt(20, 3)
AGAIN = [*FIRST, *prompt(50, 4)]
#: The tokens in full blocks of the first prompt, which the second one hits.
KNOWN = len(FIRST) // BLOCK * BLOCK
PHASES = {
    "in chunks": [request(FIRST, 24)],
    "after a hit": [request(AGAIN, 24)],
    "long": [request(LONG, 48)],
    "growing": [request(SHORT, 600)],
    "crowd": [request(prompt(2000, 10 + number), CROWD_ANSWERS) for number in range(CROWD)],
}


#: The windows of other masks, which must give other tokens.
OTHER_WINDOWS = (WINDOW - BLOCK, WINDOW + BLOCK, LONGEST)
CALLS = [
    [
        {"tokens": FIRST, "count": 24},
        {"tokens": AGAIN, "count": 24, "known": KNOWN},
    ],
    [{"tokens": LONG, "count": 48}],
    [{"tokens": SHORT, "count": 600}],
]


REFERENCE = {"sinks": 2 * BLOCK, "block": BLOCK, "tile": TILE}


@pytest.fixture(scope="module")
def small(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    engine = {
        **ENGINE,
        "model": str(write_model(MODEL)),
        "max_model_len": LONGEST,
        "hf_overrides": {"max_position_embeddings": LONGEST},
        "num_gpu_blocks_override": BLOCKS + 1,
        "additional_config": {"ucm_sparse_config": SMALL},
    }
    directory = tmp_path_factory.mktemp("sink-window") / "small"
    spec = {"engine": engine, "phases": PHASES}
    found: dict[str, Any] = run_script(
        environments.overlay, directory, "windowed.py", spec, VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    return found


@pytest.fixture(scope="module")
def reference(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """The answers to each of `CALLS`; then to the first one with each of `OTHER_WINDOWS`."""
    directory = tmp_path_factory.mktemp("sink-window") / "reference"
    models = [{"window": WINDOW, "calls": calls} for calls in CALLS]
    models += [{"window": window, "calls": CALLS[0]} for window in OTHER_WINDOWS]
    spec = {"model": str(write_model(MODEL)), **REFERENCE, "models": models}
    found: list[list[list[int]]] = run_script(environments.plain, directory, "window_reference.py", spec)
    return found


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    directory = tmp_path_factory.mktemp("sink-window-whole")
    method = {"SinkWindow": {"window_tokens": ENGINE["max_model_len"]}}
    windowed = run_sparse(runs.environments.overlay, directory / "windowed", method)
    assert windowed.code == 0, windowed.log[-4000:]
    return {"dense": runs["plain"], "windowed": windowed}


@pytest.mark.core
def test_a_window_that_holds_all_gives_a_dense_engine_s_tokens(whole: dict[str, Run]) -> None:
    """In chunks, after prefix hits, preempted and resumed, starting and ending while others run."""
    assert whole["windowed"].tokens == whole["dense"].tokens
    assert prompts() >= 40
    assert "SinkWindow is active on the scheduler side" in whole["windowed"].log
    assert "SinkWindow is active on the worker side" in whole["windowed"].log
    for of in whole.values():
        assert of.phases["preempted"]["counters"]["vllm:num_preemptions"] > 0
        assert sum(of.phases["prefix"]["cached"]) > 0


def tokens_of(small: dict[str, Any], phase: str) -> list[int]:
    (found,) = small[phase]["requests"]
    tokens: list[int] = found["tokens"]
    return tokens


def test_tokens_are_the_reference_s(small: dict[str, Any], reference: list[list[list[int]]]) -> None:
    (first, again), (long,), (growing,) = reference[: len(CALLS)]
    assert tokens_of(small, "in chunks") == first
    assert small["after a hit"]["requests"][0]["cached"] == KNOWN
    assert tokens_of(small, "after a hit") == again
    assert tokens_of(small, "long") == long
    assert tokens_of(small, "growing") == growing


def test_the_mask_makes_a_difference(reference: list[list[list[int]]]) -> None:
    """Another window, or dense attention, gives other tokens; otherwise the test above would prove nothing."""
    others = reference[len(CALLS) :]
    assert len(others) == len(OTHER_WINDOWS)
    for other in others:
        assert other[0] != reference[0][0]
        assert other[1] != reference[0][1]


@pytest.mark.parametrize("phase", ["long", "growing"])
def test_the_blocks_of_a_request_stay_flat(small: dict[str, Any], phase: str) -> None:
    held = small[phase]["requests"][0]["held"]
    print(phase, [tuple(of) for of in held[:: len(held) // 8]])
    assert held[-1][0] >= 600
    assert max(count for _, count in held) <= MOST_HELD
    settled = [count for computed, count in held if computed > len(LONG if phase == "long" else SHORT) + WINDOW + 64]
    if phase == "growing":
        # Sinks, the window including its first partial block, the tile, and blocks retained for the prefix cache.
        assert max(settled) <= 2 + (WINDOW + TILE - 1) // BLOCK + 2


def test_more_requests_fit_into_the_same_blocks(small: dict[str, Any]) -> None:
    """Only four dense ones would fit."""
    crowd = small["crowd"]
    assert BLOCKS // -(-2000 // BLOCK) == 4
    assert crowd["most"] == CROWD
    assert not crowd["preemptions"]
    assert all(len(of["tokens"]) == CROWD_ANSWERS for of in crowd["requests"])
    assert max(count for of in crowd["requests"] for _, count in of["held"]) <= MOST_HELD


def test_nothing_is_held_at_the_end(small: dict[str, Any]) -> None:
    assert {name: phase["left"] for name, phase in small.items()} == dict.fromkeys(PHASES, 0.0)
