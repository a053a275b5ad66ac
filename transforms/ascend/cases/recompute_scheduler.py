# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
class RecomputeScheduler:
    def schedule(self, *given):
        for request in self.running:
            num_new_tokens = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            num_new_tokens = _ucm_hooks.limit_new_tokens(self, request, request.num_computed_tokens, num_new_tokens)  # ucm: ascend.recompute_scheduler.running-tokens

# release 0.23.0
class RecomputeScheduler:
    def schedule(self, *given):
        if go:
            num_new_tokens = request.num_tokens - num_computed_tokens
            num_new_tokens = _ucm_hooks.limit_new_tokens(self, request, num_computed_tokens, num_new_tokens)  # ucm: ascend.recompute_scheduler.waiting-tokens

# release 0.23.0
class RecomputeScheduler:
    def schedule(self, *given):
        if go:
            scheduler_output = RecomputeSchedulerOutput(...)
            _ucm_hooks.scheduler_output_built(self, scheduler_output)  # ucm: ascend.recompute_scheduler.output

# release 0.23.0
class RecomputeScheduler:
    def schedule(self, *given):
        if go:
            num_new_tokens = request.num_tokens_with_spec - num_computed_tokens
            num_new_tokens = _ucm_hooks.limit_new_tokens(self, request, num_computed_tokens, num_new_tokens)  # ucm: ascend.recompute_scheduler.waiting-tokens-of-drafts

# release 0.11.0
class RecomputeScheduler:
    def schedule(self, *given):
        if go:
            preempted_req.status = RequestStatus.PREEMPTED
            _ucm_hooks.request_preempted(self, preempted_req)  # ucm: ascend.recompute_scheduler.preempted

# release 0.11.0
class RecomputeScheduler:
    def schedule(self, *given):
        if go:
            self.kv_cache_manager.free(recomputed_req)
            _ucm_hooks.request_preempted(self, recomputed_req)  # ucm: ascend.recompute_scheduler.recomputed

# release 0.11.0
class RecomputeScheduler:
    def __init__(self, *given):
        self.running = []
        _ucm_hooks.scheduler_init(self)  # ucm: ascend.recompute_scheduler.init

# release 0.11.0
class RecomputeScheduler:
    def add_request(self, *given):
        if go:
            self.requests[request.request_id] = request
            _ucm_hooks.request_added(self, request)  # ucm: ascend.recompute_scheduler.request-added

# release 0.11.0
class RecomputeScheduler:
    def _free_request(self, *given):
        _ucm_hooks.request_freed(self, request)  # ucm: ascend.recompute_scheduler.freed
        go()

# release 0.11.0
class RecomputeSchedulerOutput:
    step: int
    ucm_sparse_meta: object = None  # ucm: ascend.recompute_scheduler.sparse-meta
