"""The registry: patches of `vllm_ascend/patch`, each one insertion or two into vLLM."""

from __future__ import annotations

from pathlib import Path

from transforms.engine.cases import cases_beside
from transforms.engine.edits import AtEnd, AtStart, after, before
from transforms.engine.governance import Governance, Process, Upstream, UpstreamStatus
from transforms.engine.registry import Registry
from transforms.engine.releases import Absent, Releases
from transforms.engine.rule import Module, ModulePath, Rule, Upstreamed, Variant, rule
from transforms.engine.scope import Scope
from transforms.engine.transform import Seam, Transform
from transforms.registry import VLLM

PLACE = Path(__file__).parent
SEAM = Seam("ascend_patches.hooks")
HOOKS = SEAM.alias
EVERY = (Process.MAIN, Process.ENGINE_CORE, Process.WORKER)


def patch(name: str, path: str, rules: tuple[Rule, ...], record: Governance, only: str, unused: str = "") -> Transform:
    """Return a transform of one module.

    Args:
        name: Its name, and that of its cases.
        path: The module.
        rules: The insertions.
        record: Why and how, and until when.
        only: Why there are no other places of the kind.
        unused: The first release whose vLLM Ascend has the patch; empty: all.
    """
    before_it = Absent(Releases(before=unused), "vLLM Ascend has this patch only for later releases")
    module = Module(f"npu.{name}", f"npu_{name}", (ModulePath(path),), unused=(before_it,) if unused else ())
    cases = cases_beside(__file__, name)
    return Transform(f"npu.{name}", module, record, rules, cases, not_counted=only, seam=SEAM)


def own(reason: str, link: str = "") -> Upstream:
    """Return the status of a patch that was not submitted to vLLM: what its page in vLLM Ascend says of it."""
    return Upstream(UpstreamStatus.NOT_SUBMITTED, reason, link)


