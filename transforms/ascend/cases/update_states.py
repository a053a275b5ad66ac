# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.13.0
def _update_states(self, scheduler_output):
    _ucm_hooks.update_states(self, scheduler_output)  # ucm: ascend.update_states.update-states
    _ucm_hooks.worker_requests_finished(self, scheduler_output.finished_req_ids)  # ucm: ascend.update_states.requests-finished
    for req_id in scheduler_output.finished_req_ids:
        self.requests.pop(req_id, None)
    for req_id in scheduler_output.cached:
        self.input_batch.block_table.append_row(new_block_ids, req_index)
        _ucm_hooks.blocks_updated(self, req_id, req_index, scheduler_output)  # ucm: ascend.update_states.blocks-updated
    for req_id in scheduler_output.others:
        self.input_batch.remove_request(req_id)
