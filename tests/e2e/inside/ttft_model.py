"""Write the weights of the Llama that times to first token are measured on: `ttft_model.py DIRECTORY ATTENTION`.

vLLM's own dummy weights are so small that the first token hardly depends on the context. These are drawn like those of
`tests.e2e.model`, at a scale at which it does, so that wrong keys and values change the token.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch


def weights(config: dict[str, Any], attention: float) -> dict[str, torch.Tensor]:
    """All parameters, drawn in a fixed order; the output of attention is multiplied by a factor."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    source = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, limit: float) -> torch.Tensor:
        return (torch.rand(rows, columns, generator=source) * 2 * limit - limit).to(torch.bfloat16)

    vocabulary = config["vocab_size"]
    found = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden, 1.0),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "lm_head.weight": matrix(vocabulary, hidden, 2.5 / hidden**0.5),
    }
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for name, (rows, columns) in shapes.items():
            scale = attention if name == "self_attn.o_proj" else 1.0
            found[f"model.layers.{layer}.{name}.weight"] = matrix(rows, columns, 2.5 * scale / columns**0.5)
    return found


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    draft = directory / "model.part"
    # By name: it is only there where vLLM is.
    importlib.import_module("safetensors.torch").save_file(
        weights(json.loads((directory / "config.json").read_text(encoding="utf-8")), float(sys.argv[2])), draft
    )
    draft.rename(directory / "model.safetensors")
