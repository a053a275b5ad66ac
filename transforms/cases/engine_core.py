# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class EngineCore:
    def __init__(self, vllm_config):
        self.vllm_config = vllm_config
        _ucm_hooks.engine_core_started(self)  # ucm: engine_core.started
