# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class Scheduler:
    def add_request(self, request):
        if new:
            self.requests[request.request_id] = request
            _early_kv_hooks.request_admitted(self.connector, request)  # ucm: early.scheduler.admitted
