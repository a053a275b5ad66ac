"""Time to first token of a model with recurrent layers, ours beside vLLM's: `python -m tests.e2e.bench.hybrid`.

A Granite hybrid with random weights: nine layers with a state (Mamba 2), three with attention. vLLM's kernel for the
CPU fails on steps longer than a block, so a prompt is computed in steps of one block.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import signal
import sys
from typing import TYPE_CHECKING, Any

from tests.e2e.bench.peers import NO_CONNECTOR, OFFLOADING_FS, OURS
from tests.e2e.bench.ttft import RELEASE, compared
from tests.e2e.bench.ttft_model import COMPUTED, Workload
from tests.e2e.bench.ttft_quiet import ALL
from tests.e2e.bench.ttft_results import Results
from tests.e2e.bench.ttft_stages import RESTART
from tests.e2e.environment import plain
from tests.e2e.model import VOCABULARY
from tests.e2e.prefix_models import RECURRENT, write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.e2e.bench.figure import Figure

#: The block size that vLLM chooses for this model, so that a block of attention has room for a state.
BLOCK = 160
LENGTHS = (8 * BLOCK, 20 * BLOCK)
ROUNDS = 2
GROUP = (NO_CONNECTOR, OURS, OFFLOADING_FS)
#: Tokens of each answer.
ANSWER = 16
HEADS, KV_HEADS, HEAD, STATE_HEADS, STATE = 8, 4, 64, 16, 64
CONFIG: dict[str, Any] = {
    **RECURRENT,
    "hidden_size": HEADS * HEAD,
    "intermediate_size": 1536,
    "shared_intermediate_size": 1536,
    "num_hidden_layers": 12,
    "layer_types": ["mamba", "mamba", "mamba", "attention"] * 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "attention_multiplier": HEAD**-0.5,
    "mamba_n_heads": STATE_HEADS,
    "mamba_d_head": HEAD,
    "mamba_d_state": STATE,
}
#: A block of one KV-cache group, of which each has three layers: keys and values in float32.
BLOCK_BYTES = 3 * 2 * 4 * KV_HEADS * HEAD * BLOCK
#: The states at a prompt's end, with those of the convolutions before them.
STATE_BYTES = 9 * 4 * (STATE_HEADS * HEAD * STATE + 3 * (STATE_HEADS * HEAD + 2 * STATE))
BLOCKS = 160


def figures(
    release: str, rounds: int = ROUNDS, lengths: Sequence[int] = LENGTHS, patience: float = ALL
) -> Iterator[Figure]:
    """Measure all sides, print the tables, yield the figures that have a goal."""
    results = Results(list(lengths), workload(release))
    for figure in compared(results, release, rounds, [GROUP], (RESTART,), patience):
        yield dataclasses.replace(figure, name=f"hybrid: {figure.name}")


def workload(release: str) -> Workload:
    """Return the model, which is written if need be, and its prompts."""
    engine = {
        "model": str(write_tiny_model(plain(release), "bench-hybrid", CONFIG)),
        "dtype": "float32",
        "block_size": 32,  # vLLM rounds the block size up to a multiple
        "num_gpu_blocks_override": BLOCKS,
        "kv_cache_memory_bytes": BLOCKS * BLOCK_BYTES,
        "max_model_len": CONFIG["max_position_embeddings"],
        "max_num_batched_tokens": BLOCK,
    }
    return Workload("hybrid", engine, BLOCK_BYTES, prompt, ANSWER, BLOCK, STATE_BYTES)


def prompt(length: int, name: str) -> list[int]:
    """Random tokens, always the same for a name: so many that can be loaded, and a few that are always computed."""
    source = random.Random(f"{name} {length}")  # noqa: S311 - prompts, no secrets
    return [source.randrange(3, VOCABULARY) for _ in range(length + COMPUTED)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a part."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench.hybrid", description=__doc__)
    parser.add_argument("--release", default=RELEASE)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help=f"tokens, multiples of {BLOCK}")
    parser.add_argument("--patience", type=float, default=ALL, help="seconds of waiting for a quiet machine, in all")
    options = parser.parse_args(arguments)
    # A bench that is stopped ends its engines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for figure in figures(options.release, options.rounds, options.lengths, options.patience):
        met = {True: "met", False: "missed", None: ""}[figure.met]
        print(f"{figure.name}: {figure.value:.3f}, goal {figure.goal}: {met}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
