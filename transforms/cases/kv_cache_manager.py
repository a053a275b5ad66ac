# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class KVCacheManager:
    def allocate_slots(self, request, num_new_tokens):
        if not _ucm_hooks.before_allocation(self, request):  # ucm: kv_cache_manager.before-allocation
            return None
        return self.blocks(request)
