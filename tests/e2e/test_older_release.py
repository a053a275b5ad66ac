"""Tests for releases that are not run in every session: `nox -s e2e -- 0.16.0 0.12.0`.

Tokens with each connector and method, like `test_v2_runner.py` on the newest release, and `ucm doctor --run`.
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.e2e.engine import variables
from tests.e2e.runner_runs import AGAIN, BLENDED, CROWD, METHODS, ORDERED, V1_SCENARIOS, Runs
from tests.e2e.test_ranks import TwoWorkers, changed_in_one_worker
from tests.e2e.test_v2_runner import CONNECTED, LOADED, PREEMPTIONS, STORED, WHOLE, finished
from ucm.engine_process import MODEL

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.older]


@pytest.fixture(scope="module")
def older(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(environments, tmp_path_factory.mktemp("older"), V1_SCENARIOS)


@pytest.mark.parametrize("name", [name for name in V1_SCENARIOS if name not in METHODS])
def test_tokens_are_those_of_plain_vllm(older: Runs, name: str) -> None:
    assert finished(older, name).tokens == finished(older, "plain").tokens


def test_requests_preempted_each_other(older: Runs) -> None:
    assert finished(older, "plain").phases[CROWD].counters[PREEMPTIONS] > 0


@pytest.mark.parametrize("name", CONNECTED)
def test_loaded_kv_changes_no_token(older: Runs, name: str) -> None:
    record, plain = finished(older, name), finished(older, "plain").tokens
    assert {phase: played.tokens for phase, played in record.again.items()} == {phase: plain[phase] for phase in AGAIN}
    for phase in ("chunked", "prefix"):
        assert record.again[phase].counters[STORED] > 0
        assert record.again[phase].counters.get(LOADED, record.again[phase].counters[STORED]) > 0


@pytest.mark.parametrize("name", METHODS)
def test_a_small_budget_leaves_something_out_where_it_must(older: Runs, name: str) -> None:
    record, dense = finished(older, name), finished(older, "plain").tokens
    assert record.tokens["chunked"] != dense["chunked"]
    assert {phase: record.tokens[phase] for phase in WHOLE} == {phase: dense[phase] for phase in WHOLE}
    assert re.search(r"\[UCM\.Sparse\] \w+ (restricted|left out|put the attention of) [1-9]", record.log)


def test_chunks_are_found_and_blended(older: Runs) -> None:
    """That this changes no token is seen above: no exact prefix of the prompt is known, and all is recomputed."""
    (answer,) = finished(older, "blend").phases[ORDERED].answers
    assert answer.cached == BLENDED


def test_nothing_is_saved_once_one_of_two_workers_has_changed_weights(
    environments: Environments, tmp_path: Path
) -> None:
    """Before 0.18.0 vLLM brings the scheduler no reports of workers; they agree through the staging memory."""
    changed_in_one_worker(TwoWorkers(environments.overlay, tmp_path))


def test_doctor_sees_the_hooks_fire(environments: Environments, tmp_path: Path) -> None:
    """In float16: where the processor has AMX, vLLM takes it for bfloat16, and 0.16.0 was built without its kernels."""
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "torch_dtype": "float16"}), encoding="utf-8")
    doctor = [str(environments.overlay.python), "-m", "ucm", "doctor"]
    command = [*doctor, "--run", "--json", "--timeout", "500", "--model", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=variables(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(done.stdout)["run"]
    assert {hook["status"] for hook in run["hooks"]} == {"ok", "not expected"}
    assert {role for process in run["processes"] for role in process["roles"]} == {"scheduler", "worker"}
