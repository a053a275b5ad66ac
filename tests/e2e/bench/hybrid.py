"""Time to first token of a model with recurrent layers, ours beside vLLM's: `python -m tests.e2e.bench.hybrid`.

A Granite hybrid with random weights: nine layers with a state (Mamba 2), three with attention. vLLM's kernel for the
CPU fails on steps longer than a block, so a prompt is computed in steps of one block. Engines run one after the other,
each in one process with one thread, and answer every prompt of every length in turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tests.e2e.bench.figure import Figure
from tests.e2e.environment import with_runtime
from tests.e2e.prefix_engine import PrefixEngine, connector, posix
from tests.e2e.prefix_models import RECURRENT, write_tiny_model
from tests.e2e.prefix_workload import prompt, request
from tests.e2e.processes import IN_PROCESS, INSIDE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.e2e.environment import Environment
    from tests.e2e.prefix_engine import Answer

RELEASE = "0.32.0"
#: The block size that vLLM chooses for this model, so that a block of attention has room for a state.
BLOCK = 160
LENGTHS = (4 * BLOCK, 12 * BLOCK)
ROUNDS = 2
#: Tokens of each answer.
ANSWER = 16
HEADS, KV_HEADS, HEAD, STATE_HEADS, STATE = 8, 4, 64, 16, 64
CONFIG: dict[str, Any] = {
    **RECURRENT,
    "hidden_size": HEADS * HEAD,
    "intermediate_size": 1024,
    "shared_intermediate_size": 1024,
    "num_hidden_layers": 12,
    "layer_types": ["mamba", "mamba", "mamba", "attention"] * 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "attention_multiplier": HEAD**-0.5,
    "mamba_n_heads": STATE_HEADS,
    "mamba_d_head": HEAD,
    "mamba_d_state": STATE,
}
#: Room for all prompts.
BLOCKS = 320
NONE, OURS, OFFLOADING = "no connector", "UCM", "OffloadingConnector, fs tier"
COMPUTED, HIT, RESET, RESTART = "computed", "hit in the engine", "after a reset", "in a new engine"
#: Seconds to the first token, by side, phase and length.
Samples = dict[tuple[str, str, int], list[float]]


def figures(release: str, rounds: int = ROUNDS, lengths: Sequence[int] = LENGTHS) -> Iterator[Figure]:
    """Measure all sides, print the table, yield how many answers and hits are not what they should be."""
    environment = with_runtime(release)
    samples: Samples = {}
    expected: dict[tuple[int, int], Answer] = {}
    differ, missed = 0, 0
    with tempfile.TemporaryDirectory() as root:
        for side, transfer in _sides(Path(root)).items():
            for phase in (COMPUTED, RESTART)[: 1 if side == NONE else 2]:
                directory = Path(root, f"{side} {phase}".replace(" ", "-"))
                for which, length, number, answer in _life(environment, directory, transfer, phase, rounds, lengths):
                    samples.setdefault((side, which, length), []).append(answer.first_s or 0.0)
                    wanted = expected.setdefault((length, number), answer)
                    differ += answer.tokens != wanted.tokens
                    missed += answer.cached != (0 if which == COMPUTED else length)
    _show(samples, lengths)
    yield Figure("hybrid: answers that differ", differ, "", 0)
    yield Figure("hybrid: prompts not found as a whole", missed, "", 0)


def _sides(root: Path) -> dict[str, dict[str, Any]]:
    """Return arguments of ``LLM`` for each side."""
    tier = root / "tier"
    tier.mkdir()
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "ttft_offloading",
        "cpu_bytes_to_use": 256 << 20,
        "secondary_tiers": [{"type": "fs", "root_dir": str(tier)}],
    }
    theirs = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": f"ucm-bench-{root.name}",
        "kv_connector_extra_config": extra,
    }
    return {NONE: {}, OURS: connector(posix(root / "store")), OFFLOADING: {"kv_transfer_config": theirs}}


def _life(
    environment: Environment,
    directory: Path,
    transfer: Mapping[str, Any],
    phase: str,
    rounds: int,
    lengths: Sequence[int],
) -> Iterator[tuple[str, int, int, Answer]]:
    """Run an engine; return phase, length, round and answer of each prompt. Round 0 is a warm-up and left out."""
    engine = {
        "model": str(write_tiny_model(environment, "bench-hybrid", CONFIG)),
        "num_gpu_blocks_override": BLOCKS,
        "max_model_len": CONFIG["max_position_embeddings"],
        "max_num_batched_tokens": BLOCK,
        **transfer,
    }
    switches = {**IN_PROCESS, "PYTHONPATH": str(INSIDE)}
    with PrefixEngine(environment, directory, engine, switches) as started:
        for which in (phase,) if phase == RESTART else (COMPUTED, HIT, RESET)[: 3 if transfer else 2]:
            if which == RESET:
                for _ in range(rounds):  # a peer's saves end with later steps
                    started.generate([request(prompt(9, "between"), 2)])
                started.settle()
                if not started.reset():
                    raise RuntimeError("the engine's own prefix cache could not be emptied")
            for number in range(rounds + 1):
                for length in lengths:
                    # Two tokens beyond the blocks that can be found.
                    (answer,) = started.generate([request(prompt(length + 2, f"hybrid {number}"), ANSWER)])
                    if number:
                        yield which, length, number, answer


def _show(samples: Samples, lengths: Sequence[int]) -> None:
    table = Table("milliseconds, median and range")
    for length in lengths:
        table.add_column(f"{length} tokens", justify="right")
    for side, phase in dict.fromkeys((side, phase) for side, phase, _ in samples):
        found = [[1000 * one for one in samples[side, phase, length]] for length in lengths]
        cells = [f"{statistics.median(one):.0f} ({min(one):.0f} to {max(one):.0f})" for one in found]
        table.add_row(f"{side}, {phase}", *cells)
    Console(width=140).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.bench.hybrid", description=__doc__)
    parser.add_argument("--release", default=RELEASE)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help=f"tokens, multiples of {BLOCK}")
    options = parser.parse_args(arguments)
    for figure in figures(options.release, options.rounds, options.lengths):
        print(f"{figure.name}: {figure.value:.0f}, goal {figure.goal}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
