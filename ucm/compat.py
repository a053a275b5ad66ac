"""The differences between vLLM's releases, each of them read and named once.

Everything else in UCM gets typed results from here, and does not test what a release has. `optional` is for
configurations: the fields of vLLM's depend on the release, those of a model's own on the model.

Every process of vLLM imports this module, and `ucm.hashing` and `ucm.sparse` read requests through it; so it imports
neither vLLM nor torch at its import, and no other module of UCM.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ucm.vllm_types import KVCacheConfig, LoRARequest, Request, SchedulerOutput, VllmConfig

#: The variable that selects the attention backend in releases without the option.
BACKEND_VARIABLE = "VLLM_ATTENTION_BACKEND"
#: The runner's variable, from 0.12.0 on.
V2_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
V2_PACKAGE = "vllm.v1.worker.gpu."
#: The Triton backend's name where V0 had one of the same name.
V1_TRITON = "TRITON_ATTN_VLLM_V1"
#: Where a request has the function that hashes its blocks; it is bound in the releases with the second name.
HASHERS = ("_block_hasher", "get_hash_new_full_blocks")
#: Where a manager of blocks has the function that hashes them, up to 0.10.0.
HASH_FUNCTION = "caching_hash_fn"
#: The fields with the tokens that a hash covers, the first one set counts.
HASH_SIZES = ("hash_block_size", "prefix_match_unit", "block_size")
#: Where a manager of blocks has its limit of the blocks that a request may need at its admission.
ADMISSION_CAPS = ("_max_admission_blocks_per_request", "max_admission_blocks_per_request")
#: The module that defines vLLM's requests; every process with a scheduler has imported it.
REQUESTS = "vllm.v1.request"
#: The value of ``CompilationConfig.mode``, up to 0.11.0 ``level``, with which vLLM splits a model at its attention.
SPLITS = 3
#: The methods of speculative decoding whose drafts need no KV cache.
DRAFTS = ("custom_class", "ngram", "suffix")

_MISSING = object()


def optional(holder: Any, path: str, default: Any = None) -> Any:
    """Return a field that the configurations of some releases, or of some models, do not have.

    Args:
        holder: A configuration, or a module; None has no fields.
        path: The field's name, or several with dots between, each in the object before.
        default: Returned if one of them does not exist.
    """
    for name in path.split("."):
        holder = getattr(holder, name, _MISSING)
        if holder is _MISSING:
            return default
    return holder


def vllm_module(name: str) -> Any:
    """Return a module of vLLM by its name below ``vllm.``; None if this release has none, or vLLM is not installed."""
    try:
        return importlib.import_module(f"vllm.{name}")
    except ImportError:
        return None


# Requests. Tests of UCM and other packages have requests with fewer fields than vLLM's.


class MediaInput(NamedTuple):
    """A multimodal input of a request.

    Args:
        modality: For instance ``image``.
        name: vLLM's hash of the input, or the client's name for it.
        data: The processor's result; None where vLLM takes it from a cache.
        position: vLLM's ``PlaceholderRange``.
        encoding: The name under which vLLM caches its encoding, where that is another one: a vision tower with LoRA
            puts the adapter's name before it.
    """

    modality: str
    name: str | None
    data: Any
    position: Any
    encoding: str | None = None


def adapter_of(request: Request) -> LoRARequest | None:
    """Return the request's LoRA adapter, if it has one."""
    found: LoRARequest | None = getattr(request, "lora_request", None)
    return found


def adapter_number(request: Request) -> int:
    """Return vLLM's number of the request's LoRA adapter; 0 for none."""
    adapter = adapter_of(request)
    return 0 if adapter is None else int(adapter.lora_int_id)


def adapter_path(adapter: LoRARequest) -> str:
    """Return where a LoRA adapter's files are; early releases call the field ``lora_local_path``."""
    return str(getattr(adapter, "lora_path", "") or getattr(adapter, "lora_local_path", None) or "")


def is_streaming(request: Request) -> bool:
    """Return whether a request is a streaming session, whose computed tokens may be replaced."""
    return bool(getattr(request, "resumable", False))


