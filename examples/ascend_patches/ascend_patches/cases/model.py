# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
class ModelConfig:
    def _verify_quantization(self):
        self.quantization = _ascend_patches_hooks.quantization(self)  # ucm: npu.model.no-fp8
        if self.quantization is not None:
            current_platform.verify_quantization(self.quantization)

    def _verify_cuda_graph(self):
        _ascend_patches_hooks.expand_collectives(self)  # ucm: npu.model.collectives-in-graphs
        check(self)

    @property
    def is_deepseek_mla(self):
        if _ascend_patches_hooks.has_latent_attention(self):  # ucm: npu.model.latent-attention
            return True
        return self.known()
