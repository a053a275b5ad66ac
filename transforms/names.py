"""The names census: every place in vLLM that finds KV, or what KV is computed from, by a name instead of by content.

UCM's keys follow from content. vLLM's caches partly follow from names that a client or an operator gives: of a medium,
of a LoRA adapter, of a request of another engine. What vLLM found by such a name must not be saved under a content key
once the name stood for two contents. So each place must be known: what its key is, and what watches it. No rule hooks
these places; a release with one that nobody has classified fails like one with an unclassified site of the hooks.
"""

from __future__ import annotations

from transforms.engine.census import Census, Consequence, Elsewhere
from transforms.engine.releases import ALL_RELEASES, Releases

V0 = Releases(before="0.11.0")
#: What of a LoRA adapter vLLM hashes with a block.
LORA_KEYS = {
    "number": Releases(before="0.11.1"),
    "name": Releases("0.11.1", "0.31.0"),
    "pair of name and path": Releases(since="0.31.0"),
}
_KV = "vllm/distributed/kv_transfer/kv_connector/"
_V1 = f"{_KV}v1/"
_EC = "vllm/distributed/ec_transfer/ec_connector/"
_SHARING = "ucm.integration.vllm.sparse.sharing:require_connectors"


def _said(
    consequence: Consequence, reason: str, *sites: str, by: str = "", releases: Releases = ALL_RELEASES
) -> Elsewhere:
    return Elsewhere(sites, consequence, reason, by, releases)


MEDIA = Census(
    "names.media",
    "places that find an encoder's input or output by the name of a medium, or make that name",
    (
        "key (identifier)",
        "key (mm_hash)",
        "key (mm_hashes)",
        "key (mm_uuid)",
        "key (feat_hash)",
        "key (mm_feature_hash)",
        "def _get_mm_identifier",
        "def _hash_mm_items",
        "class (ECConnectorBase)",
    ),
    elsewhere=(
        _said(
            Consequence.NAMED,
            "the encoder's outputs are kept under the name that a client may choose, with a LoRA adapter's name before "
            "it if the adapter changes the encoder: the first data under a name answers all later ones",
            "vllm/v1/core/encoder_cache_manager.py:EncoderCacheManager.*",
            "vllm/v1/worker/gpu_model_runner.py:GPUModelRunner.*",
            "vllm/v1/worker/tpu_model_runner.py:TPUModelRunner.*",
            "vllm/v1/worker/gpu/mm/encoder_*.py:Encoder*",
            "vllm/v1/worker/gpu/model_states/*.py:*",
            "vllm/v1/worker/gpu/model_runner.py:GPUModelRunner.get_mm_embeddings",
            "vllm/model_executor/models/diffusion_gemma.py:DiffusionGemmaModelState.*",
            "vllm/v1/core/sched/scheduler.py:Scheduler._try_schedule_encoder_inputs",
        ),
        _said(
            Consequence.NAMED,
            "processed inputs are kept under the name that a client may choose; a name without data, and one with "
            "other data, get what was kept",
            "vllm/multimodal/cache.py:*Cache.*",
            "vllm/multimodal/cache/*.py:*Cache.*",
            "vllm/v1/engine/mm_input_cache.py:*.get_and_update*",
            "vllm/v1/engine/input_processor.py:InputProcessor.inject_into_mm_cache",
            "vllm/entrypoints/scale_out/token_in_token_out/serving.py:ServingTokens._validate_mm_cache_handles",
            "vllm/renderers/base.py:BaseRenderer._drain_mm_cache_invalidations",
        ),
        _said(
            Consequence.NAMED,
            "it makes the name: a hash of the data, or the text that the client gave for it, or a LoRA adapter's name "
            "before either",
            "vllm/multimodal/processing.py:BaseMultiModalProcessor.*",
            "vllm/multimodal/processing/processor.py:BaseMultiModalProcessor._hash_mm_items",
            "vllm/v1/engine/input_processor.py:InputProcessor._get_mm_identifier",
            "vllm/model_executor/models/qwen3_vl.py:Qwen3VLMultiModalProcessor._get_mm_hashes",
            "vllm/model_executor/models/pixtral.py:PixtralMultiModalProcessor._cached_apply_hf_processor",
            "vllm/model_executor/models/voxtral.py:VoxtralMultiModalProcessor._cached_apply_hf_processor",
        ),
        _said(
            Consequence.NAMED,
            "the name becomes part of vLLM's block hashes, so the prefix cache finds the KV of the first data under it",
            "vllm/v1/core/kv_cache_utils.py:_gen_mm_extra_hash_keys",
        ),
        _said(
            Consequence.REFUSED,
            "an encoder-cache connector loads what another engine has encoded under the name, which this engine cannot "
            "compare with the data; beside ec_transfer_config, media are neither saved nor loaded unless the operator "
            "trusts names",
            f"{_EC}*:*",
            by="ucm.hashing.request_content:_by_data",
        ),
        _said(
            Consequence.REFUSED,
            "a KV connector keys media by their names, in place of their tokens; it is refused beside a sparse method "
            "that changes KV, and UCM vouches for nothing that it loads",
            f"{_V1}lmcache_integration/*.py:*",
            by=_SHARING,
        ),
        _said(
            Consequence.HARMLESS,
            "it counts the slots of encoder-decoder models, whose encoder outputs are not kept for other requests",
            "vllm/v1/core/encoder_cache_manager.py:EncoderDecoderCacheManager.allocate",
        ),
        _said(
            Consequence.HARMLESS,
            "it recognises the provider of a cloud machine by text in its firmware; no KV depends on it",
            "vllm/usage/usage_lib.py:_detect_cloud_provider",
        ),
    ),
)

