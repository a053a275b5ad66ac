"""EngineCore: a method gets memory of its own, and the scheduler side asks every worker which method it runs."""

from __future__ import annotations

from transforms.engine.cases import cases_beside
from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.edits import AtEnd, after
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.rule import Module, ModulePath, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Transform

MODULE = Module(id="engine_core", group="scheduler", paths=(ModulePath("vllm/v1/engine/core.py"),))

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
)

TRANSFORM = Transform(
    id="engine_core",
    module=MODULE,
    governance=Governance(
        why="The scheduler side and the worker side of a sparse method rely on each other: a worker without the method "
        "would read blocks that the scheduler has freed. Only EngineCore can ask the workers of all nodes before the "
        "first request. And a method that keeps something of each block needs memory for it, of which vLLM's profiling "
        "does not know.",
        how="One call at the end of EngineCore's constructor, when the executor and its workers are running and the "
        "model is loaded. The runtime asks the workers through the executor's collective_rpc. Another call where the "
        "memory for KV caches is known and not yet divided into blocks: what the method needs is taken from it.",
        processes=(Process.ENGINE_CORE,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "vLLM has no callback between the start of its workers and the first request; none has been requested",
        ),
        removal="vLLM calls a plugin group in EngineCore once its workers are up, with access to collective_rpc, and "
        "lets a plugin reserve memory per block.",
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
    ),
    cases=cases_beside(__file__, "engine_core"),
)