def preemptions(request: Request) -> int:
    """Return how often a request was preempted; 0 in releases that do not count."""
    return int(getattr(request, "num_preemptions", 0))


def is_pooled(request: Request) -> bool:
    """Return whether a request wants an embedding, a score or the like instead of generated tokens."""
    return getattr(request, "pooling_params", None) is not None


def skips_prefix_cache(request: Request) -> bool:
    """Return whether a request must not read any cache; no request says so before 0.11.1."""
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def wants_prompt_logprobs(request: Request) -> bool:
    """Return whether a request wants the log-probabilities of its prompt, for which all of it must be computed."""
    return optional(request, "sampling_params.prompt_logprobs") is not None


def needs_all_outputs(request: Request, *, prefix_caching: bool) -> bool:
    """Return whether every token of a request must be computed, because the outputs of all are wanted.

    Args:
        request: vLLM's request.
        prefix_caching: Whether vLLM's own prefix cache is on; vLLM turns it off for models that need all outputs.
    """
    if skips_prefix_cache(request):
        return True
    if is_pooled(request):
        # Poolers other than that of the last token need all outputs; vLLM tells which from 0.11.1 on.
        return not (prefix_caching and hasattr(request, "skip_reading_prefix_cache"))
    return wants_prompt_logprobs(request)


def cache_salt(request: Request) -> str | None:
    """Return the salt that keeps a request's blocks apart from those of others, if it has one."""
    found: str | None = getattr(request, "cache_salt", None)
    return found


def prompt_embeds(request: Request) -> tuple[Any, Any]:
    """Return the embeddings that come with a prompt, and one bool per prompt token: whether its id is used instead.

    vLLM uses all ids of a prompt that has ids and no such mask, and none of a prompt without ids. None, None: there are
    no embeddings.
    """
    embeds = getattr(request, "prompt_embeds", None)
    if embeds is None:
        return None, None
    mask = optional(request, "prompt_is_token_ids")
    if mask is None:
        mask = [optional(request, "prompt_token_ids") is not None] * len(embeds)
    return embeds, mask


def transfer_params(request: Request) -> Any:
    """Return what a client has sent to the connector with its request; None for nothing."""
    return getattr(request, "kv_transfer_params", None)


def media_inputs(request: Request) -> list[MediaInput]:
    """Return a request's multimodal inputs; up to 0.10.1.1 they are parallel lists, without a modality."""
    features = getattr(request, "mm_features", None)
    if features is not None:
        return [
            MediaInput(
                item.modality,
                getattr(item, "mm_hash", None) or item.identifier,
                item.data,
                item.mm_position,
                item.identifier,
            )
            for item in features
        ]
    positions = getattr(request, "mm_positions", None) or []
    names = getattr(request, "mm_hashes", None) or [None] * len(positions)
    data = getattr(request, "mm_kwargs", None) or getattr(request, "mm_inputs", None) or [None] * len(positions)
    return [MediaInput("", *item) for item in zip(names, data, positions, strict=True)]


def has_media(request: Request) -> bool:
    """Return whether a request has multimodal inputs."""
    return any(getattr(request, name, None) for name in ("mm_features", "mm_positions", "mm_hashes"))


def token_ids(request: Request) -> Sequence[int]:
    """Return a request's prompt and generated tokens: vLLM's list, which is faster than its read-only view."""
    found: Sequence[int] = getattr(request, "_all_token_ids", None) or request.all_token_ids
    return found


def block_hashes(request: Request) -> list[Any]:
    """Return vLLM's hashes of a request's full blocks, the list itself; an empty one in releases that have none."""
    found: list[Any] | None = getattr(request, "block_hashes", None)
    return [] if found is None else found


def block_hasher(request: Request) -> tuple[str, Any]:
    """Return the function that hashes a request's blocks, behind its attribute's name; empty and None for none."""
    held = ((name, getattr(request, name, None)) for name in HASHERS)
    return next(((name, hasher) for name, hasher in held if hasher is not None), ("", None))


def tokens_per_hash(cache_config: Any) -> int:
    """Return how many tokens each of vLLM's block hashes covers."""
    return int(next(size for name in HASH_SIZES if (size := getattr(cache_config, name, None))))


