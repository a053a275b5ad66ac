"""What a layer's attention costs under ReRoPE, beside vLLM's own: `rerope_cost.py SPEC RESULT`, JSON files.

Of each case is told the processor seconds of one thread: those of the dense kernel, of the method with all that it does
within a layer, compiled and by torch's operations, and of its part that vLLM's kernel still computes. What else the
machine does then counts little.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.ucm.sparse.steps import step
from ucm.rotary import Rotary
from ucm.sparse.base import Role
from ucm.sparse.rerope import ReRoPE
from ucm.testing.attention_layer import HEADS, KV_HEADS, NAME, RealLayer, real_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BLOCK, HEAD = 128, 128


def seconds(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median of each side over rounds in which they take turns, after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, work in sides.items():
            begin = time.thread_time()
            work()
            found[name].append(time.thread_time() - begin)
    return {name: statistics.median(taken[1:]) for name, taken in found.items()}


class Case:
    """One request's step in a layer.

    Args:
        real: The layer; its cache holds the request's keys and values, from its second block on.
        method: ReRoPE for its view.
        computed: Tokens before the step.
        new: Tokens of the step.
    """

    def __init__(self, real: RealLayer, method: ReRoPE, computed: int, new: int) -> None:
        self._real, self._method = real, method
        length = computed + new
        view: Any = method.attention
        view.batch = lambda *_: step(("a", computed, new, length))
        self._dense = real.metadata([list(range(1, -(-length // BLOCK) + 1))], [length], [new])
        self._query = torch.randn((new, HEADS, HEAD), generator=torch.Generator().manual_seed(1)).to(
            real.kv_cache.dtype
        )
        self._empty = self._query.new_empty((new, KV_HEADS, HEAD))
        self._output = torch.empty_like(self._query)
        method.execute_begin(None, None, None)

    def dense(self) -> None:
        """vLLM's own."""
        self._attend(self._dense)

    def spared(self) -> None:
        """What vLLM still computes."""
        self._attend(self._begun())

    def method(self) -> None:
        """All of it."""
        metadata = self._begun()
        self._attend(metadata)
        output = self._output.view(len(self._output), -1)
        self._method.attention_finished(NAME, self._query, self._real.kv_cache, metadata, output)

    def _begun(self) -> Any:
        query = self._query
        return self._method.attention_begin(NAME, query, query, query, self._real.kv_cache, self._dense)[3]

    def _attend(self, metadata: Any) -> None:
        real = self._real
        of_kernel = self._query, self._empty, self._empty, real.kv_cache, metadata
        real.layer.impl.forward(real.layer, *of_kernel, output=self._output)


def measure(spec_file: Path, result_file: Path) -> None:
    """Each case is the tokens computed before, and new ones; in a process that another one started, as engines are."""
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    longest = max(sum(case) for case in spec["cases"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        real = real_layer(Path(directory, "model"), spec["dtype"], BLOCK, HEAD, blocks=-(-longest // BLOCK) + 1)
    kind, source = real.kv_cache.dtype, torch.Generator().manual_seed(0)
    keys, values = (torch.randn((longest, KV_HEADS, HEAD), generator=source).to(kind) for _ in range(2))
    real.write(keys, values, torch.arange(longest) + BLOCK)
    frequencies = 10_000.0 ** (-torch.arange(HEAD // 2) / (HEAD // 2))
    angles = torch.arange(longest)[:, None] * frequencies
    rotary = Rotary(torch.cat((angles.cos(), angles.sin()), -1).to(kind), neox=True, frequencies=frequencies)
    view: Any = real.view
    view.rotary = lambda _: rotary
    methods = {}
    for name in ("method", "torch"):
        method = ReRoPE(real.config, Role.WORKER, {"window": spec["window"]})
        method.attention = view
        methods[name] = method
    methods["method"].layer_seen(NAME)
    found = []
    for computed, new in spec["cases"]:
        cases = {name: Case(real, method, computed, new) for name, method in methods.items()}
        sides = {"dense": cases["method"].dense, "spared": cases["method"].spared}
        sides |= {name: case.method for name, case in cases.items()}
        found.append(seconds(sides, spec["rounds"]))
    result_file.write_text(json.dumps(found), encoding="utf-8")


def main(*files: Path) -> None:
    """See `measure`."""
    process = multiprocessing.get_context("spawn").Process(target=measure, args=files)
    process.start()
    process.join()
    sys.exit(process.exitcode)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
