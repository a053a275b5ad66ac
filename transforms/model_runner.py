"""The V1 model runner: the step as a worker sees it, from its batch to its output."""

from __future__ import annotations

from transforms.engine.edits import AtStart, after, before
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.releases import Releases
from transforms.engine.rule import Module, ModulePath, Rule, Variant, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Case, Transform

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

UPDATE_GIVEN = """\
class GPUModelRunner:
    def _update_states(self, scheduler_output):
        {}for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)
        for req_id in scheduler_output.cached:
            if new_block_ids is not None:
                self.input_batch.block_table.append_row(new_block_ids, req_index)
{}        for req_id in scheduler_output.others:
            self.input_batch.remove_request(req_id)
"""
EXECUTE_GIVEN = """\
class GPUModelRunner:
    def execute_model(self, scheduler_output):
        with context():
{}            model_output = self._model_forward(input_ids=input_ids)
{}        return model_output
"""


def _update_case(name: str, head: str = "", tail: str = "") -> Case:
    mark = f"  # ucm: model_runner.{name}\n"
    added = UPDATE_GIVEN.format(head and head + mark + " " * 8, tail and " " * 12 + tail + mark)
    return Case(f"model_runner.{name}", UPDATE_GIVEN.format("", ""), added, "0.32.0")


def _execute_case(name: str, head: str = "", tail: str = "") -> Case:
    head, tail = (code and f"            {code}  # ucm: model_runner.{name}\n" for code in (head, tail))
    return Case(f"model_runner.{name}", EXECUTE_GIVEN.format("", ""), EXECUTE_GIVEN.format(head, tail), "0.32.0")


TRANSFORM = Transform(
    id="model_runner",
    module=MODULE,
    governance=Governance(
        why="A method builds its metadata from the batch that is about to run, replaces a request's blocks in the "
        "worker's tables, and drops its state when a request ends; the connector interface shows none of these.",
        how="One call at the start of the state update, one with the finished requests, one after each running "
        "request's new blocks are in its row, and a pair around the forward call, inside the forward context.",
        processes=(Process.WORKER,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "sparse offloading is being discussed there for models with an indexer of their own, not as hooks",
            "https://github.com/vllm-project/vllm/issues/48203",
        ),
        removal="The V1 runner is gone from every supported release, or vLLM gives plugins the same step callbacks.",
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
    cases=(
        _update_case("update-states", head=STATES),
        _update_case("requests-finished", head=FINISHED_REQUESTS),
        _update_case("blocks-updated", tail=BLOCKS),
        _execute_case("execute-begin", head=BEGIN),
        _execute_case("execute-finished", tail=FINISHED),
    ),
    needs=("worker",),
)