def hashes_are_bytes() -> bool:
    """Return whether this release has a request's hashes as replaceable bytes; it does from 0.11.0 on."""
    utils = vllm_module("v1.core.kv_cache_utils")
    return utils is None or optional(utils, "BlockHash.__supertype__") is bytes


def requests_have_hashers() -> bool:
    """Return whether each request hashes its own blocks; up to 0.10.0 none does. True where nothing is scheduled."""
    requests = sys.modules.get(REQUESTS)
    return requests is None or "block_hasher" in inspect.signature(requests.Request.__init__).parameters


# What the scheduler decided, and the blocks that it manages.


def block_ids_by_group(blocks: Any) -> list[list[int]]:
    """Return the block ids of a ``KVCacheBlocks``, one list per group.

    Releases give a list of ids (0.9.0, one group), a list of lists or a tuple of lists.
    """
    return _by_group(blocks.get_block_ids())


def admitted_requests(scheduler_output: Any) -> Iterator[tuple[str, list[list[int]], int]]:
    """Yield requests that a step starts or resumes: id, all block ids per group, tokens computed or loaded before."""
    for data in scheduler_output.scheduled_new_reqs:
        yield data.req_id, _by_group(data.block_ids), data.num_computed_tokens
    for request_id, new_ids, computed, resumes in _cached_requests(scheduler_output.scheduled_cached_reqs):
        if resumes:
            yield request_id, _by_group(new_ids), computed


def freed_encodings(scheduler_output: Any) -> list[str]:
    """Return the keys of encodings of media that a step drops; none in releases that keep them by request."""
    return list(optional(scheduler_output, "free_encoder_mm_hashes") or ())


def grown_requests(scheduler_output: Any) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield running requests that got further blocks, with the new ids per group.

    Requests that resume after a preemption are excluded: like new ones, they get all their blocks at admission.
    """
    for request_id, new_ids, _, resumes in _cached_requests(scheduler_output.scheduled_cached_reqs):
        if new_ids and not resumes:
            yield request_id, _by_group(new_ids)


def _cached_requests(cached: Any) -> Iterator[tuple[str, Any, int, bool]]:
    """Yield requests that ran before: id, new block ids, tokens computed before, whether it resumes."""
    if isinstance(cached, list):  # until 0.9.1 one object per request
        for data in cached:
            yield data.req_id, data.new_block_ids, data.num_computed_tokens, data.resumed_from_preemption
        return
    resumed: Any = getattr(cached, "resumed_req_ids", None)
    if resumed is None:  # until 0.11.0 a list of flags
        resumed = {i for i, flag in zip(cached.req_ids, cached.resumed_from_preemption, strict=True) if flag}
    for found in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        yield *found, found[0] in resumed


def _by_group(new_ids: Any) -> list[list[int]]:
    if new_ids and isinstance(new_ids[0], int):
        return [list(new_ids)]
    return [list(group) for group in new_ids]


def computed_tokens(scheduler_output: SchedulerOutput) -> dict[str, int]:
    """Return the tokens that each request of a step had before it, as the V2 runner's releases count them."""
    known = {data.req_id: data.num_computed_tokens for data in scheduler_output.scheduled_new_reqs}
    cached = scheduler_output.scheduled_cached_reqs
    known.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return known


def prefix_cache_table(block_pool: Any) -> Any:
    """Return the table of vLLM's prefix cache, which it replaces when it empties the cache; None if it is unknown."""
    return getattr(block_pool, "cached_block_hash_to_block", None)


def schedules_by_priority(scheduler: Any) -> bool:
    """Return whether vLLM schedules and preempts by priority instead of in the order of arrival."""
    return bool(optional(scheduler, "policy.value", "fcfs") == "priority")


def cache_managers(scheduler: Any) -> Sequence[Any] | None:
    """Return vLLM's managers of each kind of KV cache; None before 0.9.1."""
    found: Sequence[Any] | None = optional(scheduler, "kv_cache_manager.coordinator.single_type_managers")
    return found


