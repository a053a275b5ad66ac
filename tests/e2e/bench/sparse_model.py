"""The model and the engine that sparse methods are timed on: one where attention dominates a decode step."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from tests.e2e.bench.model_files import write_llama
from tests.e2e.model import CONFIG
from transforms.place import BUILD

if TYPE_CHECKING:
    from pathlib import Path

DIRECTORY = BUILD / "bench" / "sparse-model"
LAYERS, KV_HEADS, HEAD = 4, 8, 128
#: Keys and values of a token in bfloat16, all layers.
TOKEN_BYTES = 2 * 2 * LAYERS * KV_HEADS * HEAD
VOCABULARY = 4_096
#: Tokens that are generated after the longest prompt.
ROOM = 1_024
#: Prompts of up to so many tokens are kept in smaller blocks.
SHORT = 10_000
#: Tokens of a prompt that a step computes.
CHUNK = 2_048

LLAMA: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 131_072,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
}


def block_size(length: int) -> int:
    """Tokens in a block: vLLM's own 128, but where 5 % of a prompt would not be three of them and one to choose."""
    return 128 if length > SHORT else 32


def engine(length: int) -> dict[str, Any]:
    """The arguments of ``LLM`` for one prompt of so many tokens."""
    longest = length + ROOM
    block = block_size(length)
    blocks = -(-longest // block) + 8
    return {
        "model": str(DIRECTORY),
        "block_size": block,
        "num_gpu_blocks_override": blocks,
        "kv_cache_memory_bytes": blocks * block * TOKEN_BYTES,
        "max_model_len": longest,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 1,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "seed": 0,
    }


def write_model(python: Path, attention: float = 1.0) -> Path:
    """Write the model, unless it is there; `engine` looks for the usual one.

    Args:
        python: An interpreter that has torch.
        attention: What attention adds to the hidden states, as a multiple of what it usually adds.

    Returns:
        The model's directory.
    """
    directory = DIRECTORY if attention == 1.0 else DIRECTORY.with_name(f"{DIRECTORY.name}-{attention}")
    write_llama(python, directory, LLAMA, attention)
    return directory


def prompt(length: int) -> list[int]:
    """Random tokens, always the same for a length."""
    source = random.Random(length)  # noqa: S311 - prompts, no secrets
    return [source.randrange(3, VOCABULARY) for _ in range(length)]
