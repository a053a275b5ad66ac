"""Requests of many kinds get plain vLLM's answers, computed and after a hit: embeddings, pooling, adapters and more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.engine import MODEL
from tests.e2e.model import write_model
from tests.e2e.sparse_runs import run_script
from tests.e2e.workload import ENGINE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

Answers = dict[str, list[tuple[Any, int]]]
#: The tokens in full blocks of prompts of 40, 100 and 300 tokens.
ALL, NONE = [32, 96, 288], [0, 0, 0]


@pytest.fixture(scope="module")
def answers(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answers]:
    from tests.e2e.prefix_engine import connector, posix  # noqa: PLC0415 - needs the build's packages

    directory: Path = tmp_path_factory.mktemp("kinds")
    plain = {**ENGINE, "model": str(write_model(MODEL)), "skip_tokenizer_init": False}
    store = directory / "store"
    spec = {
        "model": plain["model"],
        "plain": plain,
        "ours": {**plain, **connector(posix(store), "UCMConnector")},
        "store": str(store),
        "adapters": str(directory / "adapters"),
    }
    found: dict[str, Answers] = run_script(environments.overlay, directory / "run", "request_kinds.py", spec)
    return found


def values(found: Answers) -> dict[str, list[Any]]:
    return {name: [value for value, _ in of_kind] for name, of_kind in found.items()}


def cached(found: Answers) -> dict[str, list[int]]:
    return {name: [count for _, count in of_kind] for name, of_kind in found.items()}


def test_each_kind_of_request_generates_what_plain_vllm_does(answers: dict[str, Answers]) -> None:
    plain, ours = answers["generating plain"], answers["generating ours"]
    assert values(ours) == values(plain)
    assert len(values(plain)) == 20
    assert values(plain)["embeddings"] != values(plain)["other embeddings"]


def test_what_shapes_the_kv_decides_over_hits(answers: dict[str, Answers]) -> None:
    hits = cached(answers["generating ours"])
    for name in ("embeddings", "other embeddings", "one salt", "another salt", "tokens"):
        assert (hits[name], hits[f"{name} again"]) == (NONE, ALL), name
    for name in ("not read from caches", "prompt logprobs"):
        assert (hits[name], hits[f"{name} again"]) == (NONE, NONE), name
    assert sum(hits["priorities again"]) > sum(cached(answers["generating plain"])["priorities again"])


def test_pooled_values_after_a_hit(answers: dict[str, Answers]) -> None:
    plain, ours = answers["pooling plain"], answers["pooling ours"]
    for name, expected in values(plain).items():
        for one, other in zip(values(ours)[name], expected, strict=True):
            assert one == pytest.approx(other, abs=1e-4) if name.startswith("embed") else len(one) == len(other)
            rows = zip(one, other, strict=True) if name.startswith("token") else ()
            assert all(row == pytest.approx(same, abs=1e-4) for row, same in rows), name
    assert cached(ours) == {"embed": NONE, "token_embed": NONE, "embed again": ALL, "token_embed again": NONE}


def test_an_adapter_with_other_weights_is_another_adapter(answers: dict[str, Answers]) -> None:
    plain, ours = answers["adapting plain"], answers["adapting ours"]
    assert values(ours) == values(plain)
    of_seed = [values(plain)[f"{seed} elsewhere"] for seed in (1, 2, 3)]
    assert of_seed[0] != of_seed[1] != of_seed[2] != of_seed[0]
    for name, tokens in values(ours).items():
        assert tokens == of_seed[int(name[0]) - 1], name
    hits = cached(ours)
    assert (hits["1"], hits["1 again"], hits["1 elsewhere"]) == (NONE, ALL, ALL)
    assert all(hits[name] == NONE for name in ("2 in place", "2 again", "3 anew", "3 again"))
