"""The KV-cache manager: a hook before each allocation."""

from __future__ import annotations

from transforms.engine.cases import cases_beside
from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.edits import AtStart
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.rule import Module, ModulePath, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import EngineTest, Transform

MODULE = Module(
    id="kv_cache_manager", group="kv_cache_manager", paths=(ModulePath("vllm/v1/core/kv_cache_manager.py"),)
)

ASK = """\
if not _ucm_hooks.before_allocation(self, request):
    return None
"""

CENSUS = (
    Census(
        "kv_cache_manager.allocations",
        "calls that allocate a request's slots",
        ("def allocate_slots", "_.allocate_slots(...)"),
        rules=("kv_cache_manager.before-allocation",),
        elsewhere=(
            Elsewhere(
                ("vllm/v1/core/sched/scheduler.py:Scheduler.schedule",),
                Consequence.REACHES,
                "its calls for running and for waiting requests go to the hooked KVCacheManager.allocate_slots",
            ),
        ),
    ),
)

TRANSFORM = Transform(
    id="kv_cache_manager",
    module=MODULE,
    governance=Governance(
        why="A sparse method frees blocks of a running request right before the request's next allocation, so that "
        "this and every other allocation can use them. A request that has lost blocks has to be recomputed.",
        how="One check at the start of allocate_slots, which every scheduler calls for every allocation. If it fails, "
        "allocate_slots returns None as if memory were short, and the scheduler preempts.",
        processes=(Process.ENGINE_CORE,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "a manager per sparse algorithm was proposed there and went stale without a decision",
            "https://github.com/vllm-project/vllm/issues/21772",
        ),
        removal="vLLM lets a plugin register a single-type KV-cache manager that frees blocks of running requests.",
    ),
    census=CENSUS,
    rules=(
        rule(
            "kv_cache_manager.before-allocation",
            Scope("KVCacheManager.allocate_slots"),
            AtStart(ASK),
            diverts="a request that has lost blocks is refused the allocation before upstream counts or takes a block",
        ),
    ),
    cases=cases_beside(__file__, "kv_cache_manager"),
    engine_tests=(EngineTest("tests/e2e/test_hooks.py::test_hooks_fire_where_they_belong_and_nowhere_else"),),
    needs=("scheduler",),
)
