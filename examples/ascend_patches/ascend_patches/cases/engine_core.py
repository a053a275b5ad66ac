# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
class EngineCore:
    def __init__(self, vllm_config):
        self.scheduler = make()
        _ascend_patches_hooks.engine_core_started(self)  # ucm: npu.engine_core.started
