# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
def get_mla_prefill_backend(vllm_config):
    if _ascend_patches_hooks.on_npu():  # ucm: npu.prefill.none
        return _ascend_patches_hooks.mla_prefill_backend()
    return select(vllm_config)