ADAPTERS = Census(
    "names.adapters",
    "places that find a LoRA adapter, or KV under it, by its name, number or path",
    (
        "key (lora_name)",
        "key (lora_int_id)",
        "key (lora_id)",
        "key (lora_path)",
        "key (adapter_id)",
        "key (adapter_name)",
    ),
    elsewhere=(
        *(
            _said(
                Consequence.NAMED,
                f"the adapter's {key} becomes part of vLLM's block hashes: a new revision under the same one gets the "
                "blocks of the old",
                "vllm/v1/core/kv_cache_utils.py:_gen_lora_extra_hash_keys",
                releases=releases,
            )
            for key, releases in LORA_KEYS.items()
        ),
        _said(
            Consequence.NAMED,
            "a worker's slot holds the adapter that was loaded first under its number, whatever its files hold now; "
            "`LiveAdapters` in ucm/integration/vllm/connector/identity.py sees one that is replaced in place",
            "vllm/lora/model_manager.py:*LoRAModelManager.*",
            "vllm/lora/models.py:*LoRAModelManager.*",
            "vllm/lora/worker_manager.py:*WorkerLoRAManager.*",
            "vllm/adapter_commons/utils.py:*",
        ),
        _said(
            Consequence.NAMED,
            "the server's table of adapters: a request names one, and gets its number and path until it is unloaded",
            "vllm/entrypoints/openai/models/serving.py:OpenAIServingModels.*",
            "vllm/entrypoints/openai/serving_models.py:OpenAIServingModels.*",
            "vllm/entrypoints/*:*._get_active_default_mm_loras",
            "vllm/entrypoints/*:process_lora_modules",
            "vllm/entrypoints/openai/api_server.py:init_app_state",
        ),
        _said(
            Consequence.HARMLESS,
            "it counts or maps the adapters of one step, or tells all workers of a change; nothing is kept under them",
            "vllm/v1/core/sched/scheduler.py:Scheduler.schedule",
            "vllm/v1/worker/*input_batch.py:InputBatch.*",
            "vllm/v1/worker/gpu/mm/lora.py:set_active_mm_loras",
            "vllm/v1/worker/gpu_model_runner.py:GPUModelRunner._execute_mm_encoder",
            "vllm/lora/punica_wrapper/utils.py:convert_mapping",
            "vllm/lora/ops/*:*",
            "vllm/lora/layers/*:*",
            "vllm/lora/lora_model.py:LoRAModel.check_lora_name",
            "vllm/lora/models.py:LoRAModel.check_lora_name",
            "vllm/v1/executor/abstract.py:Executor.*",
            "vllm/executor/executor_base.py:ExecutorBase.*",
            "vllm/v1/metrics/stats.py:LoRARequestStates.*",
            "vllm/benchmarks/*:*",
        ),
        _said(
            Consequence.HARMLESS,
            "KV events are compared by it; a reader gets the adapter's name beside the block's hash and tokens",
            "vllm/distributed/kv_events.py:BlockStored.__hash__",
        ),
        _said(
            Consequence.HARMLESS,
            "a tokenizer for an adapter; the tokens that it makes are content",
            "vllm/transformers_utils/tokenizer_group.py:TokenizerGroup.*",
        ),
        _said(
            Consequence.HARMLESS,
            "part of the V0 engine, on which UCM's connectors and methods do not run",
            "vllm/core/scheduler.py:*",
            "vllm/sequence.py:Sequence.*",
            "vllm/worker/*:*",
            releases=V0,
        ),
    ),
)

