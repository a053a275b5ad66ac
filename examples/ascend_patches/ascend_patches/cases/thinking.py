# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.30.0
class Glm47MoeParser:
    def __init__(self, tokenizer, tools=None, **kwargs):
        kwargs = _ascend_patches_hooks.always_thinking(tokenizer, kwargs)  # ucm: npu.thinking.always
        read(kwargs)