def replace_block_hash(scheduler: Any, change: Callable[[Any], Any]) -> None:
    """Change the function that hashes blocks in the releases whose managers hash them, up to 0.10.0."""
    manager = optional(scheduler, "kv_cache_manager")
    single = optional(manager, "single_type_manager")  # 0.9.0
    for holder in (manager, single, *(cache_managers(scheduler) or ())):
        hash_function = optional(holder, HASH_FUNCTION)
        if hash_function is not None:
            setattr(holder, HASH_FUNCTION, change(hash_function))


def inner_connectors(connector: Any) -> Sequence[Any] | None:
    """Return the connectors that a ``MultiConnector`` consists of; None if it has none."""
    found: Sequence[Any] | None = optional(connector, "_connectors")
    return found


def cap_admission(manager: Any, blocks: int) -> None:
    """Let vLLM admit a request if there is room for this many blocks of it, in releases that have such a limit."""
    for name in ADMISSION_CAPS:
        if hasattr(manager, name):
            setattr(manager, name, blocks)


# The KV cache.


def boundary_states(scheduler_output: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Return the states that a step leaves at the ends of blocks, by request: group, block id, and tokens up to there.

    vLLM moves and frees blocks of states, so their places in a request's list of blocks say nothing.
    """
    found: Mapping[str, Sequence[tuple[int, int, int]]] | None = optional(
        scheduler_output, "kv_connector_block_state.boundary_state_offloads"
    )
    return found or {}


def prepared_blocks(scheduler_output: Any) -> set[int]:
    """Return the blocks that vLLM zeroes, or fills with copies of others, ahead of a step's forward."""
    zeroed = optional(scheduler_output, "new_block_ids_to_zero") or ()
    copies = optional(scheduler_output, "kv_cache_block_copies") or ()
    return {*zeroed, *(copy.dst_block_id for copy in copies)}


def state_modes(kv_cache_config: KVCacheConfig) -> set[str]:
    """Return in which ways the states of recurrent layers are kept (vLLM's ``mamba_cache_mode``); none without such."""
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in layer_specs(group.kv_cache_spec).values()]
    return {spec.mamba_cache_mode for spec in specs if hasattr(spec, "mamba_cache_mode")}


def hands_over_states() -> bool:
    """Return whether vLLM tells connectors which blocks hold states, and lets a whole load fail; from 0.30.0 on."""
    base, output = map(vllm_module, ("distributed.kv_transfer.kv_connector.v1.base", "v1.core.sched.output"))
    ends = hasattr(optional(base, "KVConnectorBase_V1"), "get_transfer_results")
    return ends and hasattr(output, "KVConnectorBlockState")


def layer_specs(spec: Any, layer_names: Sequence[str] = ("",)) -> Mapping[str, Any]:
    """Return the ``KVCacheSpec`` of each layer; layers of a uniform type have a common one that contains theirs."""
    found: Mapping[str, Any] | None = getattr(spec, "kv_cache_specs", None)
    return found or dict.fromkeys(layer_names, spec)


def page_bytes(spec: Any) -> int | None:
    """Return the size of a block of a ``KVCacheSpec`` in bytes, without padding; None if the release does not say."""
    for name in ("unpadded_page_size_bytes", "real_page_size_bytes", "page_size_bytes"):
        found = getattr(spec, name, None)
        if found is not None:
            return int(found)
    return None


# What a KV connector can do. The class `KVConnectorBase_V1` has a method for each.


class LoadPolicy(NamedTuple):
    """When loads run.

    Args:
        between_steps: Requests wait for their loads between steps, in vLLM's state for remote KV; vLLM then computes
            the tokens of blocks that failed to load. If False, blocks are loaded within the step that needs them, and
            loads must not fail.
        background: A step may end before the loads that it started.
        reloads_preempted: A preempted request may load again.
        fails_whole: A load fails as a whole: vLLM computes all tokens of the request, also those of sound blocks.
    """

    between_steps: bool
    background: bool = False
    reloads_preempted: bool = True
    fails_whole: bool = False


