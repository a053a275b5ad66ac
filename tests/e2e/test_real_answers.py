"""A trained model finds what is hidden in real text under the methods, in engines as in the judge of their choices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.sparse_runs import run_script

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.e2e.judges.real import Item
    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

LENGTH, COUNT, BLOCK, BUDGET = 1_400, 3, 32, 320
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": LENGTH + 2 * BLOCK,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 1,
    "num_gpu_blocks_override": LENGTH // BLOCK + 8,
    "enforce_eager": True,
}
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
    from tests.e2e.judges.real import prefills, verdicts_of  # noqa: PLC0415 - needs the build's packages

    shares = [BUDGET / LENGTH]
    asked = [(item, prefills(len(item.prompt), BLOCK, shares, list(METHODS))) for item in passkeys]
    found: dict[str, list[Any]] = {name: [] for name in METHODS}
    for one in verdicts_of(environments.overlay.python, asked):
        found[one["name"]].append(one["tokens"])
    return found


@pytest.mark.parametrize("name", METHODS)
def test_passkeys_are_found_as_the_judge_says(
    environments: Environments, passkeys: list[Item], judged: dict[str, list[Any]], tmp_path: Path, name: str
) -> None:
    from tests.e2e.real.model import real_model  # noqa: PLC0415 - needs the build's packages

    method = METHODS[name]
    engine = {**ENGINE, "model": str(real_model())}
    if method is not None:
        offloaded = tmp_path / "offloaded"
        offloaded.mkdir(mode=0o700)
        store = {"store": {"pipeline": "Posix", "directories": [str(offloaded)]}} if name == "ESA" else {}
        engine["additional_config"] = {
            "ucm_sparse_config": {of: {**options, **store} for of, options in method.items()}
        }
    spec = {"engine": engine, "items": [[item.prompt, item.answer] for item in passkeys]}
    found = run_script(environments.overlay, tmp_path / "engine", "forced.py", spec, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    for item, of_engine, of_judge in zip(passkeys, found, judged[name], strict=True):
        for begin, end in item.scored:
            assert all(said for _, said in of_engine["tokens"][begin:end]), "the engine finds the passkey"
            assert all(said for _, said in of_judge[begin:end]), "and so does the judge"
        apart = [abs(one[0] - two[0]) for one, two in zip(of_engine["tokens"], of_judge, strict=True)]
        assert max(apart[:1]) < CLOSE, "the first token of an answer, which is dense"
        assert sum(apart) / len(apart) < CLOSE
