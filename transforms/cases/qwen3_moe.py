# The least code in which the rules find their anchors; lines that end in `ucm:` and a rule's id are what it inserts.

# release 0.32.0
class Qwen3MoeModel:
    def forward(self, positions, hidden_states, residual):
        for layer in self.layers:
            hidden_states, residual = _ucm_hooks.layer_begin(layer, positions, hidden_states, residual)  # ucm: qwen3_moe.layer-begin
            hidden_states, residual = layer(positions, hidden_states, residual)
            hidden_states, residual = _ucm_hooks.layer_finished(layer, positions, hidden_states, residual)  # ucm: qwen3_moe.layer-finished
        return hidden_states

# release 0.32.0
class Qwen3MoeDecoderLayer:
    def forward(self, hidden_states, residual):
        hidden_states, residual = _ucm_hooks.ffn_begin(self, hidden_states, residual)  # ucm: qwen3_moe.ffn-begin
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        hidden_states, residual = _ucm_hooks.ffn_finished(self, hidden_states, residual)  # ucm: qwen3_moe.ffn-finished
        return hidden_states, residual