class ConnectorAbilities:
    """What vLLM asks of connectors, by its connector class."""

    def __init__(self, connector_base: type) -> None:
        def has(name: str) -> bool:
            return hasattr(connector_base, name)

        #: A lookup's outcome may be reported as not yet known (from 0.10.2 on); `shutdown` came in the same release.
        self.asks_again = has("shutdown")
        #: A connector may keep a step from being replayed as one graph; and vLLM keeps the blocks of an aborted request
        #: until its load has ended (both from 0.17.1 on).
        self.runs_piecewise = has("requires_piecewise_for_cudagraph")
        #: Workers can report to the scheduler side (from 0.18.1 on).
        self.hears_workers = has("build_connector_worker_meta")
        #: vLLM publishes the connector's KV-cache events.
        self.takes_events = has("take_events")
        #: vLLM collects what connectors count (from 0.11.0 on), and exports it as metrics.
        self.takes_stats, self.exports_stats = has("get_kv_connector_stats"), has("build_prom_metrics")


def load_policy(
    connector_base: type, windows: Sequence[int | None], kind: str, *, has_states: bool = False
) -> LoadPolicy:
    """Choose a load policy that vLLM's load-failure recovery supports.

    Recovery came with 0.11.1, of a whole load with 0.30.0. It is sound for requests that wait between steps, except for
    preempted ones before 0.19.1. In a model with one KV-cache group, vLLM computes the tokens again from a failed block
    on. With a sliding window these read blocks before the failed one, which were never loaded, because the hit's end
    does not need them. So the whole load of a model with windows, or with several groups, must fail; where vLLM cannot
    be told that, no load may fail. A state that was loaded within a step would come too late: vLLM copies it to the
    step's own block before it starts loads.

    Args:
        connector_base: vLLM's connector class.
        windows: For each of the model's KV-cache groups, the tokens that its window reaches back; None for all.
        kind: The connector type; ``layerwise`` needs loads within a step.
        has_states: Whether some layers are recurrent; such a model needs a release that `hands_over_states`.
    """
    if has_states:
        return LoadPolicy(between_steps=True, background=True, fails_whole=True)
    fails_whole = tuple(windows) != (None,)
    recovers = hasattr(connector_base, "get_transfer_results" if fails_whole else "get_block_ids_with_load_errors")
    if not recovers or kind == "layerwise":
        return LoadPolicy(between_steps=False)
    return LoadPolicy(
        between_steps=True,
        background=ConnectorAbilities(connector_base).runs_piecewise,
        reloads_preempted=hasattr(connector_base, "bind_gpu_block_pool"),  # from 0.19.1 on
        fails_whole=fails_whole,
    )


def recompute_failed_loads(transfer_config: Any, policy: str) -> None:
    """Set what vLLM does with a request whose blocks cannot be loaded; its default ends it."""
    if hasattr(transfer_config, "kv_load_failure_policy"):
        transfer_config.kv_load_failure_policy = policy


def outer_transfer(vllm_config: Any) -> Any:
    """Return the engine's ``KVTransferConfig`` if this is one of several connectors (``MultiConnector``); else None.

    Such a connector is created with its own configuration, so vLLM's is read from the frame of the creator.
    """
    mine = vllm_config.kv_transfer_config.kv_connector
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        found = getattr(frame.f_locals.get("vllm_config"), "kv_transfer_config", None)
        if found is not None and found.kv_connector != mine:
            return found
    return None


def saves_after_drafts() -> bool:
    """Return whether connectors save after the draft model has run, as from vLLM 0.18.1 on."""
    mixin = vllm_module("v1.worker.kv_connector_model_runner_mixin")
    return hasattr(optional(mixin, "KVConnectorModelRunnerMixin"), "finalize_kv_connector")


def draft_metadata(attention_group: Any, common: Any, number: int) -> Any:
    """Return a backend's metadata for a step that makes drafts.

    Args:
        attention_group: vLLM's ``AttentionGroup``. From 0.32.0 on it maps blocks itself, where its backend needs
            smaller ones.
        common: vLLM's ``CommonAttentionMetadata``.
        number: How many drafts were made before.
    """
    if hasattr(attention_group, "build_metadata_for_drafting"):
        return attention_group.build_metadata_for_drafting(common, number)
    return attention_group.get_metadata_builder().build_for_drafting(common, number)


