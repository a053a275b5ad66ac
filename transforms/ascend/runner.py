"""The V1 model runner of vLLM Ascend, and its block tables.

The V2 runner derives from vLLM's and calls super() in its overrides, so vLLM's overlay is enough for it. From 0.18.0 on
the same is true of the V1 runner's state update, but not of its step.
"""

from __future__ import annotations

from transforms import refusals
from transforms.engine.cases import cases_beside
from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.edits import AtStart, after, before
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.members import Method
from transforms.engine.releases import Absent, Releases
from transforms.engine.rule import Module, ModulePath, Rule, Upstreamed, Variant, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import EngineTest, Transform

APPEND_ROW = "self.input_batch.block_table.append_row(...)"
STATES = "_ucm_hooks.update_states(self, scheduler_output)"
ENDED = "_ucm_hooks.worker_requests_finished(self, scheduler_output.finished_req_ids)"
BLOCKS = "_ucm_hooks.blocks_updated(self, req_id, req_index, scheduler_output)"
BEGIN = "_ucm_hooks.execute_begin(self, scheduler_output)"
FINISHED = "_ucm_hooks.execute_finished(self, scheduler_output, hidden_states)"
CLEAR = "def clear_row(self, row_idx: int) -> None:\n    _ucm_hooks.clear_row(self, row_idx)\n"

#: The forward call of each step, the function that contains it, and the releases.
FORWARDS = {
    "own step": (
        Scope("NPUModelRunner.execute_model"),
        "hidden_states = self._model_forward(...)",
        Releases(since="0.18.0"),
    ),
    "hidden states": (
        Scope("NPUModelRunner.execute_model"),
        "hidden_states = self._generate_process_reqs_hidden_states(...)",
        Releases("0.11.0", "0.18.0"),
    ),
    "requests": (
        Scope("NPUModelRunner._process_reqs"),
        "hidden_states = self.model(...)",
        Releases(before="0.11.0"),
    ),
}
GRAPH = "hidden_states = compiled_model(...)"
NO_GRAPH = Absent(Releases(since="0.11.0"), "a compiled graph runs within the one forward call of the step")
UPDATE_ELSEWHERE = (
    Absent(
        Releases("0.12.0rc1", "0.14.0rc1"),
        "a patch puts its copy of the state update into vLLM's runner; the transform ascend.update_states changes it",
    ),
    Absent(Releases(since="0.14.0rc1"), "the state update is vLLM's, inherited or called through super()"),
)


def _update_rules(transform: str, scope: str, absent: tuple[Absent, ...] = ()) -> tuple[Rule, ...]:
    loop = Scope(scope, loop_with=APPEND_ROW)
    inherited = Upstreamed(
        Scope(scope), "it calls super()._update_states, which vLLM's overlay hooks", "super()._update_states(...)"
    )
    return (
        Rule(
            f"{transform}.update-states", (Variant(Scope(scope), AtStart(STATES)),), absent=absent, upstreamed=inherited
        ),
        rule(
            f"{transform}.requests-finished",
            Scope(scope),
            before("self.requests.pop(req_id, None)", ENDED, "outer"),
            absent=absent,
        ),
        rule(f"{transform}.blocks-updated", loop, after(APPEND_ROW, BLOCKS, "outer"), absent=absent),
    )


def _forward_rules() -> tuple[Rule, ...]:
    return (
        Rule(
            "ascend.model_runner.execute-begin",
            tuple(Variant(scope, before(text, BEGIN), known, name) for name, (scope, text, known) in FORWARDS.items()),
        ),
        Rule(
            "ascend.model_runner.execute-finished",
            tuple(
                Variant(scope, after(text, FINISHED), known, name) for name, (scope, text, known) in FORWARDS.items()
            ),
        ),
        rule(
            "ascend.model_runner.graph-begin",
            Scope("NPUModelRunner._process_reqs"),
            before(GRAPH, BEGIN),
            absent=(NO_GRAPH,),
        ),
        rule(
            "ascend.model_runner.graph-finished",
            Scope("NPUModelRunner._process_reqs"),
            after(GRAPH, FINISHED),
            absent=(NO_GRAPH,),
        ),
    )


