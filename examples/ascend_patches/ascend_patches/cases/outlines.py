# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.30.0
class OutlinesGrammar:
    def accept_tokens(self, request_id, tokens):
        if _ascend_patches_hooks.is_complete(self.guide):  # ucm: npu.outlines.complete
            return True
        return self.guide.accepts_tokens(tokens)