# The engine's configuration.


def ranks(vllm_config: Any) -> int:
    """Return the number of workers that run one step together."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)


def rank_of(vllm_config: VllmConfig) -> int:
    """Return this worker's rank within the engine."""
    return int(getattr(vllm_config.parallel_config, "rank", 0))


def divided_context(parallel_config: Any) -> str:
    """Return the name of the setting that spreads a block's tokens over ranks; empty if none does."""
    names = ("decode_context_parallel_size", "prefill_context_parallel_size")
    return next((name for name in names if int(getattr(parallel_config, name, 1) or 1) > 1), "")


def batches_in_flight(vllm_config: VllmConfig) -> int:
    """Return how many steps may be scheduled before the outcome of the first of them is known."""
    known = getattr(vllm_config, "max_concurrent_batches", None)
    pipeline = int(vllm_config.parallel_config.pipeline_parallel_size)
    asynchronous = bool(getattr(vllm_config.scheduler_config, "async_scheduling", False))
    return max(int(known or 1), pipeline + int(asynchronous))


def runs_micro_batches(vllm_config: Any) -> bool:
    """Return whether the worker may split a batch, so that layers run several times per step, in several threads."""
    parallel = vllm_config.parallel_config
    return bool(getattr(parallel, "enable_dbo", False)) or int(getattr(parallel, "ubatch_size", 0) or 0) > 1


def weights_move(vllm_config: Any) -> bool:
    """Return whether a rank's weights move without a change of the model, so that checking them is meaningless.

    Experts may move between ranks, and offloaded layers may take turns in one buffer on the device.
    """
    turns = int(optional(vllm_config, "offload_config.prefetch.offload_group_size") or 0) > 0
    return turns or bool(optional(vllm_config, "parallel_config.enable_eplb"))


def drafts_look_ahead(vllm_config: Any) -> bool:
    """Return whether a draft model reads the target's hidden states, shifted by one token (EAGLE, MTP and similar)."""
    draft = getattr(vllm_config, "speculative_config", None)
    return draft is not None and bool(draft.use_eagle())


def drafts_spoil_sampling(vllm_config: Any) -> bool:
    """Return whether steps that verify drafts give wrong tokens while one of their requests samples.

    On a CPU, up to 0.33.0 at least, vLLM writes the temperatures of drafts into a copy that it drops, and divides the
    logits of all drafts by what was in the memory before.
    """
    return device_type(vllm_config) == "cpu"


def device_type(vllm_config: Any) -> str:
    """Return the type of the device that the engine runs on, such as ``cuda``; empty if the release does not say."""
    device = getattr(vllm_config, "device_config", None)
    return str(getattr(device, "device_type", None) or getattr(device, "device", None) or "")


def publishes_kv_events(vllm_config: VllmConfig) -> bool:
    """Return whether the engine publishes KV-cache events."""
    return bool(optional(vllm_config, "kv_events_config.enable_kv_cache_events", False))


def graph_mode(compilation_config: Any) -> Any:
    """Return vLLM's ``CUDAGraphMode``; None up to 0.10.0, where there is only a flag."""
    return getattr(compilation_config, "cudagraph_mode", None)


def has_whole_graphs(compilation_config: Any) -> bool:
    """Return whether whole steps are replayed as CUDA graphs."""
    mode = graph_mode(compilation_config)
    return bool(getattr(compilation_config, "full_cuda_graph", False) if mode is None else mode.has_full_cudagraphs())


def is_split(compilation_config: Any) -> bool:
    """Return whether vLLM splits the compiled model at its attention."""
    return bool(optional(compilation_config, "mode", optional(compilation_config, "level")) == SPLITS)


def is_ascend_310p() -> bool:
    """Return whether vLLM Ascend runs on a 310P, as its loaded modules say; no NPU is asked."""
    utils = sys.modules.get("vllm_ascend.utils")
    device, is_310p = optional(utils, "get_ascend_device_type"), optional(utils, "is_310p")
    if device is not None:
        return bool(device().name == "_310P")
    return is_310p is not None and bool(is_310p())


# How to tell a user of a setting: the options of this release.


