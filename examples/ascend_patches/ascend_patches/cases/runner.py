# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.30.0
class VllmConfig:
    @property
    def use_v2_model_runner(self):
        if _ascend_patches_hooks.on_npu():  # ucm: npu.runner.by-environment
            return _ascend_patches_hooks.v2_runner_is_chosen()
        return self.default()

    def _get_v1_model_runner_unsupported_features(self):
        unsupported = list(self.features())
        unsupported = _ascend_patches_hooks.without_v1_features(unsupported)  # ucm: npu.runner.v1-features
        return unsupported
