"""SchedulerOutput: a field for the metadata that UCM sends to the workers with each step."""

from __future__ import annotations

from transforms.engine.cases import cases_beside
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.members import Field
from transforms.engine.rule import Module, ModulePath, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Transform

MODULE = Module(id="scheduler_output", group="scheduler", paths=(ModulePath("vllm/v1/core/sched/output.py"),))

FIELD = "ucm_sparse_meta: object = None"

TRANSFORM = Transform(
    id="scheduler_output",
    module=MODULE,
    governance=Governance(
        why="A sparse method's decisions for a step, made in EngineCore, have to reach the workers with exactly that "
        "step, even if steps overlap. The KV connector's channel is for the connector only.",
        how="One field with a default at the end of the dataclass, with the name that the known UCM gives it. All "
        "existing constructor calls stay valid, pickle includes the field, and an unset one costs a few bytes per "
        "step.",
        processes=(Process.ENGINE_CORE, Process.WORKER),
        upstream=Upstream(
            UpstreamStatus.INAPPROPRIATE,
            "the field is useless without the scheduler call that fills it, so it is not offered alone",
        ),
        removal="SchedulerOutput gains a field for extensions that vLLM passes to the workers unchanged.",
    ),
    rules=(rule("scheduler_output.sparse-meta", Scope("SchedulerOutput"), Field(FIELD)),),
    cases=cases_beside(__file__, "scheduler_output"),
    not_run="vLLM's processes pickle what an output has, declared or not: no engine differs without the declaration.",
    not_counted="The rule changes one class; `scheduler.outputs` counts where it is constructed.",
)
