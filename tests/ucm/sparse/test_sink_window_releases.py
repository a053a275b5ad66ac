"""The code that releasing blocks relies on, in the published sources of every release, with the differences."""

from __future__ import annotations

import ast

import pytest

from tests.releases import REVIEWED
from tests.ucm.integration.vllm import published as vllm
from ucm.compat import ADMISSION_CAPS
from ucm.sparse.blocks import MANAGER, SPECIFICATION

MANAGERS = "vllm/v1/core/single_type_kv_cache_manager.py"
COORDINATOR = "vllm/v1/core/kv_cache_coordinator.py"
POOL = "vllm/v1/core/block_pool.py"
BLOCKS = "vllm/v1/core/kv_cache_manager.py"
#: 0.9.0 has no coordinator, and is refused.
SERVED = REVIEWED[REVIEWED.index("0.9.1") :]
#: The functions that read a request's row under full attention. All were reviewed: null blocks are valid for each.
READERS = {
    "__init__",
    "_apply_cow",  # the tail of a partial hit, which is newer than any window
    "_cache_partial_tail_block",  # at every caching, the block in which the prompt ends: see below
    "_remove_blocks_in_range",
    "add_local_computed_blocks",  # at admission
    "allocate_external_computed_blocks",  # at admission
    "allocate_new_blocks",  # by length
    "allocate_new_computed_blocks",  # at admission
    "cache_blocks",
    "free",
    "get_num_blocks_to_allocate",  # by length
    "get_num_common_prefix_blocks",  # up to the first block that not all requests hold
    "pop_blocks_for_free",
    "remove_skipped_blocks",  # nothing is skipped
    "save_new_computed_blocks",  # at admission
}


def row_readers(release: str, name: str) -> set[str]:
    found = vllm.methods(release, MANAGERS, name)
    return {method for method, node in found.items() if "self.req_to_blocks" in ast.unparse(node)}


@pytest.mark.parametrize("release", SERVED)
def test_the_names_that_are_used(release: str) -> None:
    assert "coordinator" in vllm.attributes(release, BLOCKS, "KVCacheManager")
    assert "single_type_managers" in vllm.attributes(release, COORDINATOR, "KVCacheCoordinator")
    base = vllm.attributes(release, MANAGERS, "SingleTypeKVCacheManager")
    assert {"block_size", "kv_cache_spec", "block_pool", "req_to_blocks", "num_cached_block"} <= base
    assert {"null_block", "enable_caching", "free_blocks"} <= vllm.attributes(release, POOL, "BlockPool")
    assert vllm.definition(release, MANAGERS, MANAGER) is not None
    assert vllm.definition(release, vllm.CONFIG, SPECIFICATION) is not None
    request = vllm.attributes(release, vllm.REQUEST, "Request")
    assert {"request_id", "status", "num_computed_tokens", "num_prompt_tokens"} <= request
    assert {"connector", "vllm_config", "scheduler_config"} <= vllm.attributes(release, vllm.SCHEDULER, "Scheduler")


def test_the_release_without_a_coordinator_is_the_one_that_is_refused() -> None:
    without = [release for release in REVIEWED if vllm.module(release, COORDINATOR) is None]
    assert without == [release for release in REVIEWED if release not in SERVED] == ["0.9.0"]


@pytest.mark.parametrize("release", SERVED)
def test_who_reads_a_row(release: str) -> None:
    readers = row_readers(release, "SingleTypeKVCacheManager") | row_readers(release, MANAGER)
    assert readers >= {"allocate_new_blocks", "cache_blocks"}
    assert readers <= READERS


@pytest.mark.parametrize("release", SERVED)
def test_null_blocks_are_not_put_into_the_free_queue(release: str) -> None:
    free = ast.unparse(vllm.function(release, POOL, "BlockPool.free_blocks"))
    assert "not block.is_null" in free or "if block.is_null:\n            continue" in free
    created = ast.unparse(vllm.function(release, POOL, "BlockPool.__init__"))
    assert "self.null_block.is_null = True" in created


@pytest.mark.parametrize("release", SERVED)
def test_the_cache_looks_at_no_block_before_the_last_cached_one(release: str) -> None:
    """That block is never released; up to 0.13.0 it provides the parent's hash, and null blocks would get one."""
    node = vllm.function(release, POOL, "BlockPool.cache_full_blocks")
    looked_at = {
        ast.unparse(child.slice)
        for child in ast.walk(node)
        if isinstance(child, ast.Subscript) and ast.unparse(child.value) == "blocks"
    }
    # `i` runs over those that are being cached.
    assert looked_at <= {"num_cached_blocks:num_full_blocks", "num_cached_blocks - 1", "i"}
    assert "num_cached_blocks:num_full_blocks" in looked_at
    if "i" in looked_at:
        assert "for i in range(num_cached_blocks, num_full_blocks)" in ast.unparse(node)


@pytest.mark.parametrize("release", SERVED)
def test_the_end_of_a_prompt_may_be_released(release: str) -> None:
    """From 0.24.0 on, prompts that end within a block are cached up to their end as well; null blocks are skipped."""
    node = vllm.methods(release, POOL, "BlockPool").get("cache_partial_block")
    assert (node is not None) == (release in SERVED[SERVED.index("0.24.0") :])
    if node is not None:
        assert "if block.is_null:\n    return None" in [ast.unparse(child) for child in node.body]


@pytest.mark.parametrize("release", SERVED)
def test_a_common_prefix_ends_at_a_null_block(release: str) -> None:
    """Its reference count is never that of the running requests: it is not increased, and freeing decreases it."""
    node = vllm.methods(release, MANAGERS, MANAGER).get("get_num_common_prefix_blocks")
    if node is None:
        assert release in {"0.32.0", "0.33.0"}
        return
    loop = next(child for child in ast.walk(node) if isinstance(child, ast.For))
    (test,) = [child for child in loop.body if isinstance(child, ast.If)]
    assert ast.unparse(test.test) in {
        "block.ref_cnt == num_running_requests",
        "block.ref_cnt == len(self.req_to_blocks)",
    }
    assert isinstance(test.orelse[0], ast.Break)


@pytest.mark.parametrize("release", SERVED)
def test_freeing_a_row_frees_each_block_of_it_once(release: str) -> None:
    methods = vllm.methods(release, MANAGERS, "SingleTypeKVCacheManager")
    text = "".join(ast.unparse(methods[name]) for name in ("free", "pop_blocks_for_free") if name in methods)
    assert text.count("self.req_to_blocks.pop(request_id, [])") == 1
    assert "reversed(" in text


@pytest.mark.parametrize("release", SERVED)
def test_how_many_blocks_admission_asks_for(release: str) -> None:
    """If vLLM requires room for a whole prompt, a manager may state how many blocks a request holds at most."""
    attributes = vllm.attributes(release, MANAGERS, "SingleTypeKVCacheManager")
    whole = (
        "full_sequence_must_fit"
        in vllm.signature(vllm.function(release, BLOCKS, "KVCacheManager.allocate_slots")).parameters
    )
    assert len(attributes.intersection(ADMISSION_CAPS)) == (release in SERVED[SERVED.index("0.20.2") :])
    assert not whole or attributes.intersection(ADMISSION_CAPS)


@pytest.mark.parametrize("release", SERVED)
def test_running_requests_only_get_more_blocks_of_the_worker_s_row(release: str) -> None:
    """So the ids of released blocks stay at their places in it, and nothing reads them."""
    text = ast.unparse(vllm.function(release, vllm.RUNNER, "GPUModelRunner._update_states"))
    assert "self.input_batch.block_table.append_row(" in text
