# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class GPUModelRunner:
    def execute_model(self, scheduler_output):
        scheduler_output = _early_kv_hooks.before_update_states(scheduler_output)  # ucm: early.runner.before-update-states
        self._update_states(scheduler_output)
