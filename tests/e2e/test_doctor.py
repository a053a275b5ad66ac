"""`ucm doctor --run` on a real vLLM: every expected hook fires, in the right process.

The overlay has only the hooks of shipped features; `test_hooks.py` runs the Probe with all hooks.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.scenarios import Runs

pytestmark = pytest.mark.e2e

SCHEDULER = {
    "before_allocation",
    "block_hash_function",
    "engine_core_started",
    "kv_cache_memory",
    "limit_new_tokens",
    "request_freed",
    "request_preempted",
    "scheduler_init",
    "scheduler_output_built",
}
WORKER = {
    "attention_begin",
    "attention_finished",
    "execute_begin",
    "execute_finished",
    "scheduler_output fields",
    "update_states",
    "worker_init",
    "worker_requests_finished",
}
LEFT_OUT = {"request_added", "blocks_updated", "ffn_begin", "kv_write_begin", "layer_begin", "mla_begin"}


@pytest.fixture(scope="module")
def answer(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(str(runs.environments.overlay.python), tmp_path_factory.mktemp("doctor"))


def run(python: str, directory: Path) -> dict[str, Any]:
    command = [python, "-m", "ucm", "doctor", "--run", "--json", "--timeout", "400"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fired(answer: dict[str, Any], role: str) -> set[str]:
    hooks = [hook for hook in answer["run"]["hooks"] if hook["role"] == role and hook["fired"]]
    return {hook["hook"] for hook in hooks if all(hook["fired"].values())}


def test_every_expected_hook_fired(answer: dict[str, Any]) -> None:
    expected = {hook["hook"] for hook in answer["run"]["hooks"] if hook["expected"]}
    assert expected == SCHEDULER | WORKER
    assert fired(answer, "scheduler") == SCHEDULER
    assert fired(answer, "worker") == WORKER


def test_what_the_overlay_was_built_without_is_said(answer: dict[str, Any]) -> None:
    reasons = {hook["hook"]: hook["reason"] for hook in answer["run"]["hooks"]}
    assert {name for name, reason in reasons.items() if "was built without it" in (reason or "")} >= LEFT_OUT


def test_the_run_had_what_it_was_made_for(answer: dict[str, Any]) -> None:
    saw = answer["run"]["saw"]
    assert saw["requests"] == 7
    assert saw["preemptions"] > 0
    assert saw["prefix_hit_tokens"] > 0


def test_each_side_has_its_process(answer: dict[str, Any]) -> None:
    roles = {process["process"]: process["roles"] for process in answer["run"]["processes"]}
    assert sorted(roles.values()) == [["scheduler"], ["worker"]]
    assert "MainProcess" not in roles


def test_the_metadata_of_every_step_arrived(answer: dict[str, Any]) -> None:
    counts = {process["roles"][0]: process["counts"] for process in answer["run"]["processes"]}
    assert counts["worker"]["metadata_received"] == counts["scheduler"]["build_metadata"]
