"""`ucm sparse probe` on a real engine: its output, and its errors if it cannot measure."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.e2e.model import MAX_LENGTH, write_model
from tests.e2e.prefix_workload import prompt
from tests.e2e.workload import BLOCK

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

ENGINE = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": BLOCK, "max_model_len": MAX_LENGTH}
LENGTHS = (MAX_LENGTH // 2, MAX_LENGTH - 40)
TOKENS = 17


def probe(environment: Environment, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    from tests.e2e.engine import MODEL, variables  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415 - needs the build's packages

    lengths = (*LENGTHS, MAX_LENGTH)  # the last one leaves no room for a token
    lines = [json.dumps({"prompt_token_ids": prompt(length, f"probe {length}")}) for length in lengths]
    (directory / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return subprocess.run(
        [
            *(environment.python, "-m", "ucm", "sparse", "probe", "--prompts", "prompts.jsonl"),
            *(
                "--model",
                str(write_model(MODEL)),
                "--max-tokens",
                str(TOKENS),
                "--engine-args",
                json.dumps(ENGINE),
                *arguments,
            ),
        ],
        env=variables(directory, {"PYTHONPATH": "", **IN_PROCESS}),
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_measures_every_layer(environments: Environments, tmp_path: Path) -> None:
    done = probe(environments.overlay, tmp_path, "--json", "--every", "2", "--budgets", "0.5", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["prompts"], found["skipped"]) == (len(LENGTHS), 1)
    # The prompt's step samples the first token; both requests decode the others together.
    assert found["lengths"] == [LENGTHS[0] + 2, LENGTHS[1] + TOKENS - 1]
    assert [name.split(".")[2] for name in found["layers"]] == ["0", "1", "2", "3"]
    for layer in found["layers"].values():
        assert layer["samples"] == len(LENGTHS) * (TOKENS - 1) // 2
        assert list(layer["kept"]) == ["0.5"]  # a budget of the whole context leaves nothing to choose
        kept = layer["kept"]["0.5"]
        assert list(kept) == ["oracle", "codes", "mean", "random"]
        assert max(kept.values()) == kept["oracle"] < 1
        assert 0 < kept["random"] < kept["oracle"]
        assert layer["needed"]["0.9"] < layer["needed"]["0.99"] <= layer["worst"]["0.99"] <= 1


def test_without_the_overlay_it_says_so(environments: Environments, tmp_path: Path) -> None:
    done = probe(environments.runtime, tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the overlay is not active in this environment" in done.stderr
    assert "Traceback" not in done.stderr
