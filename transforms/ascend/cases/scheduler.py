# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
class AscendScheduler:
    def schedule(self, *given):
        if go:
            scheduler_output = SchedulerOutput(...)
            _ucm_hooks.scheduler_output_built(self, scheduler_output)  # ucm: ascend.scheduler.output

# release 0.11.0
class AscendScheduler:
    def schedule(self, *given):
        if go:
            preempted_req.status = RequestStatus.PREEMPTED
            _ucm_hooks.request_preempted(self, preempted_req)  # ucm: ascend.scheduler.preempted
