"""The registry: three patches of `vllm_ascend/patch/platform`, each one insertion into vLLM."""

from __future__ import annotations

from pathlib import Path

from transforms.engine.cases import cases_beside
from transforms.engine.edits import AtEnd, after, before
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.registry import Registry
from transforms.engine.rule import Module, ModulePath, Rule, Upstreamed, Variant, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Seam, Transform
from transforms.registry import VLLM

PLACE = Path(__file__).parent
SEAM = Seam("ascend_patches.hooks")
READ = "read_timeout = self.ReadTimeoutWithWarnings(...)"

RECHECK = Rule(
    "npu.queue.recheck",
    (Variant(Scope("MessageQueue.acquire_read"), after(READ, "_ascend_patches_hooks.recheck(read_timeout)")),),
    upstreamed=Upstreamed(
        Scope("MessageQueue.ReadTimeoutWithWarnings.timeout_ms"),
        "a reader waits no longer than SHM_READER_RECHECK_INTERVAL_MS",
        "wait_ms = SHM_READER_RECHECK_INTERVAL_MS",
    ),
)
ALLOCATED = Scope("MambaManager.get_num_blocks_to_allocate")
EXTERNAL = (
    "_ascend_patches_hooks.external_blocks("
    "len(new_computed_blocks) * self.block_size, total_computed_tokens, num_tokens_main_model)"
)
BY_TOKENS = "return super().get_num_blocks_to_allocate(...)"
BY_BLOCKS = "return num_new_blocks + num_evictable_computed_blocks"
OF_ALL = rule("npu.mamba.external-of-all", ALLOCATED, before(BY_TOKENS, f"num_tokens += self.block_size * {EXTERNAL}"))
OF_ALIGNED = rule("npu.mamba.external-of-aligned", ALLOCATED, before(BY_BLOCKS, f"num_new_blocks += {EXTERNAL}"))
STARTED = rule(
    "npu.engine_core.started",
    Scope("EngineCore.__init__"),
    AtEnd("_ascend_patches_hooks.engine_core_started(self)"),
)

QUEUE = Transform(
    id="npu.queue",
    module=Module("npu.queue", "npu_queue", (ModulePath("vllm/distributed/device_communicators/shm_broadcast.py"),)),
    governance=Governance(
        why="A reader of the shared-memory queue waits for ever if the only notification of a message is lost.",
        how="The wait of each read is capped at five seconds, after which the reader checks again. The patch also "
        "releases a reader's slot when its caller fails; that changes lines and is left to the upstream fix.",
        processes=(Process.ENGINE_CORE, Process.WORKER),
        upstream=Upstream(
            UpstreamStatus.RELEASED,
            "vLLM 0.27.1 and later cap the wait; the rule reports that they do not need it",
            "https://github.com/vllm-project/vllm/pull/45224",
        ),
        removal="The oldest supported release caps the wait of a reader itself.",
    ),
    rules=(RECHECK,),
    cases=cases_beside(__file__, "queue"),
    not_counted="Only acquire_read waits for a message; the writer's waits end by their own deadline.",
    seam=SEAM,
)

MAMBA = Transform(
    id="npu.mamba",
    module=Module("npu.mamba", "npu_mamba", (ModulePath("vllm/v1/core/single_type_kv_cache_manager.py"),)),
    governance=Governance(
        why="If a connector loads a hit in the step that uses it, a mamba group takes one block more than it "
        "requested, and the pool may run out in the middle of an allocation.",
        how="The group requests one more block in such a step, at both places that count. The patch replaces vLLM's "
        "class with one that also looks up prefixes for context parallelism; this example leaves that half out.",
        processes=(Process.ENGINE_CORE,),
        upstream=Upstream(
            UpstreamStatus.SUBMITTED,
            "a mend of the count was sent to vLLM; vLLM Ascend keeps its patch until it is accepted",
            "https://github.com/vllm-project/vllm/pull/46892",
        ),
        removal="vLLM's own count includes the block that a synchronous load takes.",
    ),
    rules=(OF_ALL, OF_ALIGNED),
    cases=cases_beside(__file__, "mamba"),
    not_counted="MambaManager counts blocks only in this method, at the two hooked statements.",
    seam=SEAM,
)

ENGINE_CORE = Transform(
    id="npu.engine_core",
    module=Module("npu.engine_core", "npu_engine_core", (ModulePath("vllm/v1/engine/core.py"),)),
    governance=Governance(
        why="A scheduler that measures the duration of chunks can do so only once the workers are up.",
        how="One call at the end of the constructor starts the measurement. The patch wraps the constructor for "
        "this, and EngineCoreProc's entry point, so that spawned processes wrap it again; neither is needed here. From "
        "the constructor it also wraps two methods of the scheduler's class: update_from_output, to refine the "
        "measurement with the time of each step (_record_execution_timing), and schedule, to tell the workers when to "
        "stop taking that time. The example leaves these two out: the scheduler keeps what it measured at its start.",
        processes=(Process.ENGINE_CORE,),
        upstream=Upstream(
            UpstreamStatus.NOT_SUBMITTED, "it is for one of vLLM Ascend's schedulers; vLLM has no such callback"
        ),
        removal="vLLM notifies the scheduler when its workers are up, and gives it access to collective_rpc.",
    ),
    rules=(STARTED,),
    cases=cases_beside(__file__, "engine_core"),
    not_counted="Every process that schedules creates one EngineCore, through the hooked constructor.",
    seam=SEAM,
)

REGISTRY = Registry(
    owner="npu",
    title="Ascend patches",
    package=VLLM,
    transforms=(QUEUE, MAMBA, ENGINE_CORE),
    hooks=PLACE / "hooks.py",
    overlays=PLACE.parent / "overlays",
    distribution="ascend-patches-vllm-overlay",
    requires=("ascend-patches",),
)
