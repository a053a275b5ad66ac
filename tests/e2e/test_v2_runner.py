"""vLLM's V2 model runner, the default for all models from 0.29 on: hooks, connectors and methods on a real engine.

V2 is compared with V2 without the overlay, and with the V1 runner where vLLM itself generates the same tokens.
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.e2e.engine import run_engine, variables
from tests.e2e.model import LAYERS
from tests.e2e.processes import IN_PROCESS
from tests.e2e.runner_runs import ABORTED, AGAIN, BLENDED, CROWD, FULL, METHODS, ORDERED, SCENARIOS, SEEDED, V2, Runs
from ucm.sparse.base import Role
from ucm.sparse.probe import HOOKS, METADATA_RECEIVED, ProcessReport, read_reports
from ucm.sparse.topk.drafts import CUSTOM, DRAFTER

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.engines import Record
    from tests.e2e.scenarios import Environments

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

OVERLAID = [name for name, scenario in SCENARIOS.items() if scenario.overlay and scenario.v2]
CONNECTED = [name for name, scenario in SCENARIOS.items() if scenario.connector]
#: Scenarios that change no token.
EXACT = [name for name in OVERLAID if name not in METHODS]
#: Phases whose requests all fit into what every method reads.
WHOLE = ("short", "boundary", SEEDED)
STORED, LOADED = "vllm:external_prefix_cache_hits_total", "ucm:hit_tokens_total{tier=posix}"
PREEMPTIONS = "vllm:num_preemptions_total"

SCHEDULER = {
    "request_added",
    "limit_new_tokens",
    "before_allocation",
    "build_metadata",
    "request_preempted",
    "request_freed",
}
PER_STEP = {"update_states", "requests_added", "requests_updated"}
PER_LAYER = {f"{part}_{end}" for part in ("kv_write", "attention", "layer", "ffn") for end in ("begin", "finished")}
OTHERS = {"requests_finished", "append_block_ids", "execute_begin", "execute_finished"}
#: Hooks of the V1 runner, and of models with MLA.
ELSEWHERE = {"blocks_updated", "mla_begin", "mla_finished"}


@pytest.fixture(scope="module")
def v2(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    if not (environments.plain.site / "vllm" / "v1" / "worker" / "cpu" / "model_runner.py").exists():
        pytest.skip(f"vLLM {environments.release} has no V2 model runner for the CPU")
    return Runs(environments, tmp_path_factory.mktemp("v2"), SCENARIOS)


@pytest.fixture(scope="module")
def report(v2: Runs) -> ProcessReport:
    finished(v2, "Probe")
    (found,) = read_reports(v2.directory("Probe"))
    return found


def finished(v2: Runs, name: str) -> Record:
    record = v2[name]
    assert record.phases, record.log[-4000:]
    return record


def greedy(record: Record) -> dict[str, list[list[int]]]:
    return {phase: tokens for phase, tokens in record.tokens.items() if phase != SEEDED}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_runner_is_the_one_that_is_meant(v2: Runs, name: str) -> None:
    assert ("Using V2 Model Runner" in finished(v2, name).log) == SCENARIOS[name].v2


def test_vllm_s_runners_agree(v2: Runs) -> None:
    assert greedy(finished(v2, "V1")) == greedy(finished(v2, "plain"))


def test_the_phases_are_what_they_are_said_to_be(v2: Runs) -> None:
    phases = finished(v2, "plain").phases
    assert phases[CROWD].counters[PREEMPTIONS] > 0
    assert phases["prefix"].counters["vllm:prefix_cache_hits_total"] > 0
    assert len(phases[ABORTED].answers[2].tokens) < 60


@pytest.mark.parametrize("name", EXACT)
def test_tokens_are_those_of_plain_vllm(v2: Runs, name: str) -> None:
    assert finished(v2, name).tokens == finished(v2, "plain").tokens


@pytest.mark.parametrize("name", CONNECTED)
def test_loaded_kv_changes_no_token(v2: Runs, name: str) -> None:
    record, plain = finished(v2, name), finished(v2, "plain").tokens
    assert {phase: played.tokens for phase, played in record.again.items()} == {phase: plain[phase] for phase in AGAIN}
    for phase in ("chunked", "prefix"):
        rise = record.again[phase].counters
        assert rise[LOADED] == rise[STORED] > 0, phase
    assert record.again[CROWD].counters[PREEMPTIONS] > 0
    failed = {
        counter
        for played in (*record.phases.values(), *record.again.values())
        for counter, rise in played.counters.items()
        if rise and "failures_total" in counter
    }
    assert not failed


def test_chunks_are_found_and_blended(v2: Runs) -> None:
    """That this changes no token is seen above: no exact prefix of the prompt is known, and all is recomputed."""
    (answer,) = finished(v2, "blend").phases[ORDERED].answers
    assert answer.cached == BLENDED


def test_direct_and_layer_wise_find_the_same(v2: Runs) -> None:
    direct, layerwise, mock = (finished(v2, name).again for name in ("direct", "layer-wise", "mock"))
    for phase in ("chunked", "prefix"):
        found = [[answer.cached for answer in of[phase].answers] for of in (direct, layerwise)]
        assert found[0] == found[1]
        assert 0 < mock[phase].counters[LOADED] < direct[phase].counters[LOADED]


@pytest.mark.parametrize("name", METHODS)
def test_a_small_budget_leaves_out_the_same_with_either_runner(v2: Runs, name: str) -> None:
    """The scheduler decides the same for both, so their steps are the same; the restriction must be the same, too."""
    record, dense = finished(v2, name), finished(v2, "plain").tokens
    assert greedy(record) == greedy(finished(v2, f"{name} V1"))
    assert record.tokens["chunked"] != dense["chunked"], "nothing was left out"
    assert {phase: record.tokens[phase] for phase in WHOLE} == {phase: dense[phase] for phase in WHOLE}


def test_each_method_counts_what_it_left_out(v2: Runs) -> None:
    told = {name: finished(v2, name).log for name in METHODS}
    read, held = re.findall(r"BlockTopK restricted .*: (\d+) of (\d+) blocks read", told["BlockTopK"])[-1]
    assert 0 < int(read) < int(held)
    left, held = re.findall(r"SinkWindow left out (\d+) of (\d+) blocks", told["SinkWindow"])[-1]
    assert 0 < int(left) < int(held)
    read, held = re.findall(r"ESA restricted .*: (\d+) of (\d+) offloaded blocks read", told["ESA"])[-1]
    assert 0 < int(read) < int(held)
    assert re.search(r"ReRoPE put the attention of [1-9]\d* tokens together", told["ReRoPE"])


def test_with_a_full_budget_the_work_is_done(v2: Runs) -> None:
    """The tests above show that their tokens equal plain vLLM's; this one, that they did not silently run dense."""
    checked = finished(v2, "BlockTopK full").log
    assert re.search(r"CheckedTopK restricted \d+ decodes in 32 steps", checked)
    assert "stale" not in checked
    assert "AssertionError" not in checked
    read, held, fetched, stored = re.findall(
        r"ESA restricted .*: (\d+) of (\d+) offloaded blocks read, (\d+) fetched, (\d+) of them from the store",
        finished(v2, "ESA full").log,
    )[-1]
    assert int(read) == int(held) > 500
    assert int(fetched) == int(stored) > 50
    for name in ("SinkWindow", "ReRoPE"):
        assert f"[UCM.Sparse] {name} is active on the worker side" in finished(v2, f"{name} full").log
    assert set(FULL) == set(METHODS)


