# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class GPUModelRunner:
    def _update_states(self, scheduler_output):
        _ucm_hooks.update_states(self, scheduler_output)  # ucm: model_runner.update-states
        _ucm_hooks.worker_requests_finished(self, scheduler_output.finished_req_ids)  # ucm: model_runner.requests-finished
        for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)
        for req_id in scheduler_output.cached:
            if new_block_ids is not None:
                self.input_batch.block_table.append_row(new_block_ids, req_index)
            _ucm_hooks.blocks_updated(self, req_id, req_index, scheduler_output)  # ucm: model_runner.blocks-updated
        for req_id in scheduler_output.others:
            self.input_batch.remove_request(req_id)

# release 0.32.0
class GPUModelRunner:
    def execute_model(self, scheduler_output):
        with context():
            _ucm_hooks.execute_begin(self, scheduler_output)  # ucm: model_runner.execute-begin
            model_output = self._model_forward(input_ids=input_ids)
            _ucm_hooks.execute_finished(self, scheduler_output, model_output)  # ucm: model_runner.execute-finished
        return model_output
