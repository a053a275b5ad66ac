"""A request gets the same answer whatever other requests run: with every method, in real engines, in float32.

Alone, in a random crowd, after hits in vLLM's own cache and in the connector's store, in other chunks, preempted, as
the second turn of a conversation, and with two ranks. Each method has two engines in one process, and one with two
ranks. Variants of a method differ in our code and not in what they need of vLLM: they run on the newest release only.
So do two ranks: a rank is a worker as any other, with its heads.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.engine import MODEL
from tests.e2e.model import VOCABULARY, write_model
from tests.e2e.sparse_runs import run_script
from tests.e2e.workload import BLOCK, ENGINE
from ucm.integration.vllm.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.e2e.scenarios import Environments

pytestmark = pytest.mark.e2e

LONGEST = 1024
ANSWER = 40
METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "GSAOnDevice": {
        "GSAOnDevice": {"token_budget": 192, "min_context": 0, "sink_tokens": 4, "recent_tokens": 32, "dense_layers": 1}
    },
    "GSAOnDevice, a share": {
        "GSAOnDevice": {
            "token_budget": 192,
            "min_context": 0,
            "budget_share": 0.4,
            "sink_tokens": 4,
            "recent_tokens": 32,
            "dense_layers": 1,
        }
    },
    "ESA": {"ESA": {"token_budget": 128, "sink_tokens": 4, "window_tokens": 60}},
    "SinkWindow": {"SinkWindow": {"sink_tokens": 4, "window_tokens": 100}},
    "LeakyReRoPE": {"LeakyReRoPE": {"window": 150, "leak": 4.0, "training_length": 200}},
    "ReRoPE": {"ReRoPE": {"window": 150}},
    "SinkWindow, dense prompts": {"SinkWindow": {"sink_tokens": 4, "window_tokens": 100, "prefill": "dense"}},
}
#: The variants that run on all releases, one of each method.
EVERYWHERE = ("GSAOnDevice, a share", "ESA", "SinkWindow", "LeakyReRoPE")
TOP_K = ("GSAOnDevice", "GSAOnDevice, a share")
#: Methods that support per-request settings; the others ignore them.
STEERED = (*TOP_K, "SinkWindow, dense prompts")
#: The targets' own settings: dense, a budget, none, and an invalid one.
ASKED = (False, '{"token_budget": 160}', None, "nonsense")
REROPE_TOKENS = "ucm:sparse_rerope_tokens_total"
#: The arguments of `inside/rerope_reference.py` for a method.
REFERENCES = {name: METHODS[name][name] for name in ("LeakyReRoPE", "ReRoPE")}
#: Chunks of eight tiles and blocks for all; chunks of less than a tile and so few blocks that requests are preempted.
ROOMY = {"max_num_batched_tokens": 1024, "num_gpu_blocks_override": 600}
TIGHT = {"max_num_batched_tokens": 100, "num_gpu_blocks_override": LONGEST // BLOCK + 6}


def prompt(length: int, seed: int) -> list[int]:
    source = random.Random(f"company {seed}")  # noqa: S311 - prompts, no secrets
    return [source.randrange(3, VOCABULARY) for _ in range(length)]


def request(tokens: list[int], salt: str, count: int = ANSWER, asked: Any = None, **about: Any) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}
    if asked is not None:
        params["extra_args"] = {"ucm_sparse": asked}
    return {"prompt": tokens, "salt": salt, "params": params, **about}


#: Requests that grow until others are preempted.
GROWING = [request(prompt(30, 50 + number), "tight", 300) for number in range(6)]
#: One of full blocks, one that ends with a tile, and others.
TARGETS = [prompt(length, length) for length in (480, 640, 555, 901)]
OTHERS = [prompt(length, length) for length in (30, 700, 333, 129, 512)]


def crowd(salt: str, spread: int, asked: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Return the targets with their settings, then others; all arrive at random times."""
    source = random.Random(f"crowd {salt}")  # noqa: S311 - no secret
    steered = [*asked, *[None] * len(TARGETS + OTHERS)]
    return [
        request(tokens, salt, asked=of, arrives=source.randrange(spread))
        for tokens, of in zip(TARGETS + OTHERS, steered, strict=False)
    ]


def second_turn(salt: str, first: str) -> list[dict[str, Any]]:
    return [request(prompt(70, 7), salt, continues=[first, number]) for number in range(len(TARGETS))]


