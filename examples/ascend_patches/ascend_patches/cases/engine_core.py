# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
class EngineCore:
    def __init__(self, vllm_config):
        self.scheduler = make()
        _ascend_patches_hooks.engine_core_started(self)  # ucm: npu.engine_core.started

    def preprocess_add_request(self, request):
        req = make(request)
        if req.use_structured_output:
            _ascend_patches_hooks.keep_grammar_backend(self.structured_output_manager, req)  # ucm: npu.engine_core.one-grammar-backend
            self.structured_output_manager.grammar_init(req)
