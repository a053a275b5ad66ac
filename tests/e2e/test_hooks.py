"""Every hook of the V1 CPU path, including opt-in ones, fires in its process as often as expected."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from tests.e2e.model import LAYERS
from tests.e2e.workload import phases
from ucm.sparse.base import Role
from ucm.sparse.probe import HOOKS, METADATA_RECEIVED, ProcessReport, read_reports

if TYPE_CHECKING:
    from tests.e2e.scenarios import Runs

pytestmark = [pytest.mark.e2e, pytest.mark.core]

IN_ENGINE_CORE = {
    "request_added",
    "limit_new_tokens",
    "before_allocation",
    "build_metadata",
    "request_preempted",
    "request_freed",
}
PER_STEP = {"update_states", "requests_finished", "blocks_updated", "execute_begin", "execute_finished"}
PER_LAYER = {
    f"{part}_{end}"
    for part, ends in (
        ("kv_write", ("begin", "finished")),
        ("attention", ("begin", "finished")),
        ("layer", ("begin", "finished")),
        ("ffn", ("begin", "finished")),
    )
    for end in ends
}
#: Hooks of the V2 runner (`test_v2_runner.py`), and of models with MLA.
ELSEWHERE = {"requests_added", "requests_updated", "append_block_ids", "mla_begin", "mla_finished"}
NUM_REQUESTS = sum(len(list(itertools.chain(*batches))) for batches in phases().values())


@pytest.fixture(scope="module")
def reports(runs: Runs) -> dict[Role, ProcessReport]:
    assert runs["probe"].code == 0, runs["probe"].log[-4000:]
    return {report.roles[0]: report for report in read_reports(runs.directory("probe") / "probe")}


def test_every_hook_is_spoken_for() -> None:
    assert set(HOOKS) == IN_ENGINE_CORE | PER_STEP | PER_LAYER | ELSEWHERE


def test_each_side_runs_in_its_process(reports: dict[Role, ProcessReport]) -> None:
    assert set(reports) == {Role.SCHEDULER, Role.WORKER}
    assert reports[Role.SCHEDULER].process.startswith("EngineCore")
    assert "Worker" in reports[Role.WORKER].process
    assert all(report.roles == (role,) for role, report in reports.items())


def test_hooks_fire_where_they_belong_and_nowhere_else(reports: dict[Role, ProcessReport]) -> None:
    fired = {role: {name for name, count in report.counts.items() if count} for role, report in reports.items()}
    assert fired[Role.SCHEDULER] == IN_ENGINE_CORE
    assert fired[Role.WORKER] == PER_STEP | PER_LAYER | {METADATA_RECEIVED}


def test_scheduler_hooks_count_what_the_engine_counts(runs: Runs, reports: dict[Role, ProcessReport]) -> None:
    counts = reports[Role.SCHEDULER].counts
    assert counts["request_added"] == counts["request_freed"] == NUM_REQUESTS
    preemptions = sum(phase["counters"]["vllm:num_preemptions"] for phase in runs["probe"].phases.values())
    assert counts["request_preempted"] == preemptions


def test_fields_of_the_step_reach_the_worker(reports: dict[Role, ProcessReport]) -> None:
    steps = reports[Role.SCHEDULER].counts["build_metadata"]
    worker = reports[Role.WORKER].counts
    assert worker["update_states"] == worker[METADATA_RECEIVED] == steps > 0


def test_model_hooks_fire_once_per_layer_and_forward(reports: dict[Role, ProcessReport]) -> None:
    counts = reports[Role.WORKER].counts
    assert counts["execute_begin"] == counts["execute_finished"] > 0
    assert {name: counts[name] for name in PER_LAYER} == dict.fromkeys(PER_LAYER, LAYERS * counts["execute_begin"])
