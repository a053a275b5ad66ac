"""The scheduler: hooks for the events in a request's life, and for each step."""

from __future__ import annotations

from transforms import refusals
from transforms.engine.cases import cases_beside
from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.edits import AtEnd, AtStart, after
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.releases import Releases
from transforms.engine.rule import Module, ModulePath, Rule, Variant, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import EngineTest, Transform

MODULE = Module(id="scheduler", group="scheduler", paths=(ModulePath("vllm/v1/core/sched/scheduler.py"),))

INIT = "_ucm_hooks.scheduler_init(self)"
ADDED = "_ucm_hooks.request_added(self, request)"
LIMITED = "num_new_tokens = _ucm_hooks.limit_new_tokens(self, request, {}, num_new_tokens)"
OUTPUT = "_ucm_hooks.scheduler_output_built(self, scheduler_output)"
PREEMPTED = "_ucm_hooks.request_preempted(self, {})"
FREED = "_ucm_hooks.request_freed(self, request)"
NOTED = "self.requests[request.request_id] = request"
#: Counts a running request's tokens, including the placeholders of asynchronous steps; `RUNNING_BEFORE` excludes them.
RUNNING = (
    "num_new_tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens"
)
RUNNING_BEFORE = "num_new_tokens = request.num_tokens_with_spec - request.num_computed_tokens"
#: The same for a waiting request, whose computed tokens are a local variable.
WAITING = "num_new_tokens = request.num_tokens - num_computed_tokens"
#: A test of a method that limits a step's tokens.
FLAT = "tests/e2e/test_sparse_esa.py::test_the_blocks_of_a_request_stay_flat"
PREEMPT = "{}.status = RequestStatus.PREEMPTED"


def steps(transform: str, cls: str, output: str) -> tuple[Rule, ...]:
    """Make the rules for the tokens and the output of a scheduler's step, in vLLM's class or a copy of it.

    Args:
        transform: The id of their transform.
        cls: The scheduler's class.
        output: The class of its output.
    """
    schedule = Scope(f"{cls}.schedule")
    limited = LIMITED.format("request.num_computed_tokens")
    running = Rule(
        f"{transform}.running-tokens",
        (
            Variant(schedule, after(RUNNING, limited), Releases(since="0.10.0"), "with placeholders"),
            Variant(schedule, after(RUNNING_BEFORE, limited), Releases(before="0.10.0"), "without"),
        ),
    )
    return (
        running,
        rule(f"{transform}.waiting-tokens", schedule, after(WAITING, LIMITED.format("num_computed_tokens"))),
        rule(f"{transform}.output", schedule, after(f"scheduler_output = {output}(...)", OUTPUT)),
    )


