"""The connector's assumptions beyond signatures: when vLLM calls it, and what vLLM has done by then.

Each test states one fact and the releases in which it holds. If a release breaks one, check the connector,
not only the test.
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.releases import REVIEWED
from tests.ucm.integration.vllm import published as vllm

every_release = pytest.mark.parametrize("release", REVIEWED)


def since(first: str, last: str = REVIEWED[-1]) -> list[str]:
    """Return the reviewed releases from one to another."""
    return list(REVIEWED[REVIEWED.index(first) : REVIEWED.index(last) + 1])


def schedule(release: str) -> ast.FunctionDef:
    return vllm.function(release, vllm.SCHEDULER, "Scheduler.schedule")


@pytest.mark.parametrize("release", since("0.13.0"))
def test_the_failure_policy_is_read_after_the_connector_was_constructed(release: str) -> None:
    """So the connector can set it."""
    node = vllm.function(release, vllm.SCHEDULER, "Scheduler.__init__")
    (construction,) = [c for c in vllm.calls(node, "create_connector") if "KVConnectorFactory" in ast.unparse(c.func)]
    policy = "kv_load_failure_policy"
    reads = [child.lineno for child in ast.walk(node) if isinstance(child, ast.Attribute) and child.attr == policy]
    assert reads
    assert construction.lineno < min(reads)


@pytest.mark.parametrize("release", since("0.9.0", "0.12.0"))
def test_there_is_no_failure_policy_yet(release: str) -> None:
    """Failed blocks are recomputed, if the failure is noticed at all."""
    tree = vllm.module(release, vllm.SCHEDULER)
    assert tree is not None
    assert "kv_load_failure_policy" not in ast.unparse(tree)


@every_release
def test_a_steps_plan_is_made_before_its_tokens_count_as_computed(release: str) -> None:
    """Otherwise the saves of a step would belong to the next one."""
    node = schedule(release)
    made = vllm.calls(node, "_build_kv_connector_meta") or vllm.calls(node, "build_connector_meta")
    counted = [c.lineno for c in vllm.calls(node, "_update_after_schedule")] + [
        child.lineno
        for child in ast.walk(node)
        if isinstance(child, ast.AugAssign) and re.match(r".*num_computed_tokens \+=", ast.unparse(child))
    ]
    assert len(counted) == 1
    assert made[0].lineno < counted[0]


@every_release
def test_the_lookup_is_asked_for_with_nothing_computed_and_before_the_allocation(release: str) -> None:
    """So the computed tokens at the lookup are still the same at the allocation."""
    node = schedule(release)
    (asked,) = vllm.calls(node, "get_num_new_matched_tokens")
    assert "request.num_computed_tokens == 0" in vllm.conditions(node, asked)
    allocation = vllm.calls(node, "allocate_slots")[-1]
    given = [c for c in vllm.calls(node, "update_state_after_alloc") if ast.unparse(c.func).startswith("self.conn")]
    assert len(given) == 1
    assert asked.lineno < allocation.lineno < given[0].lineno


@every_release
def test_every_admission_is_told(release: str) -> None:
    """With and without tokens to load; 0.9.0 reports only those with."""
    node = schedule(release)
    (told,) = (c for c in vllm.calls(node, "update_state_after_alloc") if ast.unparse(c.func).startswith("self.conn"))
    guard = vllm.conditions(node, told)[0]
    assert guard == ("num_external_computed_tokens" if release == "0.9.0" else guard)
    if release != "0.9.0":
        # 0.33.0 defers asynchronous loads of models with KV on the host; the ``else`` covers all others.
        assert "self.connector is not None" in vllm.conditions(node, told)
        assert not any("external" in condition for condition in vllm.conditions(node, told))


@every_release
def test_which_blocks_an_admission_is_told_of(release: str) -> None:
    """From 0.14.1 on, all of the request's blocks; before, only the new ones, so none of an earlier admission."""
    node = schedule(release)
    (told,) = (c for c in vllm.calls(node, "update_state_after_alloc") if ast.unparse(c.func).startswith("self.conn"))
    blocks = ast.unparse(told.args[1])
    if release in since("0.14.1"):
        assert blocks.startswith("self.kv_cache_manager.get_blocks(request")
    else:
        assert blocks == "new_computed_blocks + new_blocks"


@every_release
def test_new_requests_travel_with_all_their_blocks(release: str) -> None:
    assert "block_ids" in vllm.fields(release, vllm.OUTPUT, "NewRequestData")


@every_release
def test_a_finished_request_is_told_before_its_blocks_are_freed(release: str) -> None:
    node = vllm.function(release, vllm.SCHEDULER, "Scheduler._free_request")
    assert vllm.sequence(node, "_connector_finished", "_free_blocks") == ["_connector_finished", "_free_blocks"]


