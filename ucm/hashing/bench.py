"""Compare the cost of block keys with other methods: `python -m ucm.hashing.bench [--json]`.

The reference is the chained MD5 over pickled (parent, tokens, extras) that upstream UCM uses for block keys.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from ucm.hashing.request_hasher import RequestHasher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCK_SIZES = (16, 128)
NUM_TOKENS = 16_384
_VOCABULARY = 128_000


@dataclass(frozen=True)
class HashingCost:
    """Microseconds per block of one size.

    Args:
        block_size: Tokens per block.
        md5_us: Chained MD5 over pickled tuples.
        ours_us: A whole prompt at once, given as a list.
        ours_array_us: A whole prompt at once, given as a NumPy array.
        ours_growing_us: Block by block, as a request grows.
    """

    block_size: int
    md5_us: float
    ours_us: float
    ours_array_us: float
    ours_growing_us: float


def measure(
    block_sizes: Sequence[int] = BLOCK_SIZES, num_tokens: int = NUM_TOKENS, rounds: int = 30
) -> list[HashingCost]:
    """Measure all methods in turns, and return the best round of each.

    Args:
        block_sizes: Tokens per block.
        num_tokens: Tokens of the prompt.
        rounds: How often each method runs.
    """
    numbers = random.Random(0)  # noqa: S311 - the same tokens each time
    tokens = [numbers.randrange(_VOCABULARY) for _ in range(num_tokens)]
    return [_measure(size, tokens, rounds) for size in block_sizes]


def _measure(size: int, tokens: list[int], rounds: int) -> HashingCost:
    hasher, array = RequestHasher(b"bench"), np.array(tokens)
    ways: dict[str, Callable[[], object]] = {
        "md5_us": lambda: chained_md5(tokens, size),
        "ours_us": lambda: hasher.generate_block_hashes(tokens, size),
        "ours_array_us": lambda: hasher.generate_block_hashes(array, size),
        "ours_growing_us": lambda: _grow(hasher, tokens, size),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - begin)
    blocks = len(tokens) // size
    return HashingCost(size, **{name: seconds / blocks * 1e6 for name, seconds in best.items()})


def chained_md5(tokens: Sequence[int], size: int, seed: bytes = b"bench") -> list[bytes]:
    """Compute the reference: each block's digest over the pickled (parent, tokens, extras)."""
    parent, digests = seed, []
    for start in range(0, len(tokens) - size + 1, size):
        block = pickle.dumps((parent, tuple(tokens[start : start + size]), None), protocol=pickle.HIGHEST_PROTOCOL)
        parent = hashlib.md5(block, usedforsecurity=False).digest()
        digests.append(parent)
    return digests


def _grow(hasher: RequestHasher, tokens: list[int], size: int) -> None:
    hashes = hasher.start(size)
    known: list[int] = []
    for start in range(0, len(tokens), size):
        known += tokens[start : start + size]
        hashes.extend(known)


def main(arguments: Sequence[str]) -> None:
    """Print the table, or JSON."""
    costs = measure()
    if "--json" in arguments:
        sys.stdout.write(json.dumps([asdict(cost) for cost in costs], indent=1) + "\n")
        return
    lines = ["tokens per block   chained MD5   ours, list   ours, array   ours, growing   ours / MD5"]
    for cost in costs:
        numbers = (cost.md5_us, cost.ours_us, cost.ours_array_us, cost.ours_growing_us)
        widths = (13, 12, 13, 15)
        row = "  ".join(f"{number:{width - 1}.3f}" for number, width in zip(numbers, widths, strict=True))
        lines.append(f"{cost.block_size:16d}  {row}   {cost.md5_us / cost.ours_us:9.2f}x")
    sys.stdout.write("\n".join([*lines, "microseconds per block; the last column says how much faster", ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
