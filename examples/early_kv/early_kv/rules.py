"""The registry: what is inserted into vLLM, where, and why."""

from __future__ import annotations

from pathlib import Path

from transforms.engine.cases import cases_beside
from transforms.engine.edits import AtStart, after
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.registry import Registry
from transforms.engine.rule import Module, ModulePath, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Seam, Transform
from transforms.registry import VLLM

PLACE = Path(__file__).parent
SEAM = Seam("early_kv.hooks")
UPSTREAM = Upstream(
    UpstreamStatus.CLOSED,
    "an optional hook of KV connectors before the state update was proposed; it is closed, and no release has the hook",
    "https://github.com/vllm-project/vllm/issues/39696",
)

ADMITTED = rule(
    "early.scheduler.admitted",
    Scope("Scheduler.add_request"),
    after("self.requests[request.request_id] = request", "_early_kv_hooks.request_admitted(self.connector, request)"),
)
BEFORE = rule(
    "early.runner.before-update-states",
    Scope("GPUModelRunner.execute_model"),
    AtStart("scheduler_output = _early_kv_hooks.before_update_states(scheduler_output)"),
)

SCHEDULER = Transform(
    id="early.scheduler",
    module=Module("early.scheduler", "early_scheduler", (ModulePath("vllm/v1/core/sched/scheduler.py"),)),
    governance=Governance(
        why="A lookup in a remote store takes longer than a step, so it has to start when the request arrives.",
        how="One call when the scheduler registers the request; the connector starts its lookup and returns at once.",
        processes=(Process.ENGINE_CORE,),
        upstream=UPSTREAM,
        removal="All supported releases call the connector's on_new_request, which does the same.",
    ),
    rules=(ADMITTED,),
    cases=cases_beside(__file__, "scheduler"),
    not_counted="vLLM's scheduler registers new requests in one place, which the rule hooks.",
    seam=SEAM,
)

RUNNER = Transform(
    id="early.runner",
    module=Module("early.runner", "early_runner", (ModulePath("vllm/v1/worker/gpu_model_runner.py"),)),
    governance=Governance(
        why="Only a worker knows how much of a request's KV it fetched. The step must then compute only the rest, "
        "and the runner reads the step's size before it updates its states.",
        how="One call at the start of execute_model, which returns the step without the fetched tokens.",
        processes=(Process.WORKER,),
        upstream=UPSTREAM,
        removal="vLLM asks KV connectors before a step which of its tokens need not be computed.",
    ),
    rules=(BEFORE,),
    cases=cases_beside(__file__, "runner"),
    not_counted="The V1 runner has one execute_model, which the rule hooks; the V2 runner is not supported.",
    seam=SEAM,
)

REGISTRY = Registry(
    owner="early",
    title="Early KV",
    package=VLLM,
    transforms=(SCHEDULER, RUNNER),
    hooks=PLACE / "hooks.py",
    overlays=PLACE.parent / "overlays",
    distribution="early-kv-vllm-overlay",
    requires=("early-kv",),
)