READ = "read_timeout = self.ReadTimeoutWithWarnings(...)"
QUEUE = patch(
    "queue",
    "vllm/distributed/device_communicators/shm_broadcast.py",
    (
        Rule(
            "npu.queue.recheck",
            (Variant(Scope("MessageQueue.acquire_read"), after(READ, f"{HOOKS}.recheck(read_timeout)")),),
            upstreamed=Upstreamed(
                Scope("MessageQueue.ReadTimeoutWithWarnings.timeout_ms"),
                "a reader waits no longer than SHM_READER_RECHECK_INTERVAL_MS",
                "wait_ms = SHM_READER_RECHECK_INTERVAL_MS",
            ),
        ),
    ),
    Governance(
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
    "Only acquire_read waits for a message; the writer's waits end by their own deadline.",
)

ALLOCATED = Scope("MambaManager.get_num_blocks_to_allocate")
EXTERNAL = (
    f"{HOOKS}.external_blocks(len(new_computed_blocks) * self.block_size, total_computed_tokens, num_tokens_main_model)"
)
BY_TOKENS = "return super().get_num_blocks_to_allocate(...)"
BY_BLOCKS = "return num_new_blocks + num_evictable_computed_blocks"
MAMBA = patch(
    "mamba",
    "vllm/v1/core/single_type_kv_cache_manager.py",
    (
        rule("npu.mamba.external-of-all", ALLOCATED, before(BY_TOKENS, f"num_tokens += self.block_size * {EXTERNAL}")),
        rule("npu.mamba.external-of-aligned", ALLOCATED, before(BY_BLOCKS, f"num_new_blocks += {EXTERNAL}")),
    ),
    Governance(
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
    "MambaManager counts blocks only in this method, at the two hooked statements.",
)

GRAMMAR = "self.structured_output_manager.grammar_init(_)"
ENGINE_CORE = patch(
    "engine_core",
    "vllm/v1/engine/core.py",
    (
        rule("npu.engine_core.started", Scope("EngineCore.__init__"), AtEnd(f"{HOOKS}.engine_core_started(self)")),
        rule(
            "npu.engine_core.one-grammar-backend",
            Scope("EngineCore.preprocess_add_request"),
            before(GRAMMAR, f"{HOOKS}.keep_grammar_backend(self.structured_output_manager, req)"),
        ),
    ),
    Governance(
        why="A scheduler that measures the duration of chunks can do so only once the workers are up. And a request "
        "whose grammar needs another backend than the engine's first one stops the engine while it is compiled.",
        how="One call at the end of the constructor starts the measurement. The patch wraps the constructor for "
        "this, and EngineCoreProc's entry point, so that spawned processes wrap it again; neither is needed here. From "
        "the constructor it also wraps two methods of the scheduler's class: update_from_output, to refine the "
        "measurement with the time of each step (_record_execution_timing), and schedule, to tell the workers when to "
        "stop taking that time. The example leaves these two out: the scheduler keeps what it measured at its start. "
        "One call before a grammar is made refuses it; the patch wraps StructuredOutputManager.grammar_init, in a "
        "package's __init__, which an overlay never shadows, so the call goes to its only caller.",
        processes=(Process.ENGINE_CORE,),
        upstream=own(
            "the measurement is for one of vLLM Ascend's schedulers; for grammars, its note names a request of others",
            "https://github.com/vllm-project/vllm/pull/44401",
        ),
        removal="vLLM notifies the scheduler when its workers are up, with access to collective_rpc, and refuses a "
        "second backend of grammars itself.",
    ),
    "Every process that schedules creates one EngineCore, through the hooked constructor, and only its "
    "preprocess_add_request makes grammars.",
)

GRAPHS = patch(
    "graphs",
    "vllm/v1/cudagraph_dispatcher.py",
    (
        rule(
            "npu.graphs.full-is-not-uniform",
            Scope("CudagraphDispatcher._create_padded_batch_descriptor"),
            AtStart(f"uniform_decode = {HOOKS}.is_uniform(uniform_decode, self.cudagraph_mode)"),
        ),
    ),
    Governance(
        why="With full graphs alone, an NPU fails on a graph that was captured for decodes of one length each.",
        how="A step counts as uniform only beside another mode. The patch copies the function for one more condition.",
        processes=(Process.WORKER,),
        upstream=Upstream(
            UpstreamStatus.SUBMITTED,
            "the condition was sent to vLLM; vLLM Ascend keeps its patch until that is merged",
            "https://github.com/vllm-project/vllm/pull/34880",
        ),
        removal="vLLM merges the condition, or the NPU captures uniform decodes in full graphs.",
    ),
    "The dispatcher describes every padded batch in this function.",
)

RUNNER = patch(
    "runner",
    "vllm/config/vllm.py",
    (
        rule(
            "npu.runner.by-environment",
            Scope("VllmConfig.use_v2_model_runner"),
            AtStart(f"if {HOOKS}.on_npu():\n    return {HOOKS}.v2_runner_is_chosen()"),
            diverts="On NPUs only the environment variable chooses the runner; vLLM's reasons are those of GPUs.",
        ),
        rule(
            "npu.runner.v1-features",
            Scope("VllmConfig._get_v1_model_runner_unsupported_features"),
            before("return unsupported", f"unsupported = {HOOKS}.without_v1_features(unsupported)"),
            absent=(Absent(Releases(before="0.30.0"), "vLLM asks only for what its V2 runner lacks"),),
        ),
    ),
    Governance(
        why="vLLM chooses its V2 model runner by model, by Triton and by features, with which the NPU's V2 runner "
        "crashes; and it refuses for V1 what the NPU's V1 runner has.",
        how="One early return of what the environment says, and one call that shortens the list. The patch also wraps "
        "the check of V2 and its list, from 0.30.0rc1 on, by what a device has; the example leaves these two out.",
        processes=EVERY,
        upstream=own(
            "vLLM Ascend decides this for its own runner, in a request of its own",
            "https://github.com/vllm-project/vllm-ascend/pull/11389",
        ),
        removal="vLLM Ascend's V2 runner has what vLLM's own reasons promise, or a platform chooses the runner.",
    ),
    "Everything asks this property for the runner, and one function for what V1 lacks.",
)

VERIFIED = "current_platform.verify_quantization(_)"
MODEL = patch(
    "model",
    "vllm/config/model.py",
    (
        rule(
            "npu.model.no-fp8",
            Scope("ModelConfig._verify_quantization"),
            before(VERIFIED, f"self.quantization = {HOOKS}.quantization(self)", level="outer"),
        ),
        rule(
            "npu.model.collectives-in-graphs",
            Scope("ModelConfig._verify_cuda_graph"),
            AtStart(f"{HOOKS}.expand_collectives(self)"),
        ),
        rule(
            "npu.model.latent-attention",
            Scope("ModelConfig.is_deepseek_mla"),
            AtStart(f"if {HOOKS}.has_latent_attention(self):\n    return True"),
            diverts="An architecture that only vLLM Ascend knows is in none of vLLM's lists, so that they say no.",
        ),
    ),
    Governance(
        why="MiniMax-M2 in fp8 fails vLLM's check, although an NPU loads its weights as bfloat16, and its ACL graphs "
        "need a setting of HCCL; GLM-5.3-Flash has latent attention that vLLM does not know of.",
        how="One call before the platform is asked, one before graphs are checked, and one early return. The patch "
        "wraps the check, and replaces the platform's method while it runs, to act in its middle.",
        processes=EVERY,
        upstream=own("vLLM Ascend's notes say that no request exists: the behaviour is of NPUs, or needs discussion"),
        removal="vLLM lets a platform change the quantization before it is checked, has the setting's default, and "
        "takes latent attention from a model's configuration.",
    ),
    "ModelConfig verifies both once, and all code asks its property about latent attention.",
)

DEVICES = patch(
    "devices",
    "vllm/v1/engine/utils.py",
    (
        rule(
            "npu.devices.only-its-own",
            Scope("get_physical_gpu_ids_for_local_dp_rank"),
            AtStart(
                f"local_dp_rank = {HOOKS}.rank_among_visible(device_control_env_var, local_dp_rank, world_size, "
                "local_world_size, user_assigned_gpu_ids)"
            ),
        ),
    ),
    Governance(
        why="A script that starts its data-parallel ranks itself makes only a rank's devices visible to it, and vLLM "
        "looks for them behind those of the other ranks.",
        how="Among devices that are all its own, a rank counts as the first. The patch rebinds the function in the "
        "module that defines it, which misses a module that has imported its name before, as vllm.v1.engine.core does.",
        processes=(Process.MAIN, Process.ENGINE_CORE),
        upstream=own(
            "the change of vLLM that made it necessary is linked; no request of vLLM Ascend is",
            "https://github.com/vllm-project/vllm/pull/45026",
        ),
        removal="vLLM accepts a variable that holds only the devices of one rank.",
    ),
    "All ranks find their devices by this function.",
    unused="0.24.0",
)

PREFILL = patch(
    "prefill",
    "vllm/v1/attention/backends/mla/prefill/selector.py",
    (
        rule(
            "npu.prefill.none",
            Scope("get_mla_prefill_backend"),
            AtStart(f"if {HOOKS}.on_npu():\n    return {HOOKS}.mla_prefill_backend()"),
            diverts="An NPU has no device capability, without which vLLM returns a backend that cannot be made there.",
        ),
    ),
    Governance(
        why="vLLM makes a backend for the prefill of latent attention, and without a device capability takes one of "
        "FlashAttention, which cannot be imported on an NPU.",
        how="One early return of a backend that computes nothing. The patch rebinds the name in mla_attention, where "
        "one function imports it again from its home and gets vLLM's; the transform changes the function itself.",
        processes=(Process.ENGINE_CORE, Process.WORKER),
        upstream=own(
            "the change of vLLM that made it necessary is linked; no request of vLLM Ascend is",
            "https://github.com/vllm-project/vllm/pull/32623",
        ),
        removal="vLLM asks the platform for this backend.",
    ),
    "Nothing else selects a backend for the prefill of latent attention.",
)

SAMPLING = patch(
    "sampling",
    "vllm/sampling_params.py",
    (
        rule(
            "npu.sampling.one-backend",
            Scope("SamplingParams._validate_structured_outputs"),
            after(
                "self.structured_outputs.__post_init__()",
                f"{HOOKS}.keep_backend(structured_outputs_config, self)",
            ),
        ),
    ),
    Governance(
        why="An engine has one backend of structured outputs, but each request chooses its own: a second one reaches "
        "the first one's backend, which crashes.",
        how="One call at the end of the validation refuses it with the reason.",
        processes=(Process.MAIN,),
        upstream=own(
            "vLLM Ascend's note names the issue and a request of others, whose result it waits for",
            "https://github.com/vllm-project/vllm/issues/43920",
        ),
        removal="vLLM refuses a second backend before a grammar is compiled, or survives it.",
    ),
    "Every request's structured outputs are validated in this function.",
)

OUTLINES = patch(
    "outlines",
    "vllm/v1/structured_output/backend_outlines.py",
    (
        rule(
            "npu.outlines.complete",
            Scope("OutlinesGrammar.accept_tokens"),
            AtStart(f"if {HOOKS}.is_complete(self.guide):\n    return True"),
            diverts="A complete grammar has no further state, so that it would reject the token that ends the request.",
        ),
    ),
    Governance(
        why="A request whose grammar of Outlines is complete ends in an error, because its last token is in none.",
        how="One early return once the grammar is complete, as vLLM's xgrammar backend has it.",
        processes=(Process.ENGINE_CORE,),
        upstream=own(
            "the link mends the same for xgrammar and leaves Outlines out",
            "https://github.com/vllm-project/vllm/pull/49227",
        ),
        removal="vLLM's Outlines backend returns early itself.",
    ),
    "Outlines has one grammar class, which accepts tokens in this method.",
    unused="0.30.0",
)

OF_STAGE = "target_layer_num = vllm_config.model_config.get_num_layers(...)"
OF_ALL = "vllm_config.model_config.get_total_num_hidden_layers()"


def eagle(name: str, path: str, model: str) -> Transform:
    """Return the transform of one module with an Eagle3 draft model."""
    built = Scope(f"{model}.__init__")
    numbers = Variant(built, after(OF_STAGE, f"target_layer_num = {HOOKS}.layers_of_all_stages(vllm_config)"))
    done = Upstreamed(built, "it numbers its layers after those of all stages", OF_ALL)
    return patch(
        name,
        path,
        (Rule(f"npu.{name}.layers", (numbers,), upstreamed=done),),
        Governance(
            why="With pipeline parallelism a draft model's layers are numbered after those of one stage, so that its "
            "weights are not found in the checkpoint.",
            how="One assignment after vLLM's. The patch copies the constructor, which loses the prefix of the model's "
            "weights, and from 0.30.0 on what vLLM does for draft models with the target's vocabulary.",
            processes=(Process.WORKER,),
            upstream=Upstream(
                UpstreamStatus.RELEASED, "vLLM 0.30.0 has it; the rule reports that it does not need the patch"
            ),
            removal="The oldest supported release numbers them after all layers of the target.",
        ),
        "The class has one constructor, and no other class of the module numbers layers after a target's.",
    )


EAGLE_LLAMA = eagle("eagle_llama", "vllm/model_executor/models/llama_eagle3.py", "Eagle3LlamaForCausalLM")
EAGLE_DEEPSEEK = eagle("eagle_deepseek", "vllm/model_executor/models/deepseek_eagle3.py", "Eagle3DeepseekV2ForCausalLM")


def dtypes(name: str, path: str, of: str, more: str, why: str) -> Transform:
    """Return the transform of one module with a type of dtypes."""
    return patch(
        name,
        path,
        (rule(f"npu.{name}.dtypes", Scope(), after(f"{of} = _", f"{of} = {HOOKS}.with_dtypes({of}, ({more}))")),),
        Governance(
            why=why,
            how="One assignment after vLLM's, before the class that uses it is made. The patch comes later: it changes "
            "the type in three places and lets pydantic make the class's schema again.",
            processes=EVERY,
            upstream=own("vLLM Ascend's notes say that these dtypes are its own and not yet in vLLM"),
            removal=f"vLLM's {of} has these dtypes, or lets a platform add its own.",
        ),
        "The type is defined once; what imports it gets the assigned one.",
        unused="0.30.0",
    )


CACHE = dtypes(
    "cache",
    "vllm/config/cache.py",
    "CacheDType",
    '"int8", "mxfp8"',
    "An NPU's KV cache can hold int8 and mxfp8, which vLLM refuses on the command line.",
)
INDEXER = dtypes(
    "indexer",
    "vllm/config/attention.py",
    "IndexerKVDType",
    '"int8",',
    "An NPU's cache of a sparse indexer can hold int8, which vLLM refuses on the command line.",
)

ENCODER = patch(
    "encoder",
    "vllm/distributed/ec_transfer/ec_connector/example_connector.py",
    (
        rule(
            "npu.encoder.own-device",
            Scope("ECExampleConnector.start_load_caches"),
            after("device = current_platform.device_type", f"device = {HOOKS}.own_device(self, device)"),
        ),
    ),
    Governance(
        why="Without a number, an encoder cache is loaded to the first NPU by all workers of a node.",
        how="One assignment after vLLM's, which gives numbers to GPUs only. The patch copies the function.",
        processes=(Process.WORKER,),
        upstream=own("vLLM Ascend's list of patches has no note on this one, so that nothing is known"),
        removal="vLLM gives the device its number on every platform.",
    ),
    "The connector loads in this method only.",
    unused="0.30.0",
)

THINKING = patch(
    "thinking",
    "vllm/parser/glm47_moe.py",
    (
        Rule(
            "npu.thinking.always",
            (
                Variant(
                    Scope("Glm47MoeParser.__init__"),
                    AtStart(f"kwargs = {HOOKS}.always_thinking(tokenizer, kwargs)"),
                ),
            ),
            upstreamed=Upstreamed(Scope("_glm53_always_thinks"), "the parser knows GLM-5.3's template"),
        ),
    ),
    Governance(
        why="GLM-5.3 always thinks; a request that switches thinking off gets the thoughts as its answer.",
        how="One call drops the switches before the parser reads them. The patch wraps the constructor.",
        processes=(Process.MAIN,),
        upstream=Upstream(
            UpstreamStatus.ACCEPTED,
            "vLLM has the change since after 0.30.0, by the note of vLLM Ascend's patch",
            "https://github.com/vllm-project/vllm/pull/56994",
        ),
        removal="The oldest supported release knows GLM-5.3's template.",
    ),
    "The other GLM parsers of reasoning and tools are made through this class.",
    unused="0.30.0",
)

WORKERS = patch(
    "workers",
    "vllm/v1/executor/multiproc_executor.py",
    (
        rule(
            "npu.workers.have-children",
            Scope("WorkerProc.make_worker_process"),
            after("proc = context.Process(...)", f"{HOOKS}.let_have_children(proc)"),
        ),
    ),
    Governance(
        why="Balancing experts while serving takes a process of its own, and a worker is a daemon, which has none.",
        how="One call on the process before it starts. The patch copies two functions, 170 lines, to change `True` to "
        "`False`; the copy does not bind the worker's memory to a NUMA node as vLLM does.",
        processes=(Process.ENGINE_CORE,),
        upstream=own("vLLM Ascend's note gives no request: daemons suit all of vLLM's own workers"),
        removal="vLLM lets a platform or an option decide whether workers are daemons.",
    ),
    "The multiprocess executor makes all workers in this function.",
)

REGISTRY = Registry(
    owner="npu",
    title="Ascend patches",
    package=VLLM,
    transforms=(
        *(QUEUE, MAMBA, ENGINE_CORE),
        *(RUNNER, MODEL, CACHE, INDEXER, DEVICES, WORKERS),
        *(SAMPLING, OUTLINES, THINKING),
        *(GRAPHS, PREFILL, EAGLE_LLAMA, EAGLE_DEEPSEEK, ENCODER),
    ),
    hooks=PLACE / "hooks.py",
    overlays=PLACE.parent / "overlays",
    distribution="ascend-patches-vllm-overlay",
    requires=("ascend-patches",),
)
