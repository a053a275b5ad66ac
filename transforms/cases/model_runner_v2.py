# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class GPUModelRunner:
    def finish_requests(self, scheduler_output):
        _ucm_hooks.v2_requests_finished(self, scheduler_output)  # ucm: model_runner_v2.requests-finished
        self.states.change(scheduler_output)

# release 0.32.0
class GPUModelRunner:
    def add_requests(self, scheduler_output):
        _ucm_hooks.v2_requests_added(self, scheduler_output)  # ucm: model_runner_v2.requests-added
        self.states.change(scheduler_output)

# release 0.32.0
class GPUModelRunner:
    def update_requests(self, scheduler_output):
        self.states.change(scheduler_output)
        _ucm_hooks.v2_requests_updated(self, scheduler_output)  # ucm: model_runner_v2.requests-updated

# release 0.32.0
class GPUModelRunner:
    def execute_model(self, scheduler_output, dummy_run):
        input_batch = self.prepare(scheduler_output)
        _ucm_hooks.v2_execute_begin(self, scheduler_output, input_batch, dummy_run)  # ucm: model_runner_v2.execute-begin
        if full:
            out = self.cudagraph_manager.run_fullgraph(batch)
        else:
            out = self.model(batch)
        _ucm_hooks.v2_execute_finished(self, scheduler_output, dummy_run)  # ucm: model_runner_v2.execute-finished
        return out
