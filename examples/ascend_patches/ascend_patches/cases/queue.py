# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
class MessageQueue:
    def acquire_read(self, timeout):
        read_timeout = self.ReadTimeoutWithWarnings(timeout)
        _ascend_patches_hooks.recheck(read_timeout)  # ucm: npu.queue.recheck
        while True:
            wait(read_timeout.timeout_ms())