def alone(name: str, requests: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return one phase per request."""
    return {f"{name} {number}": [one] for number, one in enumerate(requests)}


ROOMY_PHASES = {
    **alone("alone", [request(tokens, "alone") for tokens in TARGETS]),
    "crowd": crowd("crowd", 30),
    **alone("steered alone", [request(of, "steered", asked=ask) for of, ask in zip(TARGETS, ASKED, strict=True)]),
    "steered crowd": crowd("steered crowd", 30, ASKED),
    "all read": [request(TARGETS[0], "all read", asked={"token_budget": 4 * LONGEST})],
    "warm": [request([*tokens[: len(tokens) * 2 // 3], *prompt(50, 9)], "hit") for tokens in TARGETS],
    "hit": [request(tokens, "hit") for tokens in TARGETS],
    "first turn": [request(tokens, "turns") for tokens in TARGETS],
    "second turn": second_turn("turns", "first turn"),
    "second turn, nothing found": second_turn("fresh", "first turn"),
}
TIGHT_PHASES = {
    "stored": [request(tokens, "alone") for tokens in TARGETS[:2]],
    **alone("in chunks", [request(tokens, "chunks") for tokens in TARGETS]),
    "preempted": [*(request(tokens, "tight", arrives=20 + 60 * n) for n, tokens in enumerate(TARGETS)), *GROWING],
}
#: Drafts of which some tokens are right, see `inside/drafts.py`. The method does not know how they were made.
DRAFTS = {"method": "custom_class", "model": "drafts.Known", "num_speculative_tokens": 5}
DRAFTED_PHASES = {
    **alone("alone", [request(tokens, "alone") for tokens in TARGETS]),
    "crowd": crowd("crowd", 30),
    "preempted": TIGHT_PHASES["preempted"],
}


class Company:
    """The results of one method's engines."""

    def __init__(self, environments: Environments, directory: Path, method: str) -> None:
        directory.mkdir()
        self.method = method
        self._environments, self._directory = environments, directory
        connector = {
            "kv_connector": "UCMConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "ucm.integration.vllm.ucm_connector",
            "kv_connector_extra_config": {
                "store": {"directories": [str(directory / "store")], "posix_capacity": "1GiB"},
                "ucm_sparse_config": METHODS[method],
            },
        }
        self._engine = {
            **ENGINE,
            "model": str(write_model(MODEL)),
            "max_model_len": LONGEST,
            "hf_overrides": {"max_position_embeddings": LONGEST},
            "kv_transfer_config": connector,
        }
        self.roomy = self.run("roomy", ROOMY, ROOMY_PHASES)
        self.tight = self.run("tight", TIGHT, TIGHT_PHASES)

    def run(
        self, name: str, engine: dict[str, Any], phases: dict[str, Any], **switches: str
    ) -> dict[str, list[dict[str, Any]]]:
        specification = {"engine": {**self._engine, **engine}, "phases": phases}
        found: dict[str, list[dict[str, Any]]] = run_script(
            self._environments.overlay,
            self._directory / name,
            "company.py",
            specification,
            VLLM_ENABLE_V1_MULTIPROCESSING="0" if engine.get("tensor_parallel_size", 1) == 1 else "1",
            **switches,
        )
        return found

    @property
    def answers(self) -> list[list[int]]:
        """The answer to each target when it is alone."""
        return [self.roomy[f"alone {number}"][0]["tokens"] for number in range(len(TARGETS))]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in EVERYWHERE else pytest.mark.newest_only, id=name) for name in METHODS
    ],
)
def company(
    environments: Environments, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Company:
    return Company(environments, tmp_path_factory.mktemp("company") / "engines", request.param)


@pytest.fixture(scope="module")
def two_ranks(company: Company) -> list[list[int]]:
    """The answers of an engine with two ranks."""
    phases = {"targets": [request(of, "ranks") for of in TARGETS]}
    found = company.run("ranks", {**ROOMY, "tensor_parallel_size": 2}, phases)
    return tokens(found["targets"])


@pytest.fixture(scope="module")
def drafted(company: Company, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What an engine with speculative decoding answers."""
    if company.method == "ESA" or company.method not in EVERYWHERE:
        pytest.skip("ESA refuses drafts; of the other methods, one variant runs with them")
    texts = tmp_path_factory.mktemp("drafts") / "texts.json"
    known = [[*of, *answer] for of, answer in zip(TARGETS, company.answers, strict=True)]
    texts.write_text(json.dumps(known), encoding="utf-8")
    engine = {**TIGHT, "speculative_config": DRAFTS}
    return company.run("drafted", engine, DRAFTED_PHASES, UCM_TEST_DRAFTS=str(texts))


def test_as_the_reference(company: Company, environments: Environments, tmp_path: Path) -> None:
    """Methods with a reference in plain torch, without cache and chunks, equal it; those of other methods differ."""
    if company.method not in REFERENCES:
        pytest.skip("it has no reference here")
    different = [way for name, way in REFERENCES.items() if name != company.method]
    ways: list[dict[str, Any]] = [REFERENCES[company.method], {}, *different]
    spec = {"model": str(write_model(MODEL)), "ways": ways, "prompts": TARGETS, "count": ANSWER}
    found, *others = run_script(environments.plain, tmp_path / "reference", "rerope_reference.py", spec)
    assert company.answers == found
    assert all(answer not in other for other in others for answer in found)


def tokens(phase: list[dict[str, Any]]) -> list[list[int]]:
    return [of["tokens"] for of in phase[: len(TARGETS)]]


def test_in_a_crowd(company: Company) -> None:
    assert tokens(company.roomy["crowd"]) == company.answers


@pytest.mark.newest_only
def test_with_drafts(drafted: dict[str, list[dict[str, Any]]], company: Company) -> None:
    """A draft that is right saves a step, and one that is wrong leaves nothing behind."""
    alone = [drafted[f"alone {number}"] for number in range(len(TARGETS))]
    for found in (*(answer for answer, _ in alone), *drafted["crowd"][: len(TARGETS)]):
        assert 7 < found["steps"] < ANSWER * 3 // 4
    right = sum(len(answer["tokens"]) - answer["steps"] for answer, _ in alone)
    assert right < sum(about["drafted"] for _, about in alone) * 3 // 4
    assert [answer["tokens"] for answer, _ in alone] == company.answers
    assert tokens(drafted["crowd"]) == company.answers
    assert tokens(drafted["preempted"]) == company.answers
    assert drafted["preempted"][-1]["preempted"]


def test_each_request_is_served_as_it_asks(company: Company) -> None:
    """In a crowd as well as alone; a dense one reads as much as with a budget for its whole context."""
    alone = [company.roomy[f"steered alone {number}"][0]["tokens"] for number in range(len(TARGETS))]
    assert tokens(company.roomy["steered crowd"]) == alone
    assert alone[2] == company.answers[2]
    if company.method in STEERED:
        assert alone[0] != company.answers[0]
        assert alone[3] != company.answers[3]
        assert alone[0] == company.roomy["all read"][0]["tokens"]
    else:
        assert alone == company.answers
    assert (alone[1] != company.answers[1]) == (company.method in STEERED)


def test_what_is_left_out_and_who_is_dense_is_exported(company: Company) -> None:
    (found,) = company.roomy["exported"]
    assert {name.partition(".")[0] for name in found} == {name for name in METRICS if name.startswith("ucm:sparse_")}
    merged = {name: value for name, value in found.items() if name.startswith("ucm:sparse_rerope_")}
    if company.method.endswith("ReRoPE"):  # it reads everything; with other engines in the process, nothing is compiled
        assert {name for name, value in found.items() if value} == merged.keys() - {f"{REROPE_TOKENS}.compiled"}
        assert found["ucm:sparse_rerope_rows_total"] <= found[f"{REROPE_TOKENS}.torch"]
        return
    assert not any(merged.values())
    assert found["ucm:sparse_rows_total"] > 0
    assert 0 < found["ucm:sparse_read_tokens_total"] < found["ucm:sparse_held_tokens_total"]
    # Alone and in the crowd; for a window method, a budget is as invalid as the nonsense, even if everything is read.
    top_k = company.method in TOP_K
    opted_out, refused = (2, 2) if top_k else {"SinkWindow, dense prompts": (2, 5)}.get(company.method, (0, 0))
    assert found["ucm:sparse_requests_total.opted_out"] == opted_out
    assert found["ucm:sparse_requests_total.refused"] == refused
    assert found["ucm:sparse_requests_total.failed"] == 0
    assert found["ucm:sparse_requests_total.out_of_memory"] == 0
    assert found["ucm:sparse_requests_total.restricted"] > 0
    assert found["ucm:sparse_requests_total.short"] > 0
    samples, kept = found["ucm:sparse_attention_samples_total"], found["ucm:sparse_attention_kept_total"]
    assert (samples > 0) == top_k
    assert 0 <= kept <= samples
    assert (found["ucm:sparse_fetched_blocks_total"] > 0) == company.method.startswith("ESA")
    assert found["ucm:sparse_lost_blocks_total"] == 0


def test_after_a_hit_of_the_engines_own_cache(company: Company) -> None:
    assert all(of["cached"] > 0 for of in company.roomy["hit"][: len(TARGETS)])
    assert tokens(company.roomy["hit"]) == company.answers


def test_after_a_hit_of_the_store(company: Company) -> None:
    found = company.tight["stored"][:2]
    assert [of["tokens"] for of in found] == company.answers[:2]
    assert all(of["cached"] > 0 for of in found)


def test_in_other_chunks(company: Company) -> None:
    found = [company.tight[f"in chunks {number}"][0]["tokens"] for number in range(len(TARGETS))]
    assert found == company.answers


def test_preempted(company: Company) -> None:
    assert company.tight["preempted"][-1]["preempted"] > 0
    assert tokens(company.tight["preempted"]) == company.answers


def test_a_second_turn_does_not_depend_on_what_is_found_of_the_first(company: Company) -> None:
    found, fresh = (company.roomy[name] for name in ("second turn", "second turn, nothing found"))
    assert tokens(company.roomy["first turn"]) == company.answers
    assert all(of["cached"] > 0 for of in found[: len(TARGETS)])
    assert all(of["cached"] == 0 for of in fresh[: len(TARGETS)])
    assert tokens(found) == tokens(fresh)


@pytest.mark.newest_only
def test_with_two_ranks(company: Company, two_ranks: list[list[int]]) -> None:
    assert two_ranks == company.answers
