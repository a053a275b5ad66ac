"""Engines of two workers: each has heads of its own, blocks of its own in the store, its own part of a method.

They are compared with an engine of two workers without UCM: sums over ranks round differently from one worker's.
Pipeline parallelism cannot be run here: vLLM 0.32.0 itself fails on the CPU, for its second stage has no tensors to
receive into.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.prefix_workload import prompt, request
from tests.e2e.workload import BLOCK

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.e2e.environment import Environment
    from tests.e2e.prefix_engine import Answer
    from tests.e2e.scenarios import Environments
    from tests.e2e.workload import Request

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

RANKS = 2
#: Chooses among all blocks, checks what it keeps of them, and reads all.
TOP_K: dict[str, Any] = {
    "checked_topk:CheckedTopK": {
        "token_budget": 4 * BLOCK,
        "sink_tokens": 1,
        "recent_tokens": 1,
        "dense_layers": 0,
    }
}
#: Moves all that is computed to a store, and brings all of it back.
ESA, ESA_OPTIONS = "eager_esa:EagerESA", {"token_budget": 700, "sink_tokens": 1, "window_tokens": 1}


def batches() -> list[list[Request]]:
    """Alone and together, in chunks, with a common prefix, and more at once than there is room for."""
    common = prompt(4 * BLOCK, "common to ranks")
    alone = [[request(prompt(length, "ranks"), 8)] for length in (7, BLOCK, 5 * BLOCK + 1, 600)]
    shared = [request([*common, *prompt(11 + 30 * n, f"shared {n}")], 8) for n in range(4)]
    crowd = [request(prompt(200 + 13 * n, "crowd of ranks"), 40) for n in range(6)]
    return [*alone, [request(common)], shared, crowd]


@dataclass(frozen=True)
class Played:
    """What one engine did."""

    answers: list[Answer]
    preemptions: float
    log: str

    @property
    def tokens(self) -> list[list[int]]:
        """Of each request."""
        return [answer.tokens for answer in self.answers]


class TwoWorkers:
    """Engines with tensor parallelism.

    Args:
        environment: A vLLM with the overlay.
        directory: For their files.
    """

    def __init__(self, environment: Environment, directory: Path) -> None:
        from tests.e2e.prefix_models import SHARED, write_tiny_model  # noqa: PLC0415 - needs the build's packages

        self._environment, self._directory = environment, directory
        model = write_tiny_model(environment, "shared", SHARED)
        self._engine = {"model": str(model), "tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}

    @cached_property
    def reference(self) -> Played:
        """Without UCM's settings; runs when it is first asked for."""
        return self.run("reference")

    def run(self, name: str, method: Mapping[str, Any] | None = None, store: str = "") -> Played:
        """Run one engine.

        Args:
            name: For its files.
            method: The value of ``ucm_sparse_config``, if any.
            store: The name of the connector's store; no connector if it is empty.
        """
        from tests.e2e.engine import INSIDE  # noqa: PLC0415 - needs the build's packages
        from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415
        from tests.e2e.prefix_runs import wait_for_quiet  # noqa: PLC0415

        settings = dict(self._engine)
        if method:
            settings["additional_config"] = {"ucm_sparse_config": dict(method)}
        if store:
            settings |= connector(posix(self._directory / store))
        switches = {"PYTHONPATH": os.fspath(INSIDE)}
        engine = PrefixEngine(self._environment, self._directory / name, settings, switches)
        with engine:
            answers = [answer for batch in batches() for answer in engine.generate(batch)]
            if store:
                wait_for_quiet(self._directory / store)
            preemptions = engine.counters()["vllm:num_preemptions_total"]
        return Played(answers, preemptions, engine.log)

    def esa(self, name: str) -> dict[str, Any]:
        """ESA with a store of its own."""
        from tests.e2e.prefix_engine import posix  # noqa: PLC0415 - needs the build's packages

        return {ESA: {**ESA_OPTIONS, "store": posix(self._directory / name)}}


@pytest.fixture(scope="module")
def two(environments: Environments, tmp_path_factory: pytest.TempPathFactory) -> TwoWorkers:
    return TwoWorkers(environments.overlay, tmp_path_factory.mktemp("two"))


def found(played: Played) -> list[int | None]:
    return [answer.cached for answer in played.answers]


def all_whole_blocks() -> list[int]:
    """Of each prompt, the tokens that can be found: not the last one, from which the first answer is computed."""
    return [(len(one["prompt"]) - 1) // BLOCK * BLOCK for batch in batches() for one in batch]


def test_what_two_workers_store_two_others_load(two: TwoWorkers) -> None:
    cold = two.run("cold", store="store")
    warm = two.run("warm", store="store")
    assert cold.tokens == warm.tokens == two.reference.tokens
    assert cold.preemptions > 0, "more at once than there is room for"
    assert found(warm) == all_whole_blocks()


def test_block_top_k_of_two_workers(two: TwoWorkers) -> None:
    played = two.run("top-k", TOP_K)
    assert played.tokens == two.reference.tokens
    assert f"[UCM.Sparse] {RANKS} worker(s) run checked_topk:CheckedTopK as the scheduler does" in played.log
    assert played.log.count("CheckedTopK restricted 1 decodes in 1 steps") == RANKS


def test_esa_of_two_workers_beside_the_connector(two: TwoWorkers) -> None:
    """What one engine with the method has stored, the next one loads, moves out of the cache and brings back."""
    cold = two.run("esa-cold", two.esa("middle-cold"), "esa-store")
    warm = two.run("esa-warm", two.esa("middle-warm"), "esa-store")
    assert cold.tokens == warm.tokens == two.reference.tokens
    assert found(warm) == all_whole_blocks()
    for played in (cold, warm):
        assert played.log.count("ESA restricted 1 rows in 1 steps") == RANKS