def test_vllm_refuses_sparse_drafts_by_name(v2: Runs, tmp_path: Path) -> None:
    """V2 knows no proposers of another package; whoever asks for it by its variable gets no V1."""
    environment = v2.environment("shipped", v2=True)
    engine = {
        "additional_config": {"ucm_sparse_config": {"SparseDrafts": {}}},
        "speculative_config": {"method": CUSTOM, "model": DRAFTER, "num_speculative_tokens": 4},
    }
    run = run_engine(environment, tmp_path, engine=engine, switches={**V2, **IN_PROCESS}, batches={})
    assert run.code != 0
    assert f"Model Runner V2 does not yet support: speculative method '{CUSTOM}'" in run.log


def test_every_hook_is_spoken_for() -> None:
    assert set(HOOKS) == SCHEDULER | PER_STEP | PER_LAYER | OTHERS | ELSEWHERE


def test_hooks_of_v2_fire_and_no_others(report: ProcessReport) -> None:
    fired = {name for name, count in report.counts.items() if count}
    assert fired == SCHEDULER | PER_STEP | PER_LAYER | OTHERS | {METADATA_RECEIVED}
    assert set(report.roles) == {Role.SCHEDULER, Role.WORKER}


def test_hooks_fire_as_often_as_they_must(v2: Runs, report: ProcessReport) -> None:
    counts, phases = report.counts, finished(v2, "Probe").phases
    requests = sum(len(played.requests) for played in phases.values())
    assert counts["request_added"] == counts["request_freed"] == requests
    assert counts["request_preempted"] == sum(played.counters[PREEMPTIONS] for played in phases.values())
    steps = counts["build_metadata"]
    assert {counts[name] for name in PER_STEP} == {counts[METADATA_RECEIVED]} == {steps}
    assert counts["append_block_ids"] >= requests
    assert counts["execute_begin"] == counts["execute_finished"]
    # A step without tokens, which only reports ended requests, runs no model.
    assert 0 < counts["execute_begin"] <= steps
    assert {name: counts[name] for name in PER_LAYER} == dict.fromkeys(PER_LAYER, LAYERS * counts["execute_begin"])


def test_doctor_sees_v2(v2: Runs, tmp_path: Path) -> None:
    python = v2.environment("shipped", v2=True).python
    command = [str(python), "-m", "ucm", "doctor", "--run", "--json", "--timeout", "400"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=variables(tmp_path, {**V2, **IN_PROCESS}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(done.stdout)["run"]
    assert run["saw"]["preemptions"] > 0
    expected = {hook["hook"] for hook in run["hooks"] if hook["expected"]}
    assert {"v2_requests_finished", "v2_execute_begin", "v2_execute_finished"} <= expected
