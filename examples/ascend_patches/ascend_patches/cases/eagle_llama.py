# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
class Eagle3LlamaForCausalLM:
    def __init__(self, *, vllm_config, prefix=""):
        target_layer_num = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
        target_layer_num = _ascend_patches_hooks.layers_of_all_stages(vllm_config)  # ucm: npu.eagle_llama.layers
        self.model = make(target_layer_num)
