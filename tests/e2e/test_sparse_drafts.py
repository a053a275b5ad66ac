"""Drafts under a budget change no answer: real engines in float32, beside dense ones.

Alone, in a crowd with requests that end early, after hits in vLLM's own cache and in the connector's store, in chunks,
preempted, as the second turn of a conversation, up to the longest context. What the drafting engine has saved, an
engine without a method loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.engine import MODEL
from tests.e2e.model import write_model
from tests.e2e.sparse_runs import run_script
from tests.e2e.test_sparse_company import (
    ANSWER,
    LONGEST,
    OTHERS,
    ROOMY,
    TARGETS,
    TIGHT,
    TIGHT_PHASES,
    alone,
    crowd,
    prompt,
    request,
    second_turn,
    tokens,
)
from tests.e2e.workload import BLOCK, ENGINE
from ucm.sparse.topk.drafts import CUSTOM, DRAFTER

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.scenarios import Environments

pytestmark = pytest.mark.e2e

OPTIONS = {"token_budget": 256, "min_context": 0, "recent_tokens": 32, "dense_layers": 1, "drafting": "always"}
METHOD = {"SparseDrafts": OPTIONS}
SPECULATIVE = {"method": CUSTOM, "model": DRAFTER, "num_speculative_tokens": 4}
#: A request that reaches the longest context while another one runs, and one with probabilities that may stop.
EDGES = [
    request(prompt(LONGEST - 30, 3), "edges", 30),
    request(TARGETS[0], "edges", ANSWER, arrives=2),
    {**request(TARGETS[1], "edges"), "params": {"max_tokens": ANSWER, "temperature": 0.0, "logprobs": 1}},
]
#: Requests beside one that samples, which comes while their drafts wait to be verified.
SAMPLING = [
    *(request(tokens, "sampling") for tokens in TARGETS),
    {**request(TARGETS[0], "sampling", arrives=4), "params": {"max_tokens": ANSWER // 2, "temperature": 0.8}},
]


def phases(salt: str) -> dict[str, list[dict[str, Any]]]:
    """Return what both engines serve; what one of them has saved of a salt, the other finds."""
    leaving = [{**one, "ends": 5} if number > len(TARGETS) else one for number, one in enumerate(crowd(salt, 30))]
    return {
        **alone("alone", [request(tokens, salt) for tokens in TARGETS]),
        "again": [request(tokens, salt) for tokens in TARGETS],
        "crowd": [{**one, "salt": f"{salt} crowd"} for one in leaving],
        "second turn": [{**one, "salt": salt} for one in second_turn(salt, "again")],
        "edges": [{**one, "salt": f"{salt} edges"} for one in EDGES],
        "sampling": [{**one, "salt": f"{salt} sampling"} for one in SAMPLING],
    }


class Drafted:
    """The phases of an engine with drafts, of a small one, and of a dense one that shares their store."""

    def __init__(self, environments: Environments, directory: Path) -> None:
        def run(name: str, engine: dict[str, Any], phases: dict[str, Any], **settings: Any) -> dict[str, Any]:
            connector = {
                "kv_connector": "UCMConnector",
                "kv_role": "kv_both",
                "kv_connector_module_path": "ucm.integration.vllm.ucm_connector",
                "kv_connector_extra_config": {
                    "store": {"directories": [str(directory / "store")], "posix_capacity": "1GiB"},
                    **settings,
                },
            }
            usual = {
                **ENGINE,
                "model": str(write_model(MODEL)),
                "max_model_len": LONGEST,
                "hf_overrides": {"max_position_embeddings": LONGEST},
                "kv_transfer_config": connector,
            }
            spec = {"engine": {**usual, **engine}, "phases": phases}
            found: dict[str, Any] = run_script(environments.overlay, directory / name, "company.py", spec)
            return found

        drafts = {"speculative_config": SPECULATIVE}
        self.roomy = run("roomy", {**ROOMY, **drafts}, phases("ours"), ucm_sparse_config=METHOD)
        chunks = alone("chunks", [request(tokens, "chunks") for tokens in TARGETS])
        preempted = {"preempted": TIGHT_PHASES["preempted"]}
        layers = {"ucm_sparse_config": METHOD, "connector": "layerwise"}
        self.tight = run("tight", {**TIGHT, **drafts}, {**chunks, **preempted}, **layers)
        stored = {name: [request(tokens, name) for tokens in TARGETS] for name in ("ours", "chunks")}
        self.dense = run("dense", ROOMY, {**phases("theirs"), **stored})


@pytest.fixture(scope="module")
def drafted(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    return Drafted(environments, tmp_path_factory.mktemp("drafted"))


def answers(phases: dict[str, list[dict[str, Any]]], name: str = "alone") -> list[list[int]]:
    return [phases[f"{name} {number}"][0]["tokens"] for number in range(len(TARGETS))]


def test_alone_answers_are_dense_in_fewer_steps(drafted: Drafted) -> None:
    assert answers(drafted.roomy) == answers(drafted.dense)
    alone = [drafted.roomy[f"alone {number}"] for number in range(len(TARGETS))]
    assert all(about["drafted"] >= ANSWER for _, about in alone)
    assert sum(answer["steps"] for answer, _ in alone) < len(TARGETS) * ANSWER * 3 // 4


def test_in_a_crowd_with_requests_that_end_early(drafted: Drafted) -> None:
    assert tokens(drafted.roomy["crowd"]) == answers(drafted.dense)
    assert len(drafted.roomy["crowd"][len(TARGETS) + len(OTHERS) - 1]["tokens"]) < ANSWER


def test_after_hits_in_the_own_cache(drafted: Drafted) -> None:
    assert all(of["cached"] > 0 for of in drafted.roomy["again"][: len(TARGETS)])
    assert tokens(drafted.roomy["again"]) == answers(drafted.dense)


def test_in_chunks(drafted: Drafted) -> None:
    assert answers(drafted.tight, "chunks") == answers(drafted.dense)


def test_preempted(drafted: Drafted) -> None:
    assert drafted.tight["preempted"][-1]["preempted"] > 0
    assert tokens(drafted.tight["preempted"]) == answers(drafted.dense)


def test_a_second_turn_finds_generated_blocks(drafted: Drafted) -> None:
    found = drafted.roomy["second turn"]
    assert tokens(found) == tokens(drafted.dense["second turn"])
    for target, of in zip(TARGETS, found, strict=False):
        assert of["cached"] == (len(target) + ANSWER - 1) // BLOCK * BLOCK


def test_up_to_the_longest_context_and_with_probabilities(drafted: Drafted) -> None:
    ours, theirs = drafted.roomy["edges"], drafted.dense["edges"]
    assert [of["tokens"] for of in ours[:3]] == [of["tokens"] for of in theirs[:3]]
    assert len(ours[0]["tokens"]) == 30
    assert ours[2]["logprobs"] == pytest.approx(theirs[2]["logprobs"], abs=1e-4)
    assert len(ours[2]["logprobs"]) == len(ours[2]["tokens"]) > 1


def test_beside_a_request_that_samples(drafted: Drafted) -> None:
    """On a CPU, vLLM gives all requests with drafts wrong tokens then."""
    assert tokens(drafted.roomy["sampling"]) == answers(drafted.dense)
    assert drafted.roomy["sampling"][-1]["drafted"] > 0


@pytest.mark.parametrize("salt", ["ours", "chunks"])
def test_a_dense_engine_loads_what_was_saved(drafted: Drafted, salt: str) -> None:
    """Between steps, or layer by layer, where a draft step calls the connector again for each layer."""
    found = drafted.dense[salt][: len(TARGETS)]
    assert [of["cached"] for of in found] == [(len(of) - 1) // BLOCK * BLOCK for of in TARGETS]
    assert tokens(found) == answers(drafted.dense)
