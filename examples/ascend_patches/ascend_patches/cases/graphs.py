# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
class CudagraphDispatcher:
    def _create_padded_batch_descriptor(self, num_tokens, uniform_decode):
        uniform_decode = _ascend_patches_hooks.is_uniform(uniform_decode, self.cudagraph_mode)  # ucm: npu.graphs.full-is-not-uniform
        return describe(num_tokens, uniform_decode)
