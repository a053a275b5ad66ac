# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
def mla_forward(query, key, value, output, layer_name):
    hidden_states, _, _, attn_metadata = _ucm_hooks.attention_begin(self.mla_attn.layer_name, hidden_states, None, None, kv_cache, attn_metadata)  # ucm: ascend.mla_operator.begin
    self.mla_attn.impl.forward(self.mla_attn.layer_name, hidden_states, kv_cache, attn_metadata, output)
    _ucm_hooks.attention_finished(self.mla_attn.layer_name, hidden_states, kv_cache, attn_metadata, output)  # ucm: ascend.mla_operator.finished
