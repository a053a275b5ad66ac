"""The step that the scheduler sends to the workers: room for what UCM sends with it."""

from __future__ import annotations

from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.members import Field
from transforms.engine.rule import Module, ModulePath, Rule, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Case, Transform

MODULE = Module(id="scheduler_output", group="scheduler", paths=(ModulePath("vllm/v1/core/sched/output.py"),))

#: What each field carries is said where it is filled: `ucm.integration.vllm.hooks.scheduler_output_built`.
FIELDS = {
    "connector-metadata": "ucm_connector_metadata: object = None",
    "sparse-metadata": "ucm_sparse_metadata: object = None",
    "sparsed-slots": "ucm_sparsed_slots: object = None",
    "external-tokens": "ucm_external_computed_tokens: object = None",
}


def _rule(name: str, code: str) -> Rule:
    return rule(f"scheduler_output.{name}", Scope("SchedulerOutput"), Field(code))


def _case(name: str, code: str) -> Case:
    given = "class SchedulerOutput:\n    step: int\n"
    method = "\n    def total(self):\n        return self.step\n"
    added = f"    {code}  # ucm: scheduler_output.{name}\n"
    return Case(f"scheduler_output.{name}", given + method, given + added + method, "0.32.0")


TRANSFORM = Transform(
    id="scheduler_output",
    module=MODULE,
    governance=Governance(
        why="What a sparse method decides for a step in EngineCore has to reach the workers with that very step, also "
        "when steps overlap; the KV connector's own channel belongs to the connector alone.",
        how="Four fields with defaults at the end of the dataclass: every construction stays valid, pickle carries "
        "them, and an unset field costs a few bytes per step.",
        processes=(Process.ENGINE_CORE, Process.WORKER),
        upstream=Upstream(
            UpstreamStatus.INAPPROPRIATE,
            "the fields mean nothing without the scheduler calls that fill them, so there is nothing to offer alone",
        ),
        removal="SchedulerOutput gains an open-ended field for extensions that vLLM sends to the workers unread.",
    ),
    rules=tuple(_rule(name, code) for name, code in FIELDS.items()),
    cases=tuple(_case(name, code) for name, code in FIELDS.items()),
)
