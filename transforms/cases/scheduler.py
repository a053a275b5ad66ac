# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class Scheduler:
    def __init__(self, *given):
        self.running = []
        _ucm_hooks.scheduler_init(self)  # ucm: scheduler.init

# release 0.32.0
class Scheduler:
    def add_request(self, *given):
        if go:
            self.requests[request.request_id] = request
            _ucm_hooks.request_added(self, request)  # ucm: scheduler.request-added

# release 0.32.0
class Scheduler:
    def schedule(self, *given):
        for request in self.running:
            num_new_tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            num_new_tokens = _ucm_hooks.limit_new_tokens(self, request, request.num_computed_tokens, num_new_tokens)  # ucm: scheduler.running-tokens

# release 0.32.0
class Scheduler:
    def schedule(self, *given):
        if go:
            num_new_tokens = request.num_tokens - num_computed_tokens
            num_new_tokens = _ucm_hooks.limit_new_tokens(self, request, num_computed_tokens, num_new_tokens)  # ucm: scheduler.waiting-tokens

# release 0.32.0
class Scheduler:
    def schedule(self, *given):
        if go:
            scheduler_output = SchedulerOutput(...)
            _ucm_hooks.scheduler_output_built(self, scheduler_output)  # ucm: scheduler.output

# release 0.32.0
class Scheduler:
    def _preempt_request(self, *given):
        request.status = RequestStatus.PREEMPTED
        _ucm_hooks.request_preempted(self, request)  # ucm: scheduler.preempted

# release 0.32.0
class Scheduler:
    def _free_request(self, *given):
        _ucm_hooks.request_freed(self, request)  # ucm: scheduler.freed
        assert request.is_finished()
