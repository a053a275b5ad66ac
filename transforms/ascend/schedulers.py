"""The schedulers of vLLM Ascend with a ``schedule`` of their own: each copy gets the same hooks as vLLM's.

Most derive from vLLM's `Scheduler` and inherit the other hooks. In 0.11.0 the one for recomputation is a complete copy.
"""

from __future__ import annotations

from transforms.engine.cases import cases_beside
from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.edits import AtEnd, AtStart, after
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.members import Field
from transforms.engine.releases import Absent, Releases
from transforms.engine.rule import Module, ModulePath, Rule, Upstreamed, Variant, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import EngineTest, Transform
from transforms.scheduler import ADDED, FREED, INIT, LIMITED, NOTED, PREEMPT, PREEMPTED, steps

RECOMPUTE = "self.kv_cache_manager.free(recomputed_req)"
#: The tests on engines with its schedulers.
STEPS = "tests/e2e/test_ascend.py::test_the_hooks_of_a_step_and_of_a_preemption"
PREEMPTED_ESA = "tests/e2e/test_ascend.py::test_esa_answers_alike_after_a_preemption"
FIELD = "ucm_sparse_meta: object = None"

CORE = "vllm_ascend/core/"
BALANCE = "vllm_ascend/patch/platform/patch_balance_schedule.py"
DELIVERY = "vllm_ascend/patch/platform/patch_kv_delivery_preemption.py"
FROM_VLLM = "every preemption goes through vLLM's own _preempt_request, which is hooked"
INHERITED = Absent(Releases(since="0.13.0"), "the scheduler derives from vLLM's and inherits its hooked methods")
ADDED_ABSENT = Absent(Releases(since="0.25.1rc1"), "a new request goes through vLLM's own add_request")
DRAFTS_ABSENT = (
    Absent(Releases(before="0.12.0rc1"), "draft tokens of a waiting request are not counted yet"),
    Absent(Releases(since="0.25.1rc1"), "draft tokens of a waiting request are no longer counted"),
)
RECOMPUTED_ABSENT = Absent(
    Releases(since="0.25.1rc1"),
    "a request to be recomputed elsewhere ends through finish_requests, like any other",
)


def _scheduler(  # noqa: PLR0913 - how the schedulers differ
    id: str,  # noqa: A002 - the field's name
    cls: str,
    path: str,
    released: Absent | None,
    *,
    output: str = "SchedulerOutput",
    inline: bool = False,
    census: tuple[Census, ...] = (),
    whole: bool = False,
    more: tuple[Rule, ...] = (),
    opt_in: tuple[str, ...] = (),
    also_absent: tuple[Absent, ...] = (),
    reads_beside: bool = False,
    engine_tests: tuple[EngineTest, ...] = (),
) -> Transform:
    """Make the transform of one scheduler.

    Args:
        id: Its name.
        cls: The class.
        path: Its module.
        released: The releases without it.
        output: The class of its output.
        inline: Whether it preempts within ``schedule``, rather than through vLLM's own method.
        whole: Whether it always computes the rest of a request in one step.
        census: Its censuses.
        more: More rules.
        opt_in: Those of them that no shipped feature uses.
        also_absent: More releases without it.
        reads_beside: Whether it reads files next to itself.
        engine_tests: The tests on engines of some of its rules.
    """
    rules = [*steps(id, cls, output)[2 if whole else 0 :]]
    if inline:
        rules.append(_preempted(id, cls, "preempted_req", PREEMPT.format("preempted_req")))
    return Transform(
        id=id,
        module=Module(
            id, "scheduler", (ModulePath(path),), (*((released,) if released else ()), *also_absent), reads_beside
        ),
        governance=Governance(
            why="This scheduler has its own copy of vLLM's schedule(), which bypasses the hooks in vLLM's.",
            how="The same calls as in vLLM's, at the same statements: "
            + ("" if whole else "when a request's tokens are counted, ")
            + "when the step is built"
            + (", and when a request is preempted." if inline or more else f"; {FROM_VLLM}."),
            processes=(Process.ENGINE_CORE,),
            upstream=Upstream(
                UpstreamStatus.NOT_SUBMITTED,
                "vLLM would need the hooks first, and it has taken no position on the proposed framework",
                "https://github.com/vllm-project/vllm/issues/21772",
            ),
            removal="The scheduler calls super().schedule(), or vLLM Ascend has removed it.",
        ),
        rules=(*rules, *more),
        cases=cases_beside(__file__, id.removeprefix("ascend.")),
        engine_tests=(EngineTest(STEPS), *engine_tests),
        opt_in=opt_in,
        census=census,
        not_counted=""
        if census
        else "Schedulers, tokens, steps, preemptions and frees are counted under ascend.scheduler.",
    )