@pytest.mark.parametrize("release", since("0.11.1"))
def test_failures_reach_our_scheduler_side_before_the_next_step_is_planned(release: str) -> None:
    """vLLM first reduces the computed tokens, and notifies the connector at the end of the same update."""
    node = vllm.function(release, vllm.SCHEDULER, "Scheduler.update_from_output")
    names = ("_handle_invalid_blocks", "_update_request_with_output", "_update_from_kv_xfer_finished")
    assert vllm.sequence(node, *names) == list(names)
    told = vllm.function(release, vllm.SCHEDULER, "Scheduler._update_from_kv_xfer_finished")
    assert vllm.calls(told, "update_connector_output")


@pytest.mark.parametrize("release", since("0.9.0", "0.11.0"))
def test_failures_cannot_be_told(release: str) -> None:
    assert "get_block_ids_with_load_errors" not in vllm.methods(release, vllm.BASE, "KVConnectorBase_V1")


def worker_calls(release: str) -> list[str]:
    """Return the worker's calls in a step with the V1 runner."""
    names = ("bind_connector_metadata", "start_load_kv", "wait_for_save", "get_block_ids_with_load_errors")
    finished = ("get_finished", "get_transfer_results")
    if release in since("0.10.1.1"):
        node = vllm.function(release, vllm.MIXIN, "KVConnectorModelRunnerMixin._get_kv_connector_output")
        return vllm.sequence(node, *names, *finished, "clear_connector_metadata")
    node = vllm.function(release, vllm.RUNNER, "GPUModelRunner.maybe_setup_kv_connector")
    step = vllm.function(release, vllm.RUNNER, "GPUModelRunner.execute_model")
    inner = ("maybe_setup_kv_connector", "model", "maybe_wait_for_kv_save", "get_finished_kv_transfers")
    assert vllm.sequence(step, *inner) == list(inner)
    return [*vllm.sequence(node, *names), "wait_for_save", "get_finished"]


@every_release
def test_the_order_of_the_workers_calls(release: str) -> None:
    """From 0.29.0 on asynchronous loads start after the forward; where drafts follow it, saving waits for them."""
    found = worker_calls(release)
    results = "get_transfer_results" if release in since("0.30.0") else "get_finished"
    expected = ["bind_connector_metadata", "start_load_kv", "wait_for_save", results]
    if release in since("0.11.1"):
        expected.append("get_block_ids_with_load_errors")
    if release in since("0.10.1.1"):
        expected.append("clear_connector_metadata")
    assert found == expected


@pytest.mark.parametrize("release", since("0.29.0"))
def test_a_step_with_synchronous_loads_starts_them_before_the_forward(release: str) -> None:
    node = schedule(release)
    (mark,) = [
        child
        for child in ast.walk(node)
        if isinstance(child, ast.Assign) and ast.unparse(child) == "has_sync_kv_loads = True"
    ]
    assert "num_external_computed_tokens > 0" in vllm.conditions(node, mark)
    (first, *_) = vllm.calls(
        vllm.function(release, vllm.MIXIN, "KVConnectorModelRunnerMixin._get_kv_connector_output"), "start_load_kv"
    )
    before = vllm.function(release, vllm.MIXIN, "KVConnectorModelRunnerMixin._get_kv_connector_output")
    assert vllm.conditions(before, first) == ["not start_after_forward"]


@pytest.mark.parametrize("release", since("0.14.1"))
def test_the_v1_runner_announces_a_step_before_it_writes_anything(release: str) -> None:
    """Until 0.18.1 with the ids of preempted requests and only if there are any; then with the step's metadata."""
    node = vllm.function(release, vllm.RUNNER, "GPUModelRunner.execute_model")
    names = ("handle_preemptions", "_update_states", "_model_forward")
    assert vllm.sequence(node, *names)[:2] == list(names[:2])
    (announced,) = vllm.calls(node, "handle_preemptions")
    expected = "scheduler_output.preempted_req_ids" if release in since("0.14.1", "0.18.1") else "kv_connector_metadata"
    assert ast.unparse(announced.args[0]) == expected


@pytest.mark.parametrize("release", since("0.16.0"))
def test_the_v2_runner_announces_a_step_after_it_updated_its_requests(release: str) -> None:
    """It zeroes and copies blocks there, before calling the connector."""
    node = vllm.function(release, vllm.RUNNER_V2, "GPUModelRunner.execute_model")
    assert vllm.sequence(node, "update_requests", "pre_forward") == ["update_requests", "pre_forward"]


@pytest.mark.parametrize("release", since("0.30.0"))
def test_which_block_holds_a_state_is_told_for_whole_blocks_that_vllm_keeps(release: str) -> None:
    """With the end of its tokens: blocks of states move, so their places in a request's list say nothing."""
    node = vllm.function(release, "vllm/v1/core/single_type_kv_cache_manager.py", "MambaManager.cache_blocks")
    (told,) = [c for c in vllm.calls(node, "append") if "_pending_boundary_state_offloads" in ast.unparse(c.func)]
    assert ast.unparse(told.args[0]).endswith("block, block.block_hash_num_tokens)")
    plan = schedule(release)
    (taken,) = vllm.calls(plan, "take_boundary_state_offloads")
    (made,) = vllm.calls(plan, "_build_kv_connector_meta")
    assert vllm.calls(plan, "allocate_slots")[-1].lineno < taken.lineno < made.lineno


