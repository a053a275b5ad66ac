"""EngineCore: a method gets memory of its own and changes the block hashes, and is asked for in every worker."""

from __future__ import annotations

from transforms import refusals
from transforms.engine.cases import cases_beside
from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.edits import AtEnd, after
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.releases import Absent, Releases
from transforms.engine.rule import Module, ModulePath, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import EngineTest, Transform

MODULE = Module(id="engine_core", group="scheduler", paths=(ModulePath("vllm/v1/engine/core.py"),))

#: Up to 0.10.0, the scheduler's managers hash blocks; since then a request does, with a function from EngineCore.
HASHED_BY_MANAGERS, HASHED_BY_REQUESTS = Releases(before="0.10.1"), Releases(since="0.10.1")

CENSUS = (
    Census(
        "engine_core.cores",
        "classes derived from vLLM's EngineCore",
        ("class (EngineCore)", "class (EngineCoreProc)", "class (DPEngineCoreProc)"),
        elsewhere=(
            Elsewhere(
                ("vllm/v1/engine/core.py:*EngineCoreProc", "vllm/v1/engine/core.py:*EngineCoreActor*"),
                Consequence.REACHES,
                "its constructor calls EngineCore's, which ends with the hook",
            ),
        ),
    ),
    Census(
        "engine_core.block-hashes",
        "places that hash blocks of tokens, or choose the function for it",
        (
            "get_request_block_hasher(...)",
            "_.get_request_block_hasher(...)",
            "hash_block_tokens(...)",
            "_.hash_block_tokens(...)",
            "hash_request_tokens(...)",
            "_.hash_request_tokens(...)",
        ),
        rules=("engine_core.block-hashes",),
        elsewhere=(
            Elsewhere(
                ("vllm/v1/core/kv_cache_utils.py:get_request_block_hasher.request_block_hasher",),
                Consequence.REACHES,
                "it hashes with the function that EngineCore hands over, which the hook has changed",
                releases=HASHED_BY_REQUESTS,
            ),
            Elsewhere(
                (
                    "vllm/v1/core/kv_cache_manager.py:KVCacheManager.get_computed_blocks",
                    "vllm/v1/core/kv_cache_utils.py:hash_request_tokens",
                    "vllm/v1/core/block_pool.py:BlockPool.cache_full_blocks",
                ),
                Consequence.REACHES,
                "it hashes with the function of a manager, which the hook of the scheduler's constructor has changed",
                releases=HASHED_BY_MANAGERS,
            ),
            Elsewhere(
                ("vllm/core/block/prefix_caching_block.py:*",),
                Consequence.REFUSED,
                "part of the V0 engine, which has its own KV cache and workers; a method refuses to run on it",
                refused_by=refusals.RUNNER,
                releases=Releases(before="0.11.0"),
            ),
        ),
    ),
)

TRANSFORM = Transform(
    id="engine_core",
    module=MODULE,
    governance=Governance(
        why="The scheduler side and the worker side of a sparse method rely on each other: a worker without the method "
        "would read blocks that the scheduler has freed. Only EngineCore can ask the workers of all nodes before the "
        "first request. A method that keeps something of each block needs memory for it, of which vLLM's profiling "
        "does not know. And a method that changes what a block holds must change the block's hash, or a connector, a "
        "tier and a reader of KV events that find blocks by hash mix KV of engines with other settings.",
        how="One call at the end of EngineCore's constructor, when the executor and its workers are running and the "
        "model is loaded. The runtime asks the workers through the executor's collective_rpc. Another call where the "
        "memory for KV caches is known and not yet divided into blocks: what the method needs is taken from it. A "
        "third where the engine's hash function is chosen: the runtime returns the same one, or one that also hashes "
        "the method's settings.",
        processes=(Process.ENGINE_CORE,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "vLLM has no callback between the start of its workers and the first request; none has been requested",
        ),
        removal="vLLM calls a plugin group in EngineCore once its workers are up, with access to collective_rpc, lets "
        "a plugin reserve memory per block, and lets it add to the block hashes of an engine.",
    ),
    census=CENSUS,
    rules=(
        rule("engine_core.started", Scope("EngineCore.__init__"), AtEnd("_ucm_hooks.engine_core_started(self)")),
        rule(
            "engine_core.memory",
            Scope("EngineCore._initialize_kv_caches"),
            after(
                "assert len(kv_cache_specs) == len(available_gpu_memory)",
                "available_gpu_memory = _ucm_hooks.kv_cache_memory(vllm_config, kv_cache_specs, available_gpu_memory)",
            ),
        ),
        rule(
            "engine_core.block-hashes",
            Scope("EngineCore.__init__"),
            after(
                "init_none_hash(caching_hash_fn)",
                "caching_hash_fn = _ucm_hooks.block_hash_function(vllm_config, caching_hash_fn)",
            ),
            absent=(
                Absent(
                    HASHED_BY_MANAGERS,
                    "the scheduler's managers hash blocks; the hook of its constructor changes their function",
                ),
            ),
        ),
    ),
    cases=cases_beside(__file__, "engine_core"),
    engine_tests=(
        EngineTest(
            "tests/e2e/test_several_engines.py::test_an_engine_whose_worker_does_not_run_its_half_is_refused",
            ("engine_core.started",),
        ),
        EngineTest(
            "tests/e2e/test_sparse_block_topk.py::test_summaries_are_allocated_at_the_start_from_the_kv_caches_memory",
            ("engine_core.memory",),
        ),
        EngineTest(
            "tests/e2e/test_sparse_sharing.py::test_engines_with_other_settings_find_nothing_and_answer_as_alone",
            ("engine_core.block-hashes",),
        ),
    ),
)