def _preempted(transform: str, cls: str, request: str, anchor: str, absent: tuple[Absent, ...] = ()) -> Rule:
    name = request.removesuffix("_req")
    return rule(
        f"{transform}.{name}", Scope(f"{cls}.schedule"), after(anchor, PREEMPTED.format(request)), absent=absent
    )


def _recompute_rules() -> tuple[Rule, ...]:
    """Return the rules that only the scheduler for recomputation needs; in 0.11.0 it is a complete copy of vLLM's."""
    t, cls, output = "ascend.recompute_scheduler", "RecomputeScheduler", "RecomputeSchedulerOutput"
    inherited = Upstreamed(
        Scope(f"{cls}.__init__"), "it calls super().__init__, which vLLM's overlay hooks", "super().__init__(...)"
    )
    derived = Upstreamed(
        Scope(output),
        "the class derives from SchedulerOutput, which has the field from vLLM's overlay",
        "recomputed_reqs: list[RecomputeReqInfo] | None = None",
    )
    init = Rule(
        f"{t}.init", (Variant(Scope(f"{cls}.__init__"), AtEnd(INIT)),), absent=(INHERITED,), upstreamed=inherited
    )
    freed = rule(f"{t}.freed", Scope(f"{cls}._free_request"), AtStart(FREED), absent=(INHERITED,))
    meta = Rule(f"{t}.sparse-meta", (Variant(Scope(output), Field(FIELD)),), upstreamed=derived)
    return (
        rule(
            f"{t}.waiting-tokens-of-drafts",
            Scope(f"{cls}.schedule"),
            after(
                "num_new_tokens = request.num_tokens_with_spec - num_computed_tokens",
                LIMITED.format("num_computed_tokens"),
            ),
            absent=DRAFTS_ABSENT,
        ),
        _preempted(t, cls, "preempted_req", PREEMPT.format("preempted_req"), (INHERITED,)),
        _preempted(t, cls, "recomputed_req", RECOMPUTE, (RECOMPUTED_ABSENT,)),
        init,
        rule(f"{t}.request-added", Scope(f"{cls}.add_request"), after(NOTED, ADDED), absent=(ADDED_ABSENT,)),
        freed,
        meta,
    )


def _own(name: str) -> str:
    return f"ascend.{name}scheduler"


