# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class WorkerWrapperBase:
    def init_device(self):
        with set_current_vllm_config(self.vllm_config):
            self.worker.init_device()
            _ucm_hooks.worker_init(self)  # ucm: worker.init
