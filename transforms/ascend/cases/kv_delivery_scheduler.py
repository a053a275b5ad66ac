# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.26.0rc1
class KVDeliveryScheduler:
    def schedule(self, *given):
        for request in self.running:
            num_new_tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            num_new_tokens = _ucm_hooks.limit_new_tokens(self, request, request.num_computed_tokens, num_new_tokens)  # ucm: ascend.kv_delivery_scheduler.running-tokens
        while self.waiting:
            num_new_tokens = request.num_tokens - num_computed_tokens
            num_new_tokens = _ucm_hooks.limit_new_tokens(self, request, num_computed_tokens, num_new_tokens)  # ucm: ascend.kv_delivery_scheduler.waiting-tokens
        scheduler_output = SchedulerOutput(num=1)
        _ucm_hooks.scheduler_output_built(self, scheduler_output)  # ucm: ascend.kv_delivery_scheduler.output

    def _preempt_request(self, *given):
        request.status = RequestStatus.PREEMPTED
        _ucm_hooks.request_preempted(self, request)  # ucm: ascend.kv_delivery_scheduler.preempted
