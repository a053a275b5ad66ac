"""A trained model finds what is hidden in real text under the methods, in engines as in the judge of their choices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.e2e.judges.real import Item
    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

LENGTH, COUNT, BLOCK, BUDGET = 1_400, 3, 32, 320
#: The methods with what the judge calls them; what a step reads is about the same.
METHODS: dict[str, Mapping[str, Any] | None] = {
    "dense": None,
    "codes": {"BlockTopK": {"token_budget": BUDGET, "min_context": 0}},
    "ESA": {"ESA": {"token_budget": BUDGET, "window_tokens": 256}},
}
#: The judge rounds products with weights to bfloat16; the engine is in float32.
CLOSE = 0.2


@pytest.fixture(scope="module")
def passkeys(environments: Environments) -> list[Item]:
    from tests.e2e.judges.real import ONE, items  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.real.model import real_model  # noqa: PLC0415

    return items(environments.plain.python, real_model(), {(ONE, LENGTH): COUNT})


@pytest.fixture(scope="module")
def judged(environments: Environments, passkeys: list[Item]) -> dict[str, list[Any]]:
    from tests.e2e.judges.real import variants, verdicts_of  # noqa: PLC0415 - needs the build's packages

    shares = [BUDGET / LENGTH]
    asked = [(item, variants(len(item.prompt), BLOCK, shares, list(METHODS))) for item in passkeys]
    found: dict[str, list[Any]] = {name: [] for name in METHODS}
    for one in verdicts_of(environments.overlay.python, asked):
        found[one["name"]].append(one["tokens"])
    return found


@pytest.mark.parametrize("name", METHODS)
def test_passkeys_are_found_as_the_judge_says(
    environments: Environments, passkeys: list[Item], judged: dict[str, list[Any]], tmp_path: Path, name: str
) -> None:
    from tests.e2e.judges.engines import answered, engine  # noqa: PLC0415 - needs the build's packages

    method, arguments = METHODS[name], engine(LENGTH)
    if method is not None:
        offloaded = tmp_path / "offloaded"
        offloaded.mkdir(mode=0o700)
        store = {"store": {"pipeline": "Posix", "directories": [str(offloaded)]}} if name == "ESA" else {}
        arguments["additional_config"] = {
            "ucm_sparse_config": {of: {**options, **store} for of, options in method.items()}
        }
    found = answered(environments.overlay, tmp_path / "engine", arguments, [(item, None) for item in passkeys])
    for item, of_engine, of_judge in zip(passkeys, found, judged[name], strict=True):
        for begin, end in item.scored:
            assert all(said for _, said in of_engine["tokens"][begin:end]), "the engine finds the passkey"
            assert all(said for _, said in of_judge[begin:end]), "and so does the judge"
        apart = [abs(one[0] - two[0]) for one, two in zip(of_engine["tokens"], of_judge, strict=True)]
        assert max(apart[:1]) < CLOSE, "the first token of an answer, which is dense"
        assert sum(apart) / len(apart) < CLOSE


#: Ways to see distances: what differs in an engine, and the judge's arguments.
SHORT = {"window": 128, "training_length": 256}
ROPE = {"rope_type": "default", "rope_theta": 1e5}
DISTANCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "RoPE": ({}, {}),
    "NTK": ({"hf_overrides": {"rope_parameters": {**ROPE, "rope_theta": 2e5}, "rope_theta": 2e5}}, {"base": 2e5}),
    "YaRN": (
        {
            "hf_overrides": {
                "rope_parameters": {
                    **ROPE,
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 8192,
                }
            }
        },
        {"yarn": 2.0, "trained": 8192},
    ),
    "ReRoPE": ({"additional_config": {"ucm_sparse_config": {"ReRoPE": SHORT}}}, {"window": 128, "trained": 256}),
}


def test_text_is_as_likely_as_the_judge_says(environments: Environments, passkeys: list[Item], tmp_path: Path) -> None:
    """With each way to see distances; those beyond the trained length need no engine then."""
    from tests.e2e.judges.beyond import told  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.judges.engines import engine  # noqa: PLC0415
    from tests.e2e.sparse_runs import run_script  # noqa: PLC0415

    text, judged = passkeys[0].prompt[: LENGTH // 2], LENGTH // 4
    runs = [{"name": name, "way": way, "begin": 0, "end": len(text)} for name, (_, way) in DISTANCES.items()]
    losses = {one["name"]: one["losses"] for one in told(environments.overlay.python, text, runs, tmp_path / "judge")}
    spec = {
        "texts": [text],
        "answer": judged,
        "common": {**engine(LENGTH), "enable_prefix_caching": False, "skip_tokenizer_init": True},
        "engines": {name: arguments for name, (arguments, _) in DISTANCES.items()},
    }
    found = run_script(environments.overlay, tmp_path / "engines", "rerope_quality.py", spec)
    for name, [answer] in found.items():
        apart = {
            way: sum(abs(loss - other) for (loss, _), other in zip(answer, of[-judged:], strict=True)) / judged
            for way, of in losses.items()
        }
        assert apart[name] < CLOSE
        assert min(apart, key=lambda way: apart[way]) == name
