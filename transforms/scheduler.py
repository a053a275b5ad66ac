"""The scheduler: a sparse method's view of requests, and its say in how many slots each of them gets."""

from __future__ import annotations

from transforms.engine.edits import AtEnd, AtStart, after
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.members import Keyword
from transforms.engine.releases import Releases
from transforms.engine.rule import Module, ModulePath, Rule, Variant, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Case, Transform

MODULE = Module(id="scheduler", group="scheduler", paths=(ModulePath("vllm/v1/core/sched/scheduler.py"),))

ALLOCATE = "self.kv_cache_manager.allocate_slots(request, ...)"
RUNNING_SLOTS = "_ucm_hooks.num_slots_sparsed(self, request, num_new_tokens)"
WAITING_SLOTS = "_ucm_hooks.num_slots_sparsed(self, request, num_new_tokens, num_external_computed_tokens)"
PREEMPTED = "_ucm_hooks.request_preempted(self, {})"


def _waiting(name: str, peek: str, releases: Releases) -> Variant:
    edit = Keyword(ALLOCATE, "num_slots_sparsed", WAITING_SLOTS)
    return Variant(Scope("Scheduler.schedule", loop_with=peek), edit, releases, name)


def _scheduler(method: str, *body: str) -> str:
    return "class Scheduler:\n    def " + method + ":\n" + "".join(f"        {line}\n" for line in body)


TRANSFORM = Transform(
    id="scheduler",
    module=MODULE,
    governance=Governance(
        why="A sparse method keeps fewer KV blocks than a request has tokens: it has to size every allocation, know "
        "each request's life, and send what it decided to the workers with the step.",
        how="One call at each event of a request's life, one keyword at each of the two allocate_slots calls, and one "
        "call that fills the step's output. The slots are asked for at the call that uses them, so no path that "
        "skips a request leaves an estimate behind.",
        processes=(Process.ENGINE_CORE,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "the framework proposed there hooks the same places; it went stale without a decision",
            "https://github.com/vllm-project/vllm/issues/21772",
        ),
        removal="vLLM accepts a scheduler class from a plugin whose allocation and output steps can be extended alone.",
    ),
    rules=(
        rule("scheduler.init", Scope("Scheduler.__init__"), AtEnd("_ucm_hooks.scheduler_init(self)")),
        rule(
            "scheduler.request-added",
            Scope("Scheduler.add_request"),
            after("self.requests[request.request_id] = request", "_ucm_hooks.request_added(self, request)"),
        ),
        rule(
            "scheduler.slots-running",
            Scope("Scheduler.schedule", loop_with="request = self.running[req_index]"),
            Keyword(ALLOCATE, "num_slots_sparsed", RUNNING_SLOTS),
        ),
        Rule(
            "scheduler.slots-waiting",
            (
                _waiting("queue", "request = request_queue.peek_request()", Releases(since="0.18.1")),
                _waiting("waiting", "request = self.waiting.peek_request()", Releases(since="0.9.2", before="0.18.1")),
                _waiting("first", "request = self.waiting[0]", Releases(before="0.9.2")),
            ),
        ),
        rule(
            "scheduler.output",
            Scope("Scheduler.schedule"),
            after(
                "scheduler_output = SchedulerOutput(...)", "_ucm_hooks.scheduler_output_built(self, scheduler_output)"
            ),
        ),
        Rule(
            "scheduler.preempted",
            (
                Variant(
                    Scope("Scheduler._preempt_request"),
                    after("request.status = RequestStatus.PREEMPTED", PREEMPTED.format("request")),
                    Releases(since="0.12.0"),
                    "method",
                ),
                Variant(
                    Scope("Scheduler.schedule"),
                    after("preempted_req.status = RequestStatus.PREEMPTED", PREEMPTED.format("preempted_req")),
                    Releases(before="0.12.0"),
                    "inline",
                ),
            ),
        ),
        rule("scheduler.freed", Scope("Scheduler._free_request"), AtStart("_ucm_hooks.request_freed(self, request)")),
    ),
    cases=(
        Case(
            "scheduler.init",
            _scheduler("__init__(self)", "self.running = []"),
            _scheduler("__init__(self)", "self.running = []", "_ucm_hooks.scheduler_init(self)  # ucm: scheduler.init"),
            "0.32.0",
        ),
        Case(
            "scheduler.request-added",
            _scheduler("add_request(self, request)", "if new:", "    self.requests[request.request_id] = request"),
            _scheduler(
                "add_request(self, request)",
                "if new:",
                "    self.requests[request.request_id] = request",
                "    _ucm_hooks.request_added(self, request)  # ucm: scheduler.request-added",
            ),
            "0.32.0",
        ),
        Case(
            "scheduler.slots-running",
            _scheduler(
                "schedule(self)",
                "while req_index < n:",
                "    request = self.running[req_index]",
                "    blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)",
                "blocks = self.kv_cache_manager.allocate_slots(request, other)",
            ),
            _scheduler(
                "schedule(self)",
                "while req_index < n:",
                "    request = self.running[req_index]",
                "    blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens, "
                f"num_slots_sparsed={RUNNING_SLOTS})",
                "blocks = self.kv_cache_manager.allocate_slots(request, other)",
            ),
            "0.32.0",
        ),
        Case(
            "scheduler.slots-waiting",
            _scheduler(
                "schedule(self)",
                "while budget:",
                "    request = request_queue.peek_request()",
                "    blocks = self.kv_cache_manager.allocate_slots(",
                "        request,",
                "        num_new_tokens,",
                "    )",
            ),
            _scheduler(
                "schedule(self)",
                "while budget:",
                "    request = request_queue.peek_request()",
                "    blocks = self.kv_cache_manager.allocate_slots(",
                "        request,",
                "        num_new_tokens,",
                f"        num_slots_sparsed={WAITING_SLOTS},  # ucm: scheduler.slots-waiting",
                "    )",
            ),
            "0.32.0",
        ),
        Case(
            "scheduler.output",
            _scheduler("schedule(self)", "scheduler_output = SchedulerOutput(a=1)", "return scheduler_output"),
            _scheduler(
                "schedule(self)",
                "scheduler_output = SchedulerOutput(a=1)",
                "_ucm_hooks.scheduler_output_built(self, scheduler_output)  # ucm: scheduler.output",
                "return scheduler_output",
            ),
            "0.32.0",
        ),
        Case(
            "scheduler.preempted",
            _scheduler("_preempt_request(self, request)", "request.status = RequestStatus.PREEMPTED"),
            _scheduler(
                "_preempt_request(self, request)",
                "request.status = RequestStatus.PREEMPTED",
                "_ucm_hooks.request_preempted(self, request)  # ucm: scheduler.preempted",
            ),
            "0.32.0",
        ),
        Case(
            "scheduler.freed",
            _scheduler("_free_request(self, request)", "assert request.is_finished()"),
            _scheduler(
                "_free_request(self, request)",
                "_ucm_hooks.request_freed(self, request)  # ucm: scheduler.freed",
                "assert request.is_finished()",
            ),
            "0.32.0",
        ),
    ),
    needs=("kv_cache_manager",),
)
