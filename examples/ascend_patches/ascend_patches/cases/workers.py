# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
class WorkerProc:
    @staticmethod
    def make_worker_process(context):
        proc = context.Process(target=WorkerProc.worker_main, daemon=True)
        _ascend_patches_hooks.let_have_children(proc)  # ucm: npu.workers.have-children
        proc.start()
