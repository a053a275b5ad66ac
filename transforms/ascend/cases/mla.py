# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.23.0
class AscendMLAImpl:
    def forward(self, layer_name, kv_cache, attn_metadata):
        attn_metadata = _ucm_hooks.mla_begin(layer_name, "prefill", (prefill_preprocess_res.q_nope, prefill_preprocess_res.q_pe), kv_cache, attn_metadata)  # ucm: ascend.mla.prefill-begin
        output_prefill = self._forward_prefill(a)
        _ucm_hooks.mla_finished(layer_name, "prefill", output_prefill)  # ucm: ascend.mla.prefill-finished
        return output_prefill

# release 0.23.0
class AscendMLAImpl:
    def forward(self, layer_name, kv_cache, attn_metadata):
        attn_metadata = _ucm_hooks.mla_begin(layer_name, "decode", (decode_preprocess_res.ql_nope, decode_preprocess_res.q_pe), kv_cache, attn_metadata)  # ucm: ascend.mla.decode-begin
        output_decode = self._forward_decode(a)
        _ucm_hooks.mla_finished(layer_name, "decode", output_decode)  # ucm: ascend.mla.decode-finished
        return output_decode
