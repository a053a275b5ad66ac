"""What sparse drafts touch of vLLM, read from the published sources of every release that loads proposers by class."""

from __future__ import annotations

import ast

import pytest

from tests.releases import REVIEWED
from tests.ucm.integration.vllm import published as vllm

#: The releases whose V1 runner loads a proposer by its class.
SERVED = tuple(release for release in REVIEWED if vllm.module(release, "vllm/v1/spec_decode/custom_class_proposer.py"))
METADATA = "vllm/v1/attention/backend.py"
FORWARD = "vllm/forward_context.py"
GROUPS = "vllm/v1/worker/utils.py"
TABLE = "vllm/v1/worker/block_table.py"


def text(release: str, path: str, qualified: str) -> str:
    return ast.unparse(vllm.function(release, path, qualified))


def test_they_are_the_releases_that_the_docs_name() -> None:
    assert REVIEWED[REVIEWED.index("0.22.1") :] == SERVED


@pytest.mark.parametrize("release", SERVED)
def test_the_runner_asks_the_proposer_with_what_it_takes(release: str) -> None:
    asked = text(release, vllm.RUNNER, "GPUModelRunner.propose_draft_token_ids")
    arguments = "sampled_token_ids, self.input_batch.num_tokens_no_spec, self.input_batch.token_ids_cpu"
    assert f".propose({arguments}, slot_mappings=slot_mappings)" in asked
    sampled = text(release, vllm.RUNNER, "GPUModelRunner.sample_tokens")
    # After the tokens are in the batch, and before the connector saves.
    assert sampled.index("self._bookkeeping_sync(") < sampled.rindex("propose_draft_token_ids(valid_sampled_token_ids)")
    assert sampled.rindex("propose_draft_token_ids(valid") < sampled.index("self.finalize_kv_connector()")
    runner = ast.unparse(vllm.module(release, vllm.RUNNER) or ast.Pass())
    assert runner.count("<= self.effective_drafter_max_model_len") == 1


@pytest.mark.parametrize("release", SERVED)
def test_the_attention_of_a_step_is_described_as_vllm_describes_it(release: str) -> None:
    fields = set(vllm.fields(release, METADATA, "CommonAttentionMetadata"))
    assert fields >= {
        *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs"),
        *("num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor", "slot_mapping", "positions"),
        "is_prefilling",
    }
    parameters = [of.arg for of in vllm.function(release, FORWARD, "set_forward_context").args.args]
    assert parameters[:3] == ["attn_metadata", "vllm_config", "num_tokens"]
    assert "slot_mapping" in parameters
    table = text(release, TABLE, "BlockTable.__init__") + text(release, TABLE, "BlockTable.get_device_tensor")
    assert "self.block_size = " in table
    assert "return self.block_table.gpu[:num_reqs]" in table
    assert "self.num_blocks_per_row = " in table
    assert "self.block_tables = " in text(release, TABLE, "MultiGroupBlockTable.__init__")
    group = vllm.definition(release, GROUPS, "AttentionGroup")
    assert group is not None
    methods = {node.name for node in group.body if isinstance(node, ast.FunctionDef)}
    assert "get_metadata_builder" in methods
    # A builder of its own that maps blocks must be asked through the group.
    assert ("build_metadata_for_drafting" in methods) == (
        "kernel_block_size" in vllm.fields(release, GROUPS, group.name)
    )
    assert vllm.definition(release, METADATA, "AttentionMetadataBuilder.build_for_drafting") is not None


@pytest.mark.parametrize("release", SERVED)
def test_the_scheduler_reads_the_slots_of_drafts_where_it_allocates(release: str) -> None:
    scheduled = text(release, vllm.SCHEDULER, "Scheduler.schedule")
    assert "num_lookahead_tokens=self.num_lookahead_tokens" in scheduled
    started = text(release, vllm.SCHEDULER, "Scheduler.__init__")
    assert "self.num_lookahead_tokens = " in started
    assert "self.max_num_running_reqs = " in started
    # A step is padded with drafts that are none only without this table, which is one of numbers by those of requests.
    module = ast.unparse(vllm.module(release, vllm.SCHEDULER) or ast.Pass())
    assert "self.requests: " in started
    assert "self.requests = " not in module
    assert module.count("pad_spec_decode = True") == module.count("self.dynamic_sd_lookup is None")
    assert module.count("self.dynamic_sd_lookup[") == ("self.dynamic_sd_lookup" in started)


@pytest.mark.parametrize("release", SERVED)
def test_on_a_cpu_the_temperatures_of_drafts_are_written_into_a_copy(release: str) -> None:
    """As long as they are, nothing is drafted there beside a request that samples."""
    spreads = text(release, "vllm/utils/cpu_triton_utils.py", "_expand_kernel_impl")
    assert "expand_kernel_impl(_ensure_int64(output), " in spreads
    assert "copy_(" not in spreads
    batch = text(release, "vllm/v1/worker/gpu_input_batch.py", "InputBatch.all_greedy")
    assert "return len(self.random_reqs) == 0" in batch