def choose_backend(*, tells_sums: bool = False) -> str:
    """Return how to select, on a GPU, an attention backend whose block table can be restricted.

    Args:
        tells_sums: Whether the backend must also return the log-sum-exp.
    """
    named = BACKEND_VARIABLE in optional(vllm_module("envs"), "environment_variables", ())
    backends = optional(vllm_module("platforms.interface"), "_Backend")
    triton = V1_TRITON if hasattr(backends, V1_TRITON) else "TRITON_ATTN"
    option = f"{BACKEND_VARIABLE}=" if named else "--attention-backend "
    others = "" if tells_sums else f" or {option}{triton}"
    return f"choose another backend, on a GPU: {option}FLASH_ATTN{others}"


def leave_out(config: Any, *fields: str) -> tuple[str, str]:
    """Return which of some fields of a configuration are set, and how to start without them.

    Returns:
        The fields, and the options, each list in words.
    """
    set_here = [field for field in fields if getattr(config, field, None)]
    return ", ".join(set_here), " and ".join(f"--{field.replace('_', '-')}" for field in set_here)


def no_whole_graphs(compilation_config: Any) -> str:
    """Return how to start vLLM without full CUDA graphs: up to 0.10.0 a flag, then a mode."""
    has_mode = getattr(compilation_config, "cudagraph_mode", None) is not None
    setting = '{"cudagraph_mode": "PIECEWISE"}' if has_mode else '{"full_cuda_graph": false}'
    return f"start vLLM with --compilation-config '{setting}' or with --enforce-eager"


def v1_runner(runner: object) -> str:
    """Return how to select vLLM's V1 model runner; empty if the release has no choice."""
    return f" ({V2_RUNNER_VARIABLE}=0)" if type(runner).__module__.startswith(V2_PACKAGE) else ""


# The model runner.


def model_of(runner: Any) -> Any:
    """Return a model runner's model, without the wrapper for graph capture; None before it is loaded."""
    get_model = getattr(runner, "get_model", None)
    return getattr(runner, "model", None) if get_model is None else get_model()


def batch_rows(input_batch: Any) -> Any:
    """Return V2's rows of the runner's states, by row of the batch; None with V1, where they are the same."""
    return getattr(input_batch, "idx_mapping_np", None)


def prompt_lengths(runner: Any) -> Any:
    """Return V2's prompt lengths by row of its states; from 0.17.1 on, the array is mirrored on the device."""
    lengths = runner.req_states.prompt_len
    return getattr(lengths, "np", lengths)


def bound_kv_cache(layer: Any) -> Any:
    """Return the KV cache of an attention layer, one tensor or a pair of them; None until it has one."""
    bound = getattr(layer, "kv_cache", None)
    if isinstance(bound, list):  # in older releases, one for each virtual engine
        bound = bound[0] if bound else None
    first = bound[0] if isinstance(bound, tuple) and bound else bound
    return bound if getattr(first, "ndim", 0) > 1 else None


def rotary_table(module: Any) -> Any:
    """Return the cosines and sines of a rotary embedding; None if it has no such table."""
    return getattr(module, "cos_sin_cache", None)


def rotates_in_float(module: Any) -> bool:
    """Return whether a rotary embedding's kernel uses its table as it is, not in the dtype of queries and keys."""
    return bool(getattr(module, "use_flashinfer", False))


def clear_row(table: Any, row_idx: int) -> None:
    """Clear a row, like `BlockTable.clear_row` of vLLM 0.19.0 and later.

    Args:
        table: A ``BlockTable`` or ``MultiGroupBlockTable``.
        row_idx: The request's row.
    """
    groups = getattr(table, "block_tables", None)
    if groups is not None:
        for group in groups:
            clear_row(group, row_idx)
        return
    num_blocks = table.num_blocks_per_row[row_idx]
    if num_blocks > 0:
        rows = getattr(table, "block_table_np", None)  # up to 0.10.2; later the table is a CpuGpuBuffer
        if rows is None:
            rows = table.block_table.np
        rows[row_idx, :num_blocks] = 0
    table.num_blocks_per_row[row_idx] = 0
