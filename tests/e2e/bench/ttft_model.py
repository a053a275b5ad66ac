"""The model and the engine that times to first token are measured on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.e2e.bench.model_files import write_llama
from tests.e2e.model import CONFIG
from transforms.place import BUILD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

DIRECTORY = BUILD / "bench" / "ttft-model"
BLOCK = 128
LAYERS, KV_HEADS, HEAD = 16, 8, 64
#: Keys and values of a block in bfloat16: 4 MiB.
BLOCK_BYTES = 2 * 2 * LAYERS * KV_HEADS * HEAD * BLOCK
VOCABULARY = 32_000
MAX_LENGTH = 4_224
#: Tokens of a prompt beyond its whole blocks; with a single one ExampleConnector does not find what it has saved.
COMPUTED = 2
#: Enough for the longest prompt, the short one after it, and for what a connector still holds.
BLOCKS = 72

LLAMA: dict[str, Any] = {
    **CONFIG,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_LENGTH,
    "torch_dtype": "bfloat16",
}

ENGINE: dict[str, Any] = {
    "model": str(DIRECTORY),
    "block_size": BLOCK,
    "num_gpu_blocks_override": BLOCKS,
    # Given, because vLLM would look how much memory is free, and there are several engines.
    "kv_cache_memory_bytes": BLOCKS * BLOCK_BYTES,
    "max_model_len": MAX_LENGTH,
    # A prompt is one step: ExampleConnector saves wrong blocks otherwise.
    "max_num_batched_tokens": MAX_LENGTH,
    "max_num_seqs": 4,
    "dtype": "bfloat16",
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "seed": 0,
}


def write_model(python: Path) -> None:
    """Write the model where `ENGINE` looks for it, unless it is there; the interpreter is one that has torch."""
    write_llama(python, DIRECTORY, LLAMA)


def prompt(length: int, name: str) -> list[int]:
    """Random tokens, always the same for a name: so many that can be loaded, and a few that are always computed."""
    source = random.Random(f"{name} {length}")  # noqa: S311 - prompts, no secrets
    return [source.randrange(3, VOCABULARY) for _ in range(length + COMPUTED)]


def kv_bytes(length: int) -> int:
    """The keys and values of so many tokens."""
    return length // BLOCK * BLOCK_BYTES


@dataclass(frozen=True)
class Workload:
    """What is asked of which model.

    Attributes:
        name: Its name in paths.
        engine: Arguments of ``LLM`` that differ from `ENGINE`.
        block_bytes: Keys and values of a block.
        prompt: Returns a prompt of so many tokens that can be loaded and a few more, another one for each name.
        answer: Tokens of each answer.
        block: Tokens of a block.
    """

    name: str
    engine: Mapping[str, Any]
    block_bytes: int
    prompt: Callable[[int, str], list[int]]
    answer: int = 1
    block: int = BLOCK

    def kv_bytes(self, length: int) -> int:
        """The keys and values of so many tokens."""
        return length // self.block * self.block_bytes


RANDOM = Workload("ttft", {}, BLOCK_BYTES, prompt)
