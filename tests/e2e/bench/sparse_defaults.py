"""What the defaults of `BlockTopK` rest on: the context from which it pays.

An engine computes four prompts once and keeps them in vLLM's prefix cache. Dense requests opt out of the method, others
have a budget of their own, so all points of a block size are measured in one engine, in turns.
"""

from __future__ import annotations

import os
import random
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.table import Table

from tests.e2e.bench.figure import Figure
from tests.e2e.bench.sparse_model import TOKEN_BYTES, VOCABULARY, engine
from tests.e2e.bench.ttft_engine import EngineFailedError, TimedEngine
from tests.e2e.bench.ttft_quiet import Others
from tests.e2e.engine import variables

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BLOCKS, CROWDS = (32, 128), (1, 4)
#: Contexts at a budget of a tenth; contexts at the default budget.
TENTHS, FIXED, BUDGET = (4_096, 16_384, 32_768), (3_072, 4_096, 8_192), 2_048
#: Steps of a sample, and those before them that are not timed.
STEPS, WARM_UP = 12, 3
#: Bytes of spare blocks, so that no generated token displaces a prompt.
SPARE = 1 << 30


@dataclass(frozen=True)
class Point:
    """What is compared with dense attention.

    Attributes:
        block: Tokens of a block.
        length: Tokens of each prompt.
        requests: The number of requests that decode together.
        budget: Tokens that each may read.
    """

    block: int
    length: int
    requests: int
    budget: int


@dataclass
class Pairs:
    """Samples of a point, each beside a dense one: medians of their steps, in seconds.

    Attributes:
        point: The point.
        dense: Of a dense step.
        sparse: Of a restricted one.
        others: The share of all processors that others used meanwhile, 0 to 1.
    """

    point: Point
    dense: list[float] = field(default_factory=list)
    sparse: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """A restricted step's time to a dense one's, pair by pair."""
        return [sparse / dense for sparse, dense in zip(self.sparse, self.dense, strict=True)]


class Crowd(TimedEngine):
    """An engine with `BlockTopK` for four requests.

    Args:
        python: The interpreter of an environment with vLLM and the overlay.
        block: Tokens of a block.
        longest: Tokens of the longest prompt.
        directory: For its files.
    """

    def __init__(self, python: Path, block: int, longest: int, directory: Path) -> None:
        arguments = engine(longest)
        blocks = max(CROWDS) * -(-longest // block) + SPARE // (block * TOKEN_BYTES)
        options = {"dense_layers": 0, "min_context": 0, "token_budget": BUDGET}
        arguments |= {
            "block_size": block,
            "num_gpu_blocks_override": blocks,
            "kv_cache_memory_bytes": blocks * block * TOKEN_BYTES,
            "max_num_seqs": max(CROWDS),
            "enable_prefix_caching": True,
            "additional_config": {"ucm_sparse_config": {"BlockTopK": options}},
        }
        processors = os.cpu_count() or 1
        environment = {
            **variables(directory),
            "OMP_NUM_THREADS": str(processors),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{processors - 1}",
            "PYTHONPATH": "",
        }
        super().__init__(python, {"engine": arguments, "timed": False}, environment, directory, "sparse_decode.py")
        source = random.Random(longest)  # noqa: S311 - prompts, no secrets
        self._prompts = [[source.randrange(3, VOCABULARY) for _ in range(longest)] for _ in range(max(CROWDS))]

    def prepare(self) -> None:
        """Compute the prompts, one after the other."""
        self.started()
        for prompt in self._prompts:
            self._call("prefill", [prompt], False)
            self._call("finish")

    def sample(self, length: int, requests: int, asked: object) -> float:
        """Return the median seconds of some steps of requests that ask this of the method."""
        self._call("prefill", [prompt[:length] for prompt in self._prompts[:requests]], asked)
        steps: list[float] = self._call("decode", WARM_UP + STEPS)["step"][WARM_UP:]
        if not self._call("finish"):
            raise EngineFailedError("blocks are still held after the requests have ended")
        return statistics.median(steps)


def points(block: int) -> list[Point]:
    """Return what is measured in one engine; a tenth of a short context is rounded up to the least budget."""
    least = 4 * block  # the sinks, the newest tokens, and a block to choose
    pairs = [(length, max(least, length // 10)) for length in TENTHS] + [(length, BUDGET) for length in FIXED]
    return [Point(block, length, requests, budget) for length, budget in pairs for requests in CROWDS]


def measured(python: Path, directory: Path, rounds: int) -> Iterator[Pairs]:
    """Measure all points, an engine after the other."""
    for block in BLOCKS:
        side = Crowd(python, block, max(TENTHS), directory / str(block))
        try:
            side.prepare()
            found = [Pairs(point) for point in points(block)]
            for number in range(rounds):
                for pairs in found:
                    _pair(side, pairs, dense_first=number % 2 == 0)
        finally:
            side.stop()
        yield from found


def _pair(side: Crowd, pairs: Pairs, *, dense_first: bool) -> None:
    point = pairs.point
    others = Others([side.process.pid])
    turns: list[tuple[list[float], object]] = [
        (pairs.dense, False),
        (pairs.sparse, {"token_budget": point.budget}),
    ]
    for samples, asked in turns if dense_first else turns[::-1]:
        samples.append(side.sample(point.length, point.requests, asked))
    pairs.others.append(others.used()[0])


def table(found: Sequence[Pairs]) -> Table:
    """Return a row for each context, budget and block size."""
    shown = Table(title="a decode step with BlockTopK, time to dense (the dense step's milliseconds)")
    for column in ("tokens", "budget", "block", *(f"{crowd} requests" for crowd in CROWDS)):
        shown.add_column(column, justify="right")
    by_point = {pairs.point: pairs for pairs in found}
    for length, budget, block in dict.fromkeys((of.length, of.budget, of.block) for of in by_point):
        cells = []
        for crowd in CROWDS:
            pairs = by_point[Point(block, length, crowd, budget)]
            step = 1000 * statistics.median(pairs.dense)
            cells.append(f"{statistics.median(pairs.ratios):.2f} ({step:.1f})")
        shown.add_row(f"{length:,}", f"{budget:,}", str(block), *cells)
    return shown


def figures(found: Sequence[Pairs]) -> Iterator[Figure]:
    """Yield each point's ratio; none has a goal, because the defaults follow from them."""
    for pairs in found:
        of = pairs.point
        name = f"{of.requests} x {of.length} tokens, blocks of {of.block}, budget {of.budget}"
        detail = {"each": pairs.ratios, "dense": pairs.dense, "sparse": pairs.sparse, "others": pairs.others}
        yield Figure(f"{name}: a decode step, time to dense", statistics.median(pairs.ratios), "", None, detail)
