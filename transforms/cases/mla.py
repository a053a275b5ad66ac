# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class MLAAttention:
    def forward_impl(self, q, kv_cache, attn_metadata, output):
        if num_mha_tokens > 0:
            attn_metadata = _ucm_hooks.mla_begin(self, "prefill", q[num_mqa_tokens:], kv_cache, attn_metadata)  # ucm: mla.prefill-begin
            self.impl.forward_mha(q, kv_cache, attn_metadata, output=mha_output[num_mqa_tokens:num_actual_toks])
            _ucm_hooks.mla_finished(self, "prefill", mha_output[num_mqa_tokens:num_actual_toks])  # ucm: mla.prefill-finished
        if num_mqa_tokens > 0:
            mqa_q = q[:num_mqa_tokens]
            attn_metadata = _ucm_hooks.mla_begin(self, "decode", mqa_q, kv_cache, attn_metadata)  # ucm: mla.decode-begin
            attn_out, lse = self.impl.forward_mqa(mqa_q, kv_cache, attn_metadata, self)
            _ucm_hooks.mla_finished(self, "decode", attn_out)  # ucm: mla.decode-finished
        return output

# release 0.23.0
class MLAAttention:
    def forward_impl(self, q, kv_cache, attn_metadata, output):
        if num_mha_tokens > 0:
            self.impl.forward_mha(q, kv_cache, attn_metadata, output=output[num_mqa_tokens:])
            _ucm_hooks.mla_finished(self, "prefill", output[num_mqa_tokens:])  # ucm: mla.prefill-finished

# release 0.16.0
def unified_mla_attention(q, kv_c_normed, k_pe, output, layer_name):
    q, kv_c_normed, k_pe, attn_metadata = _ucm_hooks.attention_begin(layer_name, q, kv_c_normed, k_pe, kv_cache, attn_metadata)  # ucm: mla.returning-begin
    output = layer.forward_impl(q, kv_c_normed, k_pe, kv_cache, attn_metadata, output=output)
    _ucm_hooks.attention_finished(layer_name, q, kv_cache, attn_metadata, output)  # ucm: mla.returning-finished

# release 0.16.0
def unified_mla_attention_with_output(q, kv_c_normed, k_pe, output, layer_name):
    q, kv_c_normed, k_pe, attn_metadata = _ucm_hooks.attention_begin(layer_name, q, kv_c_normed, k_pe, kv_cache, attn_metadata)  # ucm: mla.op-begin
    layer.forward_impl(q, kv_c_normed, k_pe, kv_cache, attn_metadata, output=output)
    _ucm_hooks.attention_finished(layer_name, q, kv_cache, attn_metadata, output)  # ucm: mla.op-finished