SCHEDULER = "vllm/v1/core/sched/scheduler.py:Scheduler."
V0 = Elsewhere(
    ("vllm/core/scheduler.py:Scheduler.schedule",),
    Consequence.REFUSED,
    "part of the V0 engine, which has its own KV cache and workers; a method refuses to run on it",
    refused_by=refusals.RUNNER,
    releases=Releases(before="0.11.0"),
)
CENSUS = (
    Census(
        "scheduler.schedulers",
        "schedulers, and classes derived from vLLM's",
        (
            "def schedule",
            "def _preempt_request",
            "def _free_request",
            "class (Scheduler)",
            "class (AsyncScheduler)",
            "class (SchedulerInterface)",
        ),
        rules=("scheduler.init", "scheduler.output", "scheduler.preempted", "scheduler.freed"),
        elsewhere=(
            V0,
            Elsewhere(
                (
                    "vllm/v1/core/sched/async_scheduler.py:AsyncScheduler",
                    "vllm/v1/core/sched/diffusion_scheduler.py:Diffusion*Scheduler",
                    "vllm/v1/core/sched/diffusion_scheduler.py:DiffusionAsyncScheduler.schedule",
                ),
                Consequence.REACHES,
                "it inherits the hooked methods; an override calls super()'s",
            ),
            Elsewhere(
                (
                    "vllm/v1/core/sched/interface.py:SchedulerInterface.schedule",
                    "vllm/v1/core/sched/scheduler.py:Scheduler",
                ),
                Consequence.HARMLESS,
                "only the interface; the methods of the scheduler that implements it are hooked",
            ),
            Elsewhere(
                ("vllm/v1/attention/backends/*:*MetadataBuilder.build.schedule", "vllm/models/*/cutedsl/*:*.schedule"),
                Consequence.HARMLESS,
                "it schedules a kernel's thread blocks, not requests",
            ),
        ),
    ),
    Census(
        "scheduler.tokens",
        "places that decide how many tokens of a request a step computes",
        (
            "num_new_tokens = _.num_tokens - _",
            "_.num_tokens_with_spec + _",
            "_.num_tokens_with_spec - _",
        ),
        rules=("scheduler.running-tokens", "scheduler.waiting-tokens"),
    ),
    Census(
        "scheduler.outputs",
        "constructions of a step's SchedulerOutput",
        ("SchedulerOutput(...)", "_.SchedulerOutput(...)", "SchedulerOutput.make_empty(...)"),
        rules=("scheduler.output",),
        elsewhere=(
            Elsewhere(
                (
                    "vllm/v1/worker/gpu/*:*",
                    "vllm/v1/worker/gpu_worker.py:Worker.execute_dummy_batch",
                    "vllm/benchmarks/forward/*:*",
                ),
                Consequence.HARMLESS,
                "a worker's dummy step, for warm-up or to stay in step with other ranks; it has no requests",
            ),
            Elsewhere(
                ("vllm/v1/fault_tolerance/engine_core_sentinel.py:EngineCoreSentinel._drain_batch_queue",),
                Consequence.HARMLESS,
                "an empty step: it has no requests, so there is no metadata to send",
            ),
        ),
    ),
    Census(
        "scheduler.preemptions",
        "places that preempt a request",
        ("_.status = RequestStatus.PREEMPTED", "_._preempt_request(...)"),
        rules=("scheduler.preempted",),
        elsewhere=(
            Elsewhere(
                (SCHEDULER + "reset_prefix_cache", SCHEDULER + "schedule"),
                Consequence.REACHES,
                "it preempts through _preempt_request; from 0.14.1 to 0.17.1 schedule also restores the status of a "
                "preempted request once its KV is loaded, which frees no blocks",
                releases=Releases(since="0.12.0"),
            ),
            Elsewhere(
                (SCHEDULER + "_handle_blocked_waiting_request", SCHEDULER + "_try_promote_blocked_waiting_request"),
                Consequence.HARMLESS,
                "it restores the status of a preempted request once its KV is loaded; the preemption itself was "
                "reported",
            ),
        ),
    ),
    Census(
        "scheduler.frees",
        "places that free a request's blocks",
        ("_._free_request(...)", "_._free_request_blocks(...)", "_._free_blocks(...)", "_.kv_cache_manager.free(...)"),
        rules=("scheduler.preempted", "scheduler.freed"),
        elsewhere=(
            Elsewhere(
                (SCHEDULER + "finish_requests", SCHEDULER + "update_from_output"),
                Consequence.REACHES,
                "it ends requests through _free_request, which is hooked",
            ),
            Elsewhere(
                (SCHEDULER + "_free_blocks", SCHEDULER + "_free_request_blocks"),
                Consequence.REACHES,
                "the hooked _free_request and _preempt_request call it; other calls are for requests that have ended",
            ),
            Elsewhere(
                (SCHEDULER + "_update_from_kv_xfer_finished",),
                Consequence.HARMLESS,
                "the end of the request was already reported; its blocks were kept only for a transfer",
            ),
            Elsewhere(
                (SCHEDULER + "_update_waiting_for_remote_kv",),
                Consequence.HARMLESS,
                "a load failed before the request's first step; no method has freed any of its blocks",
            ),
        ),
    ),
    Census(
        "scheduler.admissions",
        "places that register a new request",
        ("self.requests[_] = _",),
        rules=("scheduler.request-added",),
        elsewhere=(
            Elsewhere(
                (
                    "vllm/v1/worker/*_model_runner.py:*ModelRunner._update_states",
                    "vllm/distributed/kv_transfer/kv_connector/*:*",
                ),
                Consequence.HARMLESS,
                "a worker's or connector's own record of a request that the scheduler has admitted",
            ),
        ),
    ),
)

CREATED = rule("scheduler.init", Scope("Scheduler.__init__"), AtEnd(INIT))
PREEMPTION = Rule(
    "scheduler.preempted",
    (
        Variant(
            Scope("Scheduler._preempt_request"),
            after(PREEMPT.format("request"), PREEMPTED.format("request")),
            Releases(since="0.12.0"),
            "method",
        ),
        Variant(
            Scope("Scheduler.schedule"),
            after(PREEMPT.format("preempted_req"), PREEMPTED.format("preempted_req")),
            Releases(before="0.12.0"),
            "inline",
        ),
    ),
)
ENDED = rule("scheduler.freed", Scope("Scheduler._free_request"), AtStart(FREED))

TRANSFORM = Transform(
    id="scheduler",
    module=MODULE,
    governance=Governance(
        why="A sparse method keeps fewer KV blocks than a request's tokens fill. It has to follow each request from "
        "arrival to end, and to send its decisions to the workers with each step.",
        how="One call at each event in a request's life, one where the scheduler decides how many of its tokens a step "
        "computes, and one that adds the method's metadata to the step's output.",
        processes=(Process.ENGINE_CORE,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED,
            "a framework with the same hooks was proposed there and went stale without a decision",
            "https://github.com/vllm-project/vllm/issues/21772",
        ),
        removal="vLLM lets a plugin extend the scheduler's allocation and output steps without copying them.",
    ),
    rules=(
        CREATED,
        rule("scheduler.request-added", Scope("Scheduler.add_request"), after(NOTED, ADDED)),
        *steps("scheduler", "Scheduler", "SchedulerOutput"),
        PREEMPTION,
        ENDED,
    ),
    cases=cases_beside(__file__, "scheduler"),
    engine_tests=(
        EngineTest("tests/e2e/test_hooks.py::test_scheduler_hooks_count_what_the_engine_counts"),
        EngineTest(FLAT, ("scheduler.running-tokens", "scheduler.waiting-tokens")),
        EngineTest("tests/e2e/test_hooks.py::test_fields_of_the_step_reach_the_worker", ("scheduler.output",)),
    ),
    opt_in=("scheduler.request-added",),
    census=CENSUS,
)