EMBEDDINGS = Census(
    "names.embeddings",
    "places that find KV by a salt, or by prompt embeddings without the mask of which positions are tokens",
    ("key (cache_salt)", "_.prompt_embeds[_]", "def _gen_prompt_embeds_extra_hash_keys"),
    elsewhere=(
        _said(
            Consequence.NAMED,
            "the embeddings of a block become part of its hash, and the mask of its token positions does not: two "
            "requests with the same embeddings and other masks get each other's blocks",
            "vllm/v1/core/kv_cache_utils.py:_gen_prompt_embeds_extra_hash_keys",
        ),
        _said(
            Consequence.CONTENT,
            "the salt becomes part of the first block's hash, as it is of UCM's key; it parts requests and joins none",
            "vllm/v1/core/kv_cache_utils.py:generate_block_hash_extra_keys",
        ),
        _said(
            Consequence.HARMLESS,
            "it cuts the last token off a prompt before its state is handed over; nothing is kept under the embeddings",
            f"{_V1}*:*._truncate_*request_for_prefill",
        ),
        _said(
            Consequence.REFUSED,
            "the salt is handed to LMCache's server beside the tokens; the connector is refused beside a sparse method "
            "that changes KV, and UCM vouches for nothing that it loads",
            f"{_V1}lmcache_mp_connector.py:LMCacheMPConnector*",
            by=_SHARING,
        ),
    ),
)

BLOCKS = Census(
    "names.blocks",
    "places that find KV by vLLM's block hashes, which contain the names of media and adapters",
    ("_.cached_block_hash_to_block", "_.block_hashes"),
    elsewhere=(
        _said(
            Consequence.NAMED,
            "vLLM's own prefix cache: what it finds for a request rests on the names in the hashes of its blocks",
            "vllm/v1/core/block_pool.py:BlockPool.*",
            "vllm/v1/core/kv_cache_manager.py:KVCacheManager.*",
            "vllm/v1/core/single_type_kv_cache_manager.py:*Manager.*",
            "vllm/v1/core/sched/scheduler.py:Scheduler.*",
        ),
        _said(
            Consequence.NAMED,
            "a request's hashes: tokens, salt and embeddings by content, media and adapters by name, and what a sparse "
            "method makes of KV (the hook block_hash_function)",
            "vllm/v1/request.py:Request.*",
            "vllm/v1/core/kv_cache_utils.py:BlockHashListWithBlockSize.*",
            "vllm/v1/core/kv_cache_utils.py:get_request_block_hasher.request_block_hasher",
        ),
        _said(
            Consequence.NAMED,
            "a connector keyed by vLLM's block hashes, which a sparse method changes; media and adapters by name, for "
            "all engines that share its store",
            f"{_V1}offloading/*:*",
            f"{_V1}offloading_connector.py:OffloadingConnector*",
            f"{_V1}mooncake/store/*:*",
            f"{_V1}umbp/*:*",
            "vllm/v1/simple_kv_offload/manager.py:SimpleCPUOffloadScheduler.*",
        ),
        _said(
            Consequence.REFUSED,
            "LMCache's server gets the hashes up to 0.16.0 and the tokens later, so the connector is refused beside a "
            "sparse method that changes KV",
            f"{_V1}lmcache_mp_connector.py:*",
            f"{_V1}lmcache_integration/multi_process_adapter.py:*",
            by=_SHARING,
        ),
        _said(
            Consequence.HARMLESS,
            "outputs beside KV, such as the experts that tokens took, kept with the blocks that vLLM finds",
            "vllm/distributed/aux_output_connector/*:*",
        ),
        _said(
            Consequence.HARMLESS,
            "KV events tell readers of hashes; nothing in this engine is found by them",
            "vllm/distributed/kv_events.py:Block*.__hash__",
            f"{_V1}lmcache_connector.py:LMCacheConnectorV1.get_kv_connector_kv_cache_events",
        ),
    ),
)

