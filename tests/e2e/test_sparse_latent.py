"""Block top-k on latent attention: a tiny DeepSeek-V2 on vLLM's reference implementation for the CPU, in float32.

This implementation has neither chunks of prompts nor a prefix cache, so neither do these requests.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.prefix_models import LATENT_BLOCK, LATENT_ENGINE, MLA, write_tiny_model
from tests.e2e.sparse_runs import run_script
from tests.e2e.test_sparse_company import ANSWER, GROWING, LONGEST, OTHERS, TARGETS, alone, crowd, request, tokens
from tests.e2e.workload import ENGINE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

OPTIONS = {"token_budget": 192, "min_context": 0, "sink_tokens": 4, "recent_tokens": 32, "dense_layers": 1}
ROOMY = {"max_num_batched_tokens": LONGEST, "num_gpu_blocks_override": 600}
TIGHT = {"max_num_batched_tokens": LONGEST, "num_gpu_blocks_override": LONGEST // LATENT_BLOCK + 12}
PHASES = {
    **alone("alone", [request(of, "alone") for of in TARGETS]),
    "crowd": crowd("crowd", 30),
    "dense": [request(of, "dense", asked=False) for of in TARGETS],
    "all read": [request(of, "all read", asked={"token_budget": 4 * LONGEST}) for of in TARGETS],
}
PREEMPTED = {"preempted": [*(request(of, "tight", arrives=20 + 60 * n) for n, of in enumerate(TARGETS)), *GROWING]}


def run(
    environment: Environment,
    directory: Path,
    phases: dict[str, Any],
    method: dict[str, Any] | None,
    engine: dict[str, Any],
    **switches: str,
) -> dict[str, list[dict[str, Any]]]:
    model = write_tiny_model(environment, "latent", {**MLA, "max_position_embeddings": LONGEST})
    settings = {} if method is None else {"additional_config": {"ucm_sparse_config": method}}
    arguments = {**ENGINE, **LATENT_ENGINE, "model": str(model), "max_model_len": LONGEST, **settings, **engine}
    specification = {"engine": arguments, "phases": phases}
    found: dict[str, list[dict[str, Any]]] = run_script(environment, directory, "company.py", specification, **switches)
    return found


@pytest.fixture(scope="module")
def roomy(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("latent") / "roomy"
    return run(environments.all_hooks, directory, PHASES, {"GSAOnDevice": OPTIONS}, ROOMY)


@pytest.fixture(scope="module")
def answers(roomy: dict[str, list[dict[str, Any]]]) -> list[list[int]]:
    return [roomy[f"alone {number}"][0]["tokens"] for number in range(len(TARGETS))]


def test_a_budget_of_the_whole_context_reads_what_plain_vllm_reads(
    environments: Environments, roomy: dict[str, list[dict[str, Any]]], answers: list[list[int]], tmp_path: Path
) -> None:
    """Plain vLLM has no overlay and no method; with a small budget, other tokens are generated."""
    phases = {"plain": [request(of, "plain") for of in TARGETS]}
    plain = tokens(run(environments.plain, tmp_path / "plain", phases, None, ROOMY)["plain"])
    assert tokens(roomy["all read"]) == plain
    assert tokens(roomy["dense"]) == plain
    assert all(len(answer) == ANSWER for answer in plain)
    assert answers != plain


def test_in_a_crowd(roomy: dict[str, list[dict[str, Any]]], answers: list[list[int]]) -> None:
    assert len(roomy["crowd"]) > len(TARGETS + OTHERS)
    assert tokens(roomy["crowd"]) == answers


def test_preempted(environments: Environments, answers: list[list[int]], tmp_path: Path) -> None:
    """The answers so far are computed again one token in each step: only decodes are restricted."""
    found = run(environments.all_hooks, tmp_path / "tight", PREEMPTED, {"GSAOnDevice": OPTIONS}, TIGHT)["preempted"]
    assert found[-1]["preempted"] > 0
    assert tokens(found) == answers


def test_with_two_ranks(environments: Environments, answers: list[list[int]], tmp_path: Path) -> None:
    """The ranks have different heads of a request, and read the same blocks of it."""
    phases = {"targets": [request(of, "ranks") for of in TARGETS]}
    engine = {**ROOMY, "tensor_parallel_size": 2}
    switches = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    found = run(environments.all_hooks, tmp_path / "ranks", phases, {"GSAOnDevice": OPTIONS}, engine, **switches)
    assert tokens(found["targets"]) == answers


def test_restricted_rows_are_attention_over_the_chosen_blocks_and_codes_choose_well(
    environments: Environments, answers: list[list[int]], tmp_path: Path
) -> None:
    """In the engine, `LatentShares` compares queries with vLLM's own and outputs with torch, and selectors."""
    file = tmp_path / "shares"
    phases = {"targets": [request(of, "shares") for of in TARGETS]}
    method = {"latent_shares:LatentShares": OPTIONS}
    found = run(environments.all_hooks, tmp_path / "engine", phases, method, ROOMY, LATENT_SHARES=str(file))
    assert tokens(found["targets"]) == answers
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(lines) > ANSWER
    assert all(line["rows"] >= line["fewer"] > 0 for line in lines)
    kept = {name: sum(line[name] for line in lines) / len(lines) for name in ("oracle", "hash", "mean", "random")}
    print(kept)
    assert kept["oracle"] >= kept["hash"] > 0.6 * kept["oracle"]
    assert kept["hash"] > kept["mean"]
    assert kept["hash"] > kept["random"]


def test_the_default_overlay_is_refused_by_name(environments: Environments, tmp_path: Path) -> None:
    phases = {"none": [request(TARGETS[0], "refused")]}
    with pytest.raises(AssertionError, match="--hooks all"):
        run(environments.overlay, tmp_path / "refused", phases, {"GSAOnDevice": OPTIONS}, ROOMY)