RECORD = Governance(
    why="The runner has its own step and, up to 0.13.0, its own state update, both of which bypass the hooks in vLLM's "
    "V1 runner.",
    how="The same calls as in vLLM's V1 runner, at the same statements, with a pair around each forward call, inside "
    "the forward context.",
    processes=(Process.WORKER,),
    upstream=Upstream(
        UpstreamStatus.NOT_SUBMITTED,
        "vLLM would need the callbacks first; vLLM Ascend is moving to the V2 runner, which inherits vLLM's",
        "https://github.com/vllm-project/vllm-ascend/issues/15067",
    ),
    removal="Every supported release of vLLM Ascend serves with the V2 runner only.",
)

CENSUS = (
    Census(
        "ascend.model_runner.runners",
        "functions that run a step or update a runner's state",
        ("def execute_model", "def _update_states", "def _process_reqs"),
        rules=(
            "ascend.model_runner.update-states",
            "ascend.model_runner.execute-begin",
            "ascend.update_states.update-states",
        ),
        elsewhere=(
            Elsewhere(
                ("vllm_ascend/worker/worker*.py:NPUWorker.execute_model",),
                Consequence.REACHES,
                "it passes the step to the worker's model runner, whose execute_model is hooked or refused",
            ),
            Elsewhere(
                ("vllm_ascend/worker/model_runner_v1.py:NPUModelRunner.execute_model",),
                Consequence.REACHES,
                "it runs the step through its own _process_reqs, whose two forward calls are hooked",
                releases=Releases(before="0.11.0"),
            ),
            Elsewhere(
                (
                    "vllm_ascend/worker/model_runner_v1.py:NPUModelRunner._update_states",
                    "vllm_ascend/worker/v2/model_runner.py:NPUModelRunner.execute_model",
                ),
                Consequence.REACHES,
                "it calls super()'s, which vLLM's overlay hooks, with the same step",
                releases=Releases(since="0.18.0"),
            ),
            Elsewhere(
                (
                    "vllm_ascend/worker/draft_model_runner.py:*",
                    "vllm_ascend/worker/model_runner.py:*",
                    "vllm_ascend/worker/multi_step_runner.py:*",
                    "vllm_ascend/worker/pooling_model_runner.py:*",
                ),
                Consequence.REFUSED,
                "runners of the V0 engine have no hooks; a method refuses to run on them",
                refused_by=refusals.RUNNER,
                releases=Releases(before="0.11.0"),
            ),
            Elsewhere(
                ("vllm_ascend/_310p/*:*",),
                Consequence.REFUSED,
                "a runner for the 310P, which has another cache and attention; a method refuses this device",
                refused_by=refusals.PLATFORM,
            ),
        ),
    ),
    Census(
        "ascend.model_runner.forwards",
        "forward calls of a runner",
        (
            "hidden_states = self.model(...)",
            "hidden_states = compiled_model(...)",
            "_._model_forward(...)",
            "_._generate_process_reqs_hidden_states(...)",
        ),
        rules=("ascend.model_runner.execute-begin", "ascend.model_runner.graph-begin"),
        elsewhere=(
            Elsewhere(
                ("vllm_ascend/models/*:*", "vllm_ascend/torchair/models/*:*"),
                Consequence.HARMLESS,
                "a model's call of its own decoder, inside the runner's forward call",
            ),
            Elsewhere(
                ("vllm_ascend/worker/model_runner_v1.py:NPUModelRunner._generate_process_reqs_hidden_states",),
                Consequence.REACHES,
                "the step calls it, and hooks surround that call",
            ),
            Elsewhere(
                (
                    "vllm_ascend/worker/model_runner_v1.py:NPUModelRunner._dummy_run",
                    "vllm_ascend/worker/model_runner_v1.py:NPUModelRunner._generate_dummy_run_hidden_states",
                ),
                Consequence.HARMLESS,
                "a worker's dummy step, for warm-up or to stay in step with other ranks; it has no requests",
            ),
            Elsewhere(
                ("vllm_ascend/torchair/torchair_model_runner.py:*",),
                Consequence.REFUSED,
                "torchair compiles the step to a graph whose replay runs no Python; a method refuses such graphs",
                refused_by=refusals.PLATFORM,
            ),
            Elsewhere(
                ("vllm_ascend/spec_decode/*:*", "vllm_ascend/worker/mtp_proposer_v1.py:*"),
                Consequence.REFUSED,
                "the forward of a draft model; a method refuses draft models before the model is loaded",
                refused_by=refusals.DRAFTS,
            ),
        ),
    ),
)

