"""A tiny Llama with random weights whose outputs depend on their whole context.

vLLM's dummy weights are so small that the next token depends only on the last one, so wrong keys and values would
not show. These weights have a scale at which attention matters, and are the same everywhere.
"""

from __future__ import annotations

import array
import json
import random
import struct
import sys
from typing import TYPE_CHECKING, Any

from tests.e2e.shared import locked, publish

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VOCABULARY = 512
MAX_LENGTH = 768
LAYERS = 4
_HIDDEN, _HEAD, _HEADS, _KV_HEADS, _INNER = 128, 64, 2, 1, 256

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
}


def write_model(directory: Path) -> Path:
    """Write configuration, weights and tokenizer to a directory, unless they exist."""
    weights = directory / "model.safetensors"
    if not weights.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory.with_suffix(".lock")):
            if not weights.exists():
                write_tokenizer(directory, VOCABULARY)
                (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
                draft = directory / "draft"
                draft.write_bytes(random_weights(_shapes(), random.Random(0)))  # noqa: S311 - weights, no secrets
                publish(draft, weights)
    return directory


def write_tokenizer(directory: Path, size: int) -> None:
    """Write a tokenizer of whole words: `w0`, `w1`, …."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, size)}}
    special = [
        {"id": i, "content": w, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False}
        for w, i in list(words.items())[:3]
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<pad>"},
    }
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<pad>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
        "lm_head.weight": (VOCABULARY, _HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (_HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (_HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (_HEADS * _HEAD, _HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (_KV_HEADS * _HEAD, _HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (_KV_HEADS * _HEAD, _HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (_HIDDEN, _HEADS * _HEAD),
            f"{prefix}.mlp.gate_proj.weight": (_INNER, _HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (_INNER, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (_HIDDEN, _INNER),
        }
    return shapes


def random_weights(shapes: Mapping[str, tuple[int, ...]], source: random.Random) -> bytes:
    """Return a safetensors file of float32 weights, drawn in order; vectors are ones."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    values = array.array("f")
    for name, shape in shapes.items():
        start = 4 * len(values)
        if len(shape) == 1:
            values.extend([1.0] * shape[0])
        else:
            rows, columns = shape
            limit = 1.0 if "embed" in name else 2.5 / columns**0.5
            values.extend(source.uniform(-limit, limit) for _ in range(rows * columns))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, 4 * len(values)]}
    if sys.byteorder == "big":
        values.byteswap()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + values.tobytes()


#: The configuration of the model that vLLM's own tests use.
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


def write_hub(directory: Path) -> Path:
    """Write a model hub's cache with only the configuration of ``facebook/opt-125m`` and a small tokenizer."""
    model = directory / "hub" / "models--facebook--opt-125m"
    snapshot = model / "snapshots" / "0000"
    snapshot.mkdir(parents=True, exist_ok=True)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text("0000", encoding="utf-8")
    (snapshot / "config.json").write_text(json.dumps(OPT), encoding="utf-8")
    write_tokenizer(snapshot, VOCABULARY)
    return directory