NAMES = ("", "recompute_", "dynamic_batch_", "profiling_chunk_", "balance_", "kv_delivery_", "dyntra_lb_")
OUTPUTS = tuple(f"{_own(name)}.output" for name in NAMES)
TOKENS = tuple(f"{_own(name)}.{of}-tokens" for name in NAMES if name for of in ("running", "waiting"))
PREEMPTIONS = tuple(f"{_own(name)}.preempted" for name in ("", "recompute_", "dynamic_batch_", "kv_delivery_"))
CENSUS = (
    Census(
        "ascend.scheduler.schedulers",
        "schedulers with their own step, and overrides of hooked methods",
        ("def schedule", "def _preempt_request", "def _free_request"),
        rules=(*OUTPUTS, "ascend.recompute_scheduler.freed", "ascend.kv_delivery_scheduler.preempted"),
        elsewhere=(
            Elsewhere(
                (
                    "vllm_ascend/core/short_request_first_scheduler.py:ShortRequestFirstSchedulerMixin._preempt_request",
                    "vllm_ascend/core/batch_job_aware_scheduler.py:BatchJobAwareScheduler.*",
                    "vllm_ascend/core/dyntra_lb_scheduler.py:DyntraLBPolicyMixin.*",
                ),
                Consequence.REACHES,
                "it calls super()'s, which is hooked in vLLM's own scheduler or in the copy that it is mixed with",
            ),
        ),
    ),
    Census(
        "ascend.scheduler.tokens",
        "places that decide how many tokens of a request a step computes",
        (
            "num_new_tokens = _.num_tokens - _",
            "_.num_tokens_with_spec + _",
            "_.num_tokens_with_spec - _",
        ),
        rules=(*TOKENS, "ascend.recompute_scheduler.waiting-tokens-of-drafts"),
        elsewhere=(
            Elsewhere(
                (f"{CORE}scheduler.py:AscendScheduler.schedule",),
                Consequence.REFUSED,
                "it runs only without chunked prefill, computes a request in one step and asserts that; ESA has to "
                "recompute a preempted request in parts, so it stops the engine with an error there",
                refused_by="ucm.sparse.esa.resident:reading",
            ),
        ),
    ),
    Census(
        "ascend.scheduler.outputs",
        "constructions of a step's output",
        (
            "SchedulerOutput(...)",
            "RecomputeSchedulerOutput(...)",
            "SchedulerOutput.make_empty(...)",
            "RecomputeSchedulerOutput.make_empty(...)",
        ),
        rules=OUTPUTS,
        elsewhere=(),
    ),
    Census(
        "ascend.scheduler.preemptions",
        "places that preempt a request",
        ("_.status = RequestStatus.PREEMPTED", "_._preempt_request(...)"),
        rules=PREEMPTIONS,
        elsewhere=(
            Elsewhere(
                (
                    f"{CORE}dyntra_lb_scheduler.py:DyntraLBScheduler.schedule",
                    f"{CORE}dyntra_lb_scheduler.py:DyntraLBPolicyMixin._preempt_request",
                    f"{CORE}recompute_scheduler.py:RecomputeScheduler._preempt_or_recompute",
                    f"{CORE}scheduler_profiling_chunk.py:ProfilingChunkScheduler.schedule",
                    f"{CORE}short_request_first_scheduler.py:ShortRequestFirstSchedulerMixin._preempt_request",
                    f"{BALANCE}:BalanceScheduler.schedule",
                    f"{DELIVERY}:KVDeliveryScheduler.schedule",
                    f"{DELIVERY}:KVDeliveryScheduler.reset_prefix_cache",
                ),
                Consequence.REACHES,
                "it preempts through _preempt_request, its own or vLLM's, which is hooked; in 0.18.0 one also "
                "restores the status of a preempted request once its KV is loaded, which frees no blocks",
            ),
            Elsewhere(
                (f"{CORE}recompute_scheduler.py:RecomputeScheduler.schedule",),
                Consequence.REACHES,
                "it preempts through vLLM's own _preempt_request, which is hooked",
                releases=Releases(since="0.13.0"),
            ),
            Elsewhere(
                (f"{CORE}dyntra_lb_scheduler.py:DyntraLBPolicyMixin._lb_pause_request",),
                Consequence.HARMLESS,
                "the request is paused, and keeps all of its blocks",
            ),
        ),
    ),
    Census(
        "ascend.scheduler.frees",
        "places that free a request's blocks",
        ("_.kv_cache_manager.free(...)", "_._free_request(...)", "_._free_blocks(...)"),
        rules=("ascend.recompute_scheduler.recomputed", "ascend.recompute_scheduler.freed"),
        elsewhere=(
            Elsewhere(
                (
                    f"{CORE}scheduler.py:AscendScheduler.schedule",
                    f"{CORE}recompute_scheduler.py:RecomputeScheduler.schedule",
                    f"{CORE}scheduler_dynamic_batch.py:SchedulerDynamicBatch.schedule",
                ),
                Consequence.REACHES,
                "it frees the blocks of a preempted request; the next statement reports the preemption",
            ),
            Elsewhere(
                (
                    f"{CORE}recompute_scheduler.py:RecomputeScheduler.finish_requests",
                    f"{CORE}recompute_scheduler.py:RecomputeScheduler.update_from_output",
                    "vllm_ascend/patch/platform/patch_0_9_1/patch_core.py:finish_requests",
                    f"{DELIVERY}:KVDeliveryScheduler.update_from_output",
                    f"{CORE}batch_job_aware_scheduler.py:BatchJobAwareScheduler._free_request",
                    f"{CORE}dyntra_lb_scheduler.py:DyntraLBPolicyMixin._free_request",
                ),
                Consequence.REACHES,
                "it ends requests through the hooked _free_request, its own or vLLM's",
            ),
            Elsewhere(
                (f"{CORE}recompute_scheduler.py:RecomputeScheduler._free_blocks",),
                Consequence.REACHES,
                "the hooked _free_request calls it; other calls are for requests that have already ended",
            ),
            Elsewhere(
                (
                    "vllm_ascend/patch/platform/patch_0_9_1/patch_core.py:_update_from_kv_xfer_finished",
                    f"{CORE}recompute_scheduler.py:RecomputeScheduler._update_from_kv_xfer_finished",
                ),
                Consequence.HARMLESS,
                "the end of the request was already reported; its blocks were kept only for a transfer",
            ),
            Elsewhere(
                (f"{CORE}recompute_scheduler.py:RecomputeScheduler._update_waiting_for_remote_kv",),
                Consequence.HARMLESS,
                "a load failed before the request's first step; no method has freed any of its blocks",
            ),
            Elsewhere(
                (f"{CORE}batch_job_aware_scheduler.py:BatchJobAwareRequestQueue._admission_budget",),
                Consequence.HARMLESS,
                "it counts the pool's free blocks and frees none",
            ),
        ),
    ),
)

