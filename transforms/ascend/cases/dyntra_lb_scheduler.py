# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
class DyntraLBScheduler:
    def schedule(self, *given):
        for request in self.running:
            num_new_tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            num_new_tokens = _ucm_hooks.limit_new_tokens(self, request, request.num_computed_tokens, num_new_tokens)  # ucm: ascend.dyntra_lb_scheduler.running-tokens

# release 0.23.0
class DyntraLBScheduler:
    def schedule(self, *given):
        if go:
            num_new_tokens = request.num_tokens - num_computed_tokens
            num_new_tokens = _ucm_hooks.limit_new_tokens(self, request, num_computed_tokens, num_new_tokens)  # ucm: ascend.dyntra_lb_scheduler.waiting-tokens

# release 0.23.0
class DyntraLBScheduler:
    def schedule(self, *given):
        if go:
            scheduler_output = SchedulerOutput(...)
            _ucm_hooks.scheduler_output_built(self, scheduler_output)  # ucm: ascend.dyntra_lb_scheduler.output
