"""ESA in real engines: if all blocks are loaded back, tokens equal dense ones; memory does not grow.

`tests/ucm/sparse/esa` uses vLLM's own scheduler with random steps; `test_inside.py` runs it with vLLM.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.engine import MODEL
from tests.e2e.model import MAX_LENGTH, VOCABULARY, write_model
from tests.e2e.sparse_runs import prompts, run_script, run_sparse
from tests.e2e.workload import BLOCK, ENGINE, TOKENS_PER_STEP
from ucm.sparse.blocks import TILE
from ucm.store.posix import space as posix_space

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.engine import Run
    from tests.e2e.scenarios import Environments, Runs

pytestmark = pytest.mark.e2e

LONGEST = 8192
#: Blocks for some requests at a time; one of maximum length just fits, as vLLM requires.
BLOCKS = LONGEST // BLOCK + 1
SINKS, WINDOW, BUDGET = 1, 100, 8 * BLOCK
#: Sinks; a window before a tile, which does not begin with a block; a chunk; what comes back; what the prefix cache
#: holds back.
MOST_HELD = 1 + -(-(WINDOW + TILE - 1 + TOKENS_PER_STEP) // BLOCK) + 2 + BUDGET // BLOCK
#: The shortest possible window, and a budget that loads all blocks beyond it.
ALL = {"token_budget": MAX_LENGTH, "sink_tokens": 1, "window_tokens": 1}


def request(length: int, count: int, seed: int) -> dict[str, Any]:
    source = random.Random(seed)  # noqa: S311 - prompts, no secrets
    prompt = [source.randrange(3, VOCABULARY) for _ in range(length)]
    return {"prompt": prompt, "params": {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}}


def store_in(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Create a store's directory; return it and its settings."""
    root = directory / "store"
    root.mkdir(mode=0o700)
    return root, {"pipeline": "Posix", "directories": [str(root)]}


@pytest.fixture(scope="module")
def whole(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    directory = tmp_path_factory.mktemp("esa-whole")
    root, store = store_in(directory)
    method = {"eager_esa:EagerESA": {**ALL, "store": store}}
    retrieving = run_sparse(runs.environments.overlay, directory / "retrieving", method)
    assert retrieving.code == 0, retrieving.log[-4000:]
    left = {path.name for path in root.iterdir()}
    assert left == {posix_space.USAGE_FILE}, "an engine leaves nothing but the count of bytes in its store"
    return {"dense": runs["plain"], "retrieving": retrieving}


def test_a_budget_that_brings_all_back_gives_a_dense_engine_s_tokens(whole: dict[str, Run]) -> None:
    """In chunks, after prefix hits, preempted and resumed, starting and ending while others run."""
    assert whole["retrieving"].tokens == whole["dense"].tokens
    assert prompts() >= 40
    told = [line for line in whole["retrieving"].log.splitlines() if "ESA restricted" in line]
    print(told[-1])
    numbers = re.search(r"(\d+) of (\d+) offloaded blocks read, (\d+) fetched, (\d+) of them from the store", told[-1])
    assert numbers
    read, stored, fetched, loaded = (int(number) for number in numbers.groups())
    assert read == stored > 10_000
    assert fetched == loaded > 500
    for of in whole.values():
        assert of.phases["preempted"]["counters"]["vllm:num_preemptions"] > 0
        assert sum(of.phases["prefix"]["cached"]) > 0


@pytest.fixture(scope="module")
def small(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("esa-small")
    root, store = store_in(directory)
    options = {
        "token_budget": BUDGET,
        "sink_tokens": SINKS,
        "window_tokens": WINDOW,
        "store": store,
    }
    engine = {
        **ENGINE,
        "model": str(write_model(MODEL)),
        "max_model_len": LONGEST,
        "hf_overrides": {"max_position_embeddings": LONGEST},
        "num_gpu_blocks_override": BLOCKS,
        "additional_config": {"ucm_sparse_config": {"BlockRetrieval": options}},
    }
    phases = {
        "long": {"requests": [request(5000, 100, 1)]},
        "growing": {"requests": [request(30, 900, 2)]},
        "crowd": {"requests": [request(1200, 60, 10 + number) for number in range(6)]},
        "store goes": {"requests": [request(1000, 60, 20 + number) for number in range(4)], "removal": [40, str(root)]},
        "after it": {"requests": [request(1000, 20, 30)]},
    }
    specification = {"engine": engine, "phases": phases}
    found: dict[str, Any] = run_script(
        environments.overlay,
        directory / "engine",
        "retrieving.py",
        specification,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    return found


@pytest.mark.parametrize(("phase", "length", "freed"), [("long", 5000, 5040), ("growing", 900, 0)])
def test_the_blocks_of_a_request_stay_flat(small: dict[str, Any], phase: str, length: int, freed: int) -> None:
    """From its first generated tokens on, in whose steps those of its prompt are freed in portions."""
    held = small[phase]["held"]
    print(phase, [tuple(of) for of in held[:: max(1, len(held) // 10)]])
    assert held[-1][0] >= length
    assert max(count for tokens, count in held if tokens > freed) <= MOST_HELD
    assert held[-1][0] // BLOCK > MOST_HELD, "it would hold more if it were dense"


def test_what_does_not_fit_the_budget_comes_from_the_store(small: dict[str, Any]) -> None:
    print(small["long"]["worker"], small["long"]["store"])
    assert small["long"]["worker"]["copied_out"] > 5000 // BLOCK - MOST_HELD
    assert small["long"]["store"]["loaded"] > 0
    assert small["crowd"]["store"].get("lost", 0) == 0


def test_requests_go_on_without_their_store(small: dict[str, Any]) -> None:
    """Lost blocks are recomputed; blocks freed from then on stay in host memory."""
    before, at, after = (small[name] for name in ("crowd", "store goes", "after it"))
    assert [(len(of["tokens"]), of["finish"]) for of in at["requests"]] == [(60, "length")] * 4
    assert at["store"]["lost"] > 0
    assert at["preemptions"] > 0
    assert before["preemptions"] == 0
    assert len(after["requests"][0]["tokens"]) == 20
    assert after["store"]["lost"] == at["store"]["lost"]
    assert after["store"]["kept"] > at["store"]["kept"]


def test_nothing_is_held_at_the_end(small: dict[str, Any]) -> None:
    assert {phase["left"] for phase in small.values()} == {0}
