# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.11.0
class NPUModelRunner:
    def _update_states(self, scheduler_output):
        _ucm_hooks.update_states(self, scheduler_output)  # ucm: ascend.model_runner.update-states
        _ucm_hooks.worker_requests_finished(self, scheduler_output.finished_req_ids)  # ucm: ascend.model_runner.requests-finished
        for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)
        for req_id in scheduler_output.cached:
            self.input_batch.block_table.append_row(new_block_ids, req_index)
            _ucm_hooks.blocks_updated(self, req_id, req_index, scheduler_output)  # ucm: ascend.model_runner.blocks-updated
        for req_id in scheduler_output.others:
            self.input_batch.remove_request(req_id)

# release 0.23.0
class NPUModelRunner:
    def execute_model(self, scheduler_output):
        with context():
            _ucm_hooks.execute_begin(self, scheduler_output)  # ucm: ascend.model_runner.execute-begin
            hidden_states = self._model_forward(a)
            _ucm_hooks.execute_finished(self, scheduler_output, hidden_states)  # ucm: ascend.model_runner.execute-finished
        return hidden_states

# release 0.9.1
class NPUModelRunner:
    def _process_reqs(self, scheduler_output):
        with context():
            _ucm_hooks.execute_begin(self, scheduler_output)  # ucm: ascend.model_runner.graph-begin
            hidden_states = compiled_model(a=1)
            _ucm_hooks.execute_finished(self, scheduler_output, hidden_states)  # ucm: ascend.model_runner.graph-finished
        return hidden_states
