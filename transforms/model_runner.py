"""The V1 model runner: hooks for a worker's step, from its batch to its output."""

from __future__ import annotations

from transforms import refusals
from transforms.engine.cases import cases_beside
from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.edits import AtStart, after, before
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.releases import Releases
from transforms.engine.rule import Module, ModulePath, Rule, Variant, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import EngineTest, Transform

MODULE = Module(id="model_runner", group="model_runner", paths=(ModulePath("vllm/v1/worker/gpu_model_runner.py"),))

UPDATE = Scope("GPUModelRunner._update_states")
EXECUTE = Scope("GPUModelRunner.execute_model")
APPEND_ROW = "self.input_batch.block_table.append_row(...)"
FORWARD = {
    "method": ("model_output = self._model_forward(...)", Releases(since="0.11.1")),
    "model": ("model_output = self.model(...)", Releases(before="0.11.1")),
}
STATES = "_ucm_hooks.update_states(self, scheduler_output)"
FINISHED_REQUESTS = "_ucm_hooks.worker_requests_finished(self, scheduler_output.finished_req_ids)"
BLOCKS = "_ucm_hooks.blocks_updated(self, req_id, req_index, scheduler_output)"
BEGIN = "_ucm_hooks.execute_begin(self, scheduler_output)"
FINISHED = "_ucm_hooks.execute_finished(self, scheduler_output, model_output)"

#: Used by two of the censuses.
V2_WITHOUT_HOOKS = Elsewhere(
    ("vllm/v1/worker/gpu/model_runner.py:GPUModelRunner.execute_model",),
    Consequence.REFUSED,
    "in these releases the V2 runner is experimental and has no hooks; a method refuses to run on it",
    refused_by=refusals.RUNNER,
    releases=Releases("0.12.0", "0.16.0"),
)

CENSUS = (
    Census(
        "model_runner.runners",
        "functions that run a step, and runners derived from vLLM's",
        ("def execute_model", "def _update_states", "class (GPUModelRunner)"),
        rules=("model_runner.update-states", "model_runner.execute-begin", "model_runner_v2.execute-begin"),
        elsewhere=(
            Elsewhere(
                (
                    "vllm/v1/executor/*:*Executor.execute_model",
                    "vllm/executor/*:*.execute_model",
                    "vllm/v1/engine/core.py:EngineCore.execute_model",
                    "vllm/v1/worker/*worker.py:*Worker.execute_model",
                    "vllm/v1/worker/worker_base.py:Worker*Base.execute_model",
                    "vllm/worker/worker_base.py:WorkerBase.execute_model",
                ),
                Consequence.REACHES,
                "it passes the step to the worker's model runner, whose execute_model is hooked or refused",
            ),
            Elsewhere(
                (
                    "vllm/v1/worker/*cpu*model_runner.py:CPUModelRunner",
                    "vllm/v1/worker/xpu_model_runner.py:XPUModelRunner",
                    "vllm/v1/worker/cpu/model_runner.py:CPUModelRunner",
                ),
                Consequence.REACHES,
                "it inherits the hooked runner's state update and step",
            ),
            Elsewhere(
                ("vllm/worker/*:*.execute_model", "vllm/spec_decode/*:*.execute_model"),
                Consequence.REFUSED,
                "workers and runners of the V0 engine have no hooks; a method refuses to run on them",
                refused_by=refusals.RUNNER,
                releases=Releases(before="0.11.0"),
            ),
            Elsewhere(
                ("vllm/v1/worker/tpu_model_runner.py:TPUModelRunner.*",),
                Consequence.REFUSED,
                "a separate runner without hooks and with its own attention; a method refuses to serve with it",
                refused_by=refusals.RUNNER,
                releases=Releases(before="0.14.0"),
            ),
            V2_WITHOUT_HOOKS,
            Elsewhere(
                ("vllm/v1/worker/mm_encoder_model_runner.py:MMEncoderModelRunner*",),
                Consequence.HARMLESS,
                "it runs an encoder in a separate process, which has no KV cache",
            ),
            Elsewhere(
                ("vllm/benchmarks/*:*",),
                Consequence.HARMLESS,
                "a benchmark of forward passes; it serves no requests",
            ),
        ),
    ),
    Census(
        "model_runner.forwards",
        "calls of a runner's forward",
        ("_._model_forward(...)", "_.cudagraph_manager.run_fullgraph(...)", "_.cudagraph_manager.run(...)"),
        rules=("model_runner.execute-begin", "model_runner_v2.execute-begin"),
        elsewhere=(
            V2_WITHOUT_HOOKS,
            Elsewhere(
                ("vllm/v1/worker/gpu/spec_decode/*:*",),
                Consequence.REFUSED,
                "the forward of a draft model; a method refuses draft models before the model is loaded",
                refused_by=refusals.DRAFTS,
            ),
            Elsewhere(
                ("vllm/benchmarks/*:*",),
                Consequence.HARMLESS,
                "a benchmark of forward passes; it serves no requests",
            ),
        ),
    ),
    Census(
        "model_runner.rows",
        "places that append a running request's blocks to its row",
        ("_.block_table.append_row(...)",),
        rules=("model_runner.blocks-updated",),
        elsewhere=(
            Elsewhere(
                ("vllm/v1/worker/tpu_model_runner.py:TPUModelRunner._update_states",),
                Consequence.REFUSED,
                "a separate runner without hooks and with its own attention; a method refuses to serve with it",
                refused_by=refusals.RUNNER,
                releases=Releases(before="0.14.0"),
            ),
        ),
    ),
)

TRANSFORM = Transform(
    id="model_runner",
    module=MODULE,
    governance=Governance(
        why="A sparse method builds its metadata from the batch that is about to run, replaces a request's blocks in "
        "the worker's tables, and drops its state when a request ends. The connector interface has no calls for these.",
        how="One call at the start of the state update, one with the finished requests, one whenever a running "
        "request's new blocks have been written to its row, and a pair around the forward call, inside the forward "
        "context.",
        processes=(Process.WORKER,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "the discussion there is about sparse offloading for models with their own indexer, not about hooks",
            "https://github.com/vllm-project/vllm/issues/48203",
        ),
        removal="No supported release has the V1 runner, or vLLM gives plugins the same step callbacks.",
    ),
    rules=(
        rule("model_runner.update-states", UPDATE, AtStart(STATES)),
        rule(
            "model_runner.requests-finished",
            UPDATE,
            before("self.requests.pop(req_id, None)", FINISHED_REQUESTS, "outer"),
        ),
        rule(
            "model_runner.blocks-updated", Scope(UPDATE.name, loop_with=APPEND_ROW), after(APPEND_ROW, BLOCKS, "outer")
        ),
        Rule(
            "model_runner.execute-begin",
            tuple(Variant(EXECUTE, before(text, BEGIN), known, name) for name, (text, known) in FORWARD.items()),
        ),
        Rule(
            "model_runner.execute-finished",
            tuple(Variant(EXECUTE, after(text, FINISHED), known, name) for name, (text, known) in FORWARD.items()),
        ),
    ),
    cases=cases_beside(__file__, "model_runner"),
    engine_tests=(EngineTest("tests/e2e/test_hooks.py::test_hooks_fire_where_they_belong_and_nowhere_else"),),
    needs=("worker",),
    opt_in=("model_runner.blocks-updated",),
    census=CENSUS,
)