TRANSFORMS = (
    _scheduler(
        "ascend.scheduler",
        "AscendScheduler",
        f"{CORE}scheduler.py",
        Absent(Releases(since="0.12.0rc1"), "the scheduler was removed: vLLM's own runs, or another one of these"),
        inline=True,
        whole=True,
        census=CENSUS,
    ),
    _scheduler(
        "ascend.recompute_scheduler",
        "RecomputeScheduler",
        f"{CORE}recompute_scheduler.py",
        Absent(Releases(before="0.11.0"), "the scheduler for recomputation does not exist yet"),
        output="RecomputeSchedulerOutput",
        more=_recompute_rules(),
        opt_in=("ascend.recompute_scheduler.request-added",),
        engine_tests=(
            EngineTest(f"{PREEMPTED_ESA}[RecomputeScheduler]", ("ascend.recompute_scheduler.waiting-tokens",)),
            EngineTest(
                f"{PREEMPTED_ESA}[DraftsRecomputeScheduler]", ("ascend.recompute_scheduler.waiting-tokens-of-drafts",)
            ),
        ),
    ),
    _scheduler(
        "ascend.dynamic_batch_scheduler",
        "SchedulerDynamicBatch",
        f"{CORE}scheduler_dynamic_batch.py",
        Absent(Releases(before="0.13.0rc1"), "the scheduler for batches of varying size does not exist yet"),
        inline=True,
        reads_beside=True,
        also_absent=(Absent(Releases(since="0.24.0rc1"), "the scheduler for batches of varying size was removed"),),
    ),
    _scheduler(
        "ascend.profiling_chunk_scheduler",
        "ProfilingChunkScheduler",
        f"{CORE}scheduler_profiling_chunk.py",
        Absent(Releases(before="0.23.0"), "the scheduler that measures its chunks does not exist yet"),
    ),
    _scheduler(
        "ascend.balance_scheduler",
        "BalanceScheduler",
        BALANCE,
        Absent(Releases(before="0.13.0rc1"), "the scheduler that balances between ranks does not exist yet"),
        engine_tests=(EngineTest(f"{PREEMPTED_ESA}[BalanceScheduler]", ("ascend.balance_scheduler.waiting-tokens",)),),
    ),
    _scheduler(
        "ascend.kv_delivery_scheduler",
        "KVDeliveryScheduler",
        DELIVERY,
        Absent(Releases(before="0.26.0rc1"), "vLLM's own scheduler runs, or one derived from it"),
        also_absent=(Absent(Releases(since="0.27.1rc1"), "vLLM's own scheduler delivers KV before it preempts"),),
        more=(
            rule(
                "ascend.kv_delivery_scheduler.preempted",
                Scope("KVDeliveryScheduler._preempt_request"),
                after(PREEMPT.format("request"), PREEMPTED.format("request")),
            ),
        ),
    ),
    _scheduler(
        "ascend.dyntra_lb_scheduler",
        "DyntraLBScheduler",
        f"{CORE}dyntra_lb_scheduler.py",
        Absent(Releases(before="0.27.1rc1"), "the scheduler that balances by pausing requests does not exist yet"),
    ),
)
