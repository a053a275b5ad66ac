# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
class SamplingParams:
    def _validate_structured_outputs(self, structured_outputs_config):
        if structured_outputs_config is None:
            return
        self.structured_outputs.__post_init__()
        _ascend_patches_hooks.keep_backend(structured_outputs_config, self)  # ucm: npu.sampling.one-backend
