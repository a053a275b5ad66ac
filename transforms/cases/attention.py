# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.9.0
def unified_attention(query, key, value, output, layer_name):
    query, key, value, attn_metadata = _ucm_hooks.attention_begin(layer_name, query, key, value, kv_cache, attn_metadata)  # ucm: attention.begin
    output = self.impl.forward(self, query, key, value, kv_cache, attn_metadata)
    _ucm_hooks.attention_finished(layer_name, query, kv_cache, attn_metadata, output)  # ucm: attention.finished

# release 0.32.0
def unified_attention_with_output(query, key, value, output, layer_name):
    query, key, value, attn_metadata = _ucm_hooks.attention_begin(layer_name, query, key, value, kv_cache, attn_metadata)  # ucm: attention.output-begin
    self.impl.forward(self, query, key, value, kv_cache, attn_metadata, output=output)
    _ucm_hooks.attention_finished(layer_name, query, kv_cache, attn_metadata, output)  # ucm: attention.output-finished

# release 0.14.1
def unified_mla_attention(query, key, value, output, layer_name):
    q, kv_c_normed, k_pe, attn_metadata = _ucm_hooks.attention_begin(layer_name, q, kv_c_normed, k_pe, kv_cache, attn_metadata)  # ucm: attention.mla-begin
    output = self.impl.forward(self, q, kv_c_normed, k_pe, kv_cache, attn_metadata)
    _ucm_hooks.attention_finished(layer_name, q, kv_cache, attn_metadata, output)  # ucm: attention.mla-finished

# release 0.14.1
def unified_mla_attention_with_output(query, key, value, output, layer_name):
    q, kv_c_normed, k_pe, attn_metadata = _ucm_hooks.attention_begin(layer_name, q, kv_c_normed, k_pe, kv_cache, attn_metadata)  # ucm: attention.mla-output-begin
    self.impl.forward(self, q, kv_c_normed, k_pe, kv_cache, attn_metadata, output=output)
    _ucm_hooks.attention_finished(layer_name, q, kv_cache, attn_metadata, output)  # ucm: attention.mla-output-finished

# release 0.32.0
def unified_kv_cache_update(query, key, value, output, layer_name):
    layer_slot_mapping = _ucm_hooks.kv_write_begin(layer_name, key, value, kv_cache, layer_slot_mapping)  # ucm: attention.kv-begin
    attn_layer.impl.do_kv_cache_update(attn_layer, key, value, kv_cache, layer_slot_mapping)
    _ucm_hooks.kv_write_finished(layer_name, kv_cache, layer_slot_mapping)  # ucm: attention.kv-finished