MODEL_RUNNER = Transform(
    id="ascend.model_runner",
    module=Module("ascend.model_runner", "model_runner", (ModulePath("vllm_ascend/worker/model_runner_v1.py"),)),
    governance=RECORD,
    rules=(
        *_update_rules("ascend.model_runner", "NPUModelRunner._update_states", UPDATE_ELSEWHERE),
        *_forward_rules(),
    ),
    cases=cases_beside(__file__, "model_runner"),
    engine_tests=(EngineTest("tests/e2e/test_ascend.py::test_each_step_of_its_runner_calls_its_hooks"),),
    needs=("worker",),
    opt_in=("ascend.model_runner.blocks-updated",),
    census=CENSUS,
)

UPDATE_STATES = Transform(
    id="ascend.update_states",
    module=Module(
        "ascend.update_states",
        "model_runner",
        (ModulePath("vllm_ascend/patch/worker/patch_model_runner.py"),),
        (
            Absent(Releases(before="0.12.0rc1"), "the state update is the runner's own: ascend.model_runner has it"),
            Absent(Releases(since="0.14.0rc1"), "the state update is vLLM's, inherited or called through super()"),
        ),
    ),
    governance=Governance(
        why="A patch in 0.13.0 replaces GPUModelRunner._update_states with a copy that lacks the hooks of vLLM's "
        "overlay.",
        how="The same calls in the copy, so that it has all hooks of the function that it replaces.",
        processes=(Process.WORKER,),
        upstream=RECORD.upstream,
        removal="0.13.0 is no longer supported; later releases do not replace the function.",
    ),
    rules=_update_rules("ascend.update_states", "_update_states"),
    cases=cases_beside(__file__, "update_states"),
    engine_tests=(EngineTest("tests/e2e/test_ascend.py::test_each_step_of_its_runner_calls_its_hooks"),),
    needs=("worker",),
    opt_in=("ascend.update_states.blocks-updated",),
    not_counted="State updates are counted with the runners, under ascend.model_runner.",
)


def _clear_rule(name: str, cls: str) -> Rule:
    native = Upstreamed(Scope(f"{cls}.clear_row"), f"{cls}.clear_row is vLLM Ascend's own from 0.23.0")
    return Rule(f"ascend.block_table.{name}", (Variant(Scope(cls), Method("add_row", CLEAR)),), upstreamed=native)


BLOCK_TABLE = Transform(
    id="ascend.block_table",
    module=Module(
        "ascend.block_table",
        "model_runner",
        (ModulePath("vllm_ascend/worker/block_table.py"),),
        (Absent(Releases(before="0.11.0"), "the runner uses vLLM's block tables"),),
    ),
    governance=Governance(
        why="When a sparse method replaces a running request's blocks, attention must not read the stale tail of its "
        "row. Before 0.23.0 the table can overwrite a row but not clear it.",
        how="One method on each of the two table classes, with one call as its body. Releases that have the method "
        "keep theirs, and the rule reports that.",
        processes=(Process.WORKER,),
        upstream=Upstream(
            UpstreamStatus.RELEASED, "vLLM Ascend 0.23.0 and later have clear_row on both classes, as vLLM has"
        ),
        removal="The oldest supported release is 0.23.0 or newer, all of which have clear_row.",
    ),
    rules=(_clear_rule("clear-row", "BlockTable"), _clear_rule("clear-row-groups", "MultiGroupBlockTable")),
    cases=cases_beside(__file__, "block_table"),
    not_run="Its method is run on tensors by test_ascend_modules.py; an engine with it needs an NPU.",
    needs=("worker",),
    opt_in=("ascend.block_table",),
    not_counted="The rules add to two classes a method that later releases have; there are no other such places.",
)

TRANSFORMS = (MODEL_RUNNER, UPDATE_STATES, BLOCK_TABLE)
