"""The V2 model runner: hooks for the same events as in the V1 runner."""

from __future__ import annotations

from transforms import refusals
from transforms.engine.cases import cases_beside
from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.edits import AtEnd, AtStart, after, before
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.releases import Absent, Releases
from transforms.engine.rule import Module, ModulePath, Rule, Variant, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import EngineTest, Transform

ABSENT = (Absent(Releases(before="0.12.0"), "the V2 model runner does not exist"),)
UNUSED = (
    Absent(
        Releases("0.12.0", "0.16.0"),
        "the V2 model runner is experimental, has no KV connectors, and is off unless VLLM_USE_V2_MODEL_RUNNER=1",
    ),
)
MODULE = Module(
    id="model_runner_v2",
    group="model_runner_v2",
    paths=(ModulePath("vllm/v1/worker/gpu/model_runner.py"),),
    absent=ABSENT,
    unused=UNUSED,
)

EXECUTE = Scope("GPUModelRunner.execute_model")
BEGIN = "_ucm_hooks.v2_execute_begin(self, scheduler_output, input_batch, dummy_run)"
FINISHED = "_ucm_hooks.v2_execute_finished(self, scheduler_output, dummy_run)"
FORWARD = {
    "fullgraph": ("self.cudagraph_manager.run_fullgraph(...)", Releases(since="0.17.1")),
    "run": ("self.cudagraph_manager.run(...)", Releases(before="0.17.1")),
}
STATES: dict[str, AtStart | AtEnd] = {
    "requests-finished": AtStart("_ucm_hooks.v2_requests_finished(self, scheduler_output)"),
    "requests-added": AtStart("_ucm_hooks.v2_requests_added(self, scheduler_output)"),
    "requests-updated": AtEnd("_ucm_hooks.v2_requests_updated(self, scheduler_output)"),
}
METHODS = {
    "requests-finished": "finish_requests",
    "requests-added": "add_requests",
    "requests-updated": "update_requests",
}

CENSUS = (
    Census(
        "model_runner_v2.states",
        "state updates of a runner",
        ("def finish_requests", "def add_requests", "def update_requests"),
        rules=(
            "model_runner_v2.requests-finished",
            "model_runner_v2.requests-added",
            "model_runner_v2.requests-updated",
        ),
        elsewhere=(
            Elsewhere(
                ("vllm/v1/core/sched/*:Scheduler*.finish_requests",),
                Consequence.REACHES,
                "the scheduler's function to end requests from outside; it frees them through the hooked _free_request",
            ),
            Elsewhere(
                ("vllm/v1/worker/gpu/model_runner.py:GPUModelRunner.*_requests",),
                Consequence.REFUSED,
                "in these releases the V2 runner is experimental and has no hooks; a method refuses to run on it",
                refused_by=refusals.RUNNER,
                releases=Releases("0.12.0", "0.16.0"),
            ),
        ),
    ),
)

TRANSFORM = Transform(
    id="model_runner_v2",
    module=MODULE,
    governance=Governance(
        why="From 0.22.1 on, vLLM runs more and more models on the V2 runner by default. Hooks in the V1 runner alone "
        "would still match, but never fire.",
        how="One call in each of the three state updates, and a pair around the branch between graph replay and eager "
        "forward, so that it fires in both cases. V2 reports a preempted request as finished and a resumed one as new. "
        "The calls pass the whole step, from which the runtime can tell these cases apart.",
        processes=(Process.WORKER,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "the V2 runner has state objects per model, but code outside vLLM cannot register one",
        ),
        removal="vLLM lets a plugin register a model state or step callback with the V2 runner.",
    ),
    rules=(
        *(rule(f"model_runner_v2.{n}", Scope(f"GPUModelRunner.{METHODS[n]}"), edit) for n, edit in STATES.items()),
        Rule(
            "model_runner_v2.execute-begin",
            tuple(Variant(EXECUTE, before(text, BEGIN, "outer"), known, n) for n, (text, known) in FORWARD.items()),
        ),
        Rule(
            "model_runner_v2.execute-finished",
            tuple(Variant(EXECUTE, after(text, FINISHED, "outer"), known, n) for n, (text, known) in FORWARD.items()),
        ),
    ),
    cases=cases_beside(__file__, "model_runner_v2"),
    engine_tests=(EngineTest("tests/e2e/test_v2_runner.py::test_hooks_fire_as_often_as_they_must"),),
    needs=("worker",),
    opt_in=("model_runner_v2.requests-added", "model_runner_v2.requests-updated"),
    census=CENSUS,
)