CONNECTORS = Census(
    "names.connectors",
    "KV connectors",
    ("class (KVConnectorBase_V1)", "class (KVConnectorBase)"),
    elsewhere=(
        _said(
            Consequence.NAMED,
            "its keys are vLLM's block hashes, which a sparse method changes: BY_BLOCK_HASH in "
            "ucm/integration/vllm/sparse/sharing.py",
            f"{_V1}offloading_connector.py:OffloadingConnector",
            f"{_V1}simple_cpu_offload_connector.py:SimpleCPUOffloadConnector",
            f"{_V1}mooncake/store/connector.py:MooncakeStoreConnector",
            f"{_V1}umbp/connector.py:UMBPStoreConnector",
        ),
        _said(
            Consequence.REFUSED,
            "its keys are its own hashes of tokens, without a sparse method",
            f"{_V1}example_connector.py:ExampleConnector",
            f"{_V1}shared_storage_connector.py:SharedStorageConnector",
            f"{_V1}hf3fs/hf3fs_connector.py:HF3FSKVConnector",
            f"{_V1}lmcache_connector.py:LMCacheConnectorV1",
            f"{_V1}lmcache_mp_connector.py:LMCacheMPConnector*",
            f"{_V1}flexkv_connector.py:FlexKVConnectorV1",
            by=_SHARING,
        ),
        _said(
            Consequence.REFUSED,
            "it hands a request's KV over from an engine that may have other settings, by the request's name",
            f"{_V1}nixl*:Nixl*Connector",
            f"{_V1}p2p/p2p_nccl_connector.py:P2pNcclConnector",
            f"{_V1}mooncake_connector.py:MooncakeConnector",
            f"{_V1}mooncake/mooncake_connector.py:MooncakeConnector",
            f"{_V1}moriio/moriio_connector.py:MoRIIOConnector",
            by=_SHARING,
        ),
        _said(
            Consequence.REFUSED,
            "it fills blocks with numbers of its own, keeps other tensors, or serves models whose attention no sparse "
            "method serves; a method that changes KV does not run beside it",
            f"{_V1}decode_bench_connector.py:DecodeBenchConnector",
            f"{_V1}example_hidden_states_connector.py:ExampleHiddenStatesConnector",
            f"{_V1}hisparse/connector.py:HiSparseConnector",
            by=_SHARING,
        ),
        _said(
            Consequence.REACHES,
            "it consists of other connectors, and each of them is looked at",
            f"{_V1}multi_connector.py:MultiConnector",
        ),
        _said(
            Consequence.HARMLESS,
            "part of the V0 engine, on which UCM's connectors and methods do not run",
            f"{_KV}lmcache_connector.py:LMCacheConnector",
            f"{_KV}mooncake_store_connector.py:MooncakeStoreConnector",
            f"{_KV}simple_connector.py:SimpleConnector",
            releases=V0,
        ),
    ),
)

CENSUSES = (MEDIA, ADAPTERS, EMBEDDINGS, BLOCKS, CONNECTORS)
