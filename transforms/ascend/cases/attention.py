# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.11.0
def unified_ascend_attention_with_output(query, key, value, output, layer_name):
    query, key, value, attn_metadata = _ucm_hooks.attention_begin(layer_name, query, key, value, kv_cache, attn_metadata)  # ucm: ascend.attention.begin
    self.impl.forward(self, query, key, value, kv_cache, attn_metadata, output, trace_flag=False)
    _ucm_hooks.attention_finished(layer_name, query, kv_cache, attn_metadata, output)  # ucm: ascend.attention.finished
