"""Requests of many kinds get plain vLLM's answers, computed and after a hit: embeddings, sounds, adapters and more."""

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
    from tests.e2e.prefix_models import AUDIO, NAME, SOUND, write_tiny_model  # noqa: PLC0415

    directory: Path = tmp_path_factory.mktemp("kinds")
    plain = {**ENGINE, "model": str(write_model(MODEL)), "skip_tokenizer_init": False}
    store = directory / "store"
    audio = {"model": str(write_tiny_model(environments.overlay, "audio", AUDIO)), "limit_mm_per_prompt": {"audio": 2}}
    spec = {
        "model": plain["model"],
        "plain": plain,
        "ours": {**plain, **connector(posix(store), "UCMConnector")},
        "adapters": str(directory / "adapters"),
        "engines": dict.fromkeys(("hearing", "hearing later", "hearing names", "hearing after"), audio),
        "name": NAME,
        "sound": SOUND,
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


def test_a_sound_is_what_the_model_hears_whatever_its_name(answers: dict[str, Answers]) -> None:
    plain, ours = answers["hearing plain"], answers["hearing ours"]
    assert values(ours) == values(plain)
    assert len({str(values(plain)[name]) for name in ("one", "other", "both", "turned")}) == 4
    hits = {name: counts[0] for name, counts in cached(ours).items()}
    assert (hits["one"], hits["one again"], hits["other again"], hits["named again"]) == (0, 128, 128, 128)
    assert hits["both again"] == hits["turned again"] == 192


def test_another_engine_does_not_take_a_sound_for_that_of_the_same_name(answers: dict[str, Answers]) -> None:
    plain, ours = answers["hearing later plain"], answers["hearing later ours"]
    assert values(ours) == values(plain)
    assert values(plain)["another under the name"] != values(plain)["one"]
    # The text before the sound is found, and the earlier engine's sound under no name as well.
    assert cached(ours) == {"another under the name": [64], "one": [128]}


def test_what_vllm_heard_under_a_name_that_was_given_twice_reaches_no_other_engine(answers: dict[str, Answers]) -> None:
    plain, ours = answers["hearing after plain"], answers["hearing after ours"]
    assert values(ours) == values(plain)
    assert values(plain)["4"] != values(plain)["5"]
    # Of the name's first sound, what was saved before it was given again; of the other one, the text before it.
    assert cached(ours) == {"4": [128], "5": [64]}


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
