# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class EngineCore:
    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        if vllm_config.cache_config.enable_prefix_caching:
            caching_hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
            init_none_hash(caching_hash_fn)
            caching_hash_fn = _ucm_hooks.block_hash_function(vllm_config, caching_hash_fn)  # ucm: engine_core.block-hashes
            self.request_block_hasher = get_request_block_hasher(16, caching_hash_fn)
        _ucm_hooks.engine_core_started(self)  # ucm: engine_core.started

    def _initialize_kv_caches(self, vllm_config):
        kv_cache_specs = self.model_executor.get_kv_cache_specs()
        available_gpu_memory = self.model_executor.determine_available_memory()
        assert len(kv_cache_specs) == len(available_gpu_memory)
        available_gpu_memory = _ucm_hooks.kv_cache_memory(vllm_config, kv_cache_specs, available_gpu_memory)  # ucm: engine_core.memory
