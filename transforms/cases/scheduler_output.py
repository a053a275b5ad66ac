# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class SchedulerOutput:
    step: int
    ucm_sparse_meta: object = None  # ucm: scheduler_output.sparse-meta

    def total(self):
        return self.step
