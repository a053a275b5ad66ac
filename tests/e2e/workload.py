"""The requests of the end-to-end runs: each phase causes one condition in the scheduler."""

from __future__ import annotations

import random
from typing import Any

from tests.e2e.model import MAX_LENGTH, VOCABULARY

BLOCK = 32
#: Far less than the long prompts, so that they are computed in chunks.
TOKENS_PER_STEP = 128
#: Blocks for two requests of the greatest length, so that many at once preempt each other.
BLOCKS = 2 * MAX_LENGTH // BLOCK + 1

ENGINE: dict[str, Any] = {
    "block_size": BLOCK,
    "num_gpu_blocks_override": BLOCKS,
    "max_num_batched_tokens": TOKENS_PER_STEP,
    "max_num_seqs": 16,
    "max_model_len": MAX_LENGTH,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "dtype": "float32",
    "seed": 0,
    "enforce_eager": True,
    "disable_log_stats": False,
    "skip_tokenizer_init": True,
}

Request = dict[str, Any]


def phases() -> dict[str, list[list[Request]]]:
    """Return the batches of each phase; a batch is submitted when the previous one has ended."""
    source = random.Random(1)  # noqa: S311 - prompts, no secrets

    def prompt(length: int) -> list[int]:
        return [source.randrange(3, VOCABULARY) for _ in range(length)]

    def request(tokens: list[int], max_tokens: int, **params: Any) -> Request:
        return {"prompt": tokens, "params": {"max_tokens": max_tokens, "temperature": 0.0, **params}}

    short = [request(prompt(length), 4 + 3 * length % 17) for length in range(1, 13)]
    edges = [BLOCK * blocks + offset for blocks in (1, 2, 3, 4) for offset in (-1, 0, 1)]
    boundary = [request(prompt(length), BLOCK + (length % 3 - 1)) for length in edges]
    long = [request(prompt(length), 12) for length in (300, 4 * TOKENS_PER_STEP, 600, MAX_LENGTH - 12)]
    shared = prompt(5 * BLOCK)
    prefix = [request([*shared, *prompt(length)], 10) for length in (1, 7, BLOCK, BLOCK + 1, 50, 90, 130, 200)]
    crowd = [request(prompt(40 + 7 * i), 160, ignore_eos=True) for i in range(14)]
    # Together less than a step: vLLM on the CPU cannot compute seeded requests in chunks.
    sampled = [
        request(prompt(3 + i), 24 + i, temperature=0.7 + 0.1 * i, seed=i, top_p=0.95, top_k=40 + i) for i in range(10)
    ]
    return {
        "short": [[one] for one in short[:3]] + [short[3:]],
        "boundary": [boundary],
        "chunked": [long],
        "prefix": [[request(shared, 4)], prefix],
        "preempted": [crowd],
        "sampled": [sampled],
    }