@pytest.mark.parametrize("release", since("0.30.0"))
def test_a_state_is_copied_before_loads_within_the_step_begin(release: str) -> None:
    """So a state must be loaded between steps."""
    node = vllm.function(release, vllm.RUNNER, "GPUModelRunner.execute_model")
    names = ("handle_preemptions", "_update_states", "preprocess_mamba", "maybe_get_kv_connector_output")
    assert vllm.sequence(node, *names) == list(names)


@pytest.mark.parametrize("release", since("0.17.1"))
def test_for_which_models_blocks_are_zeroed(release: str) -> None:
    """Mamba and, from 0.27.1 on, layers of several precisions: a save that ran on would read the zeros."""
    node = vllm.function(release, vllm.CONFIG, "KVCacheConfig.needs_kv_cache_zeroing")
    result = node.body[-1]
    assert isinstance(result, ast.Return)
    assert result.value is not None
    mixed = " or self.has_mixed_precision_kv_cache" if release in since("0.27.1") else ""
    assert ast.unparse(result.value) == "self.has_mamba_layers" + mixed


RECOVERY = "Scheduler._update_requests_with_invalid_blocks"


@pytest.mark.parametrize("release", since("0.11.1"))
def test_recovery_forgets_steps_in_flight(release: str) -> None:
    """Nothing marks the output of later steps as stale: with several batches in flight it is used."""
    text = ast.unparse(vllm.function(release, vllm.SCHEDULER, RECOVERY))
    text += ast.unparse(vllm.function(release, vllm.SCHEDULER, "Scheduler._handle_invalid_blocks"))
    assert not any(word in text for word in ("stale", "in_flight", "placeholders", "discard"))


@pytest.mark.parametrize("release", since("0.11.1"))
def test_recovery_leaves_failed_blocks_in_the_prefix_cache(release: str) -> None:
    """They are evicted only when the requests end: until they are recomputed, other requests may hit them."""
    node = vllm.function(release, vllm.SCHEDULER, "Scheduler._handle_invalid_blocks")
    for call in vllm.calls(node, "evict_blocks"):
        assert "sync_blocks_to_evict and (not self.recompute_kv_load_failures)" in vllm.conditions(node, call)


@pytest.mark.parametrize("release", since("0.11.1"))
def test_how_recovery_finds_the_loaded_tokens(release: str) -> None:
    """Until 0.18.1 by a number set at the first admission, so a resumed request is not recovered."""
    text = ast.unparse(vllm.function(release, vllm.SCHEDULER, RECOVERY))
    assert ("= request.num_cached_tokens" in text) == (release in since("0.11.1", "0.18.1"))


@pytest.mark.parametrize("release", since("0.16.0"))
def test_the_v2_runner_keeps_its_own_count_of_computed_tokens(release: str) -> None:
    """A reduction of a running request's computed tokens does not reach the device, so recovery cannot work."""
    node = vllm.function(release, vllm.RUNNER_V2, "GPUModelRunner.update_requests")
    assert not any("num_computed_tokens" in ast.unparse(call.func) for call in vllm.calls(node))
    text = ast.unparse(node)
    assert "num_computed_tokens.gpu" not in text
    assert "num_computed_tokens.stage" not in text


@pytest.mark.parametrize("release", since("0.16.0"))
def test_a_streaming_session_replaces_tokens_that_were_known(release: str) -> None:
    """A block whose last token was sampled but not computed gets another key, as in vLLM's hashes from 0.32.0 on."""
    text = ast.unparse(vllm.function(release, vllm.SCHEDULER, "Scheduler._update_request_as_session"))
    assert "del session._all_token_ids[" in text
    assert ("del session.block_hashes[" in text) == (release in since("0.32.0"))
    assert "resumable" in vllm.attributes(release, vllm.REQUEST, "Request")


@pytest.mark.parametrize("release", since("0.9.0", "0.11.0"))
def test_the_number_of_blocks_is_not_known_when_kv_caches_are_registered(release: str) -> None:
    """vLLM sets it in the configuration once all workers have their KV caches."""
    node = vllm.function(release, vllm.ENGINE, "EngineCore.__init__")
    (initialised,) = vllm.calls(node, "_initialize_kv_caches")
    assert initialised.lineno < vllm.line_of(node, "vllm_config.cache_config.num_gpu_blocks = num_gpu_blocks")


@pytest.mark.parametrize("release", since("0.9.1", "0.11.0"))
def test_a_ranks_tensors_may_have_more_blocks_than_are_used(release: str) -> None:
    """With several ranks the smallest number is used; only from 0.11.1 on the other ranks' tensors shrink to it."""
    tree = vllm.module(release, "vllm/v1/core/kv_cache_utils.py")
    assert tree is not None
    text = ast.unparse(tree)
    assert "kv_cache_config.num_blocks = min_num_blocks" in text
    assert "tensor.size = tensor.size //" not in text
