# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class Qwen3DecoderLayer:
    def forward(self, hidden_states, residual):
        hidden_states, residual = _ucm_hooks.ffn_begin(self, hidden_states, residual)  # ucm: qwen3.ffn-begin
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        hidden_states, residual = _ucm_hooks.ffn_finished(self, hidden_states, residual)  # ucm: qwen3.ffn-finished
        return hidden_states, residual
