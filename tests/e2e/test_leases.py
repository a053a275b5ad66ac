"""A request that asks to be retained keeps its blocks while the evictor deletes those of others, in a real engine."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.workload import BLOCK

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.prefix_runs import PrefixRuns
    from tests.e2e.workload import Request

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

#: Whole blocks of the two prompts that come back, and of each of the others, which push them out.
KEPT, OTHER = 6, 8
CAPACITY = 3 << 20
#: How many of the others there are at most.
MOST = 400


def test_a_retained_prefix_outlives_others(prefix_runs: PrefixRuns, tmp_path: Path) -> None:
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.prefix_runs import block_files, nbytes_of, wait_for_blocks  # noqa: PLC0415
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415

    chance = random.Random(7)  # noqa: S311 - prompts, no secrets

    def request(blocks: int, **params: Any) -> Request:
        prompt = [chance.randrange(3, 200) for _ in range(blocks * BLOCK + 1)]
        return {"prompt": prompt, "params": {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **params}}

    hint = {"extra_args": {"kv_transfer_params": {"ucm_retain_seconds": 600}}}
    retained, plain, malformed = request(KEPT, **hint), request(KEPT), request(1)
    malformed["params"]["extra_args"] = {"kv_transfer_params": {"ucm_retain_seconds": "long"}}
    store = tmp_path / "store"
    settings = {**posix(store), "posix_capacity": CAPACITY, "touch_seconds": 1.0}
    with PrefixEngine(prefix_runs.environments[False], tmp_path / "engine", connector(settings), IN_PROCESS) as engine:
        answers, names = [], list[set[str]]()
        for number, one in enumerate((retained, plain), 1):
            answers += engine.generate([one])
            wait_for_blocks(store, number * KEPT)
            names.append(set(block_files(store)))
        kept, others = names[0], names[1] - names[0]
        assert (len(kept), len(others)) == (KEPT, KEPT)
        engine.generate([malformed])
        for _ in range(MOST):  # while the evictor is behind, blocks of some are not saved
            engine.generate([request(OTHER)])
            if others.isdisjoint(block_files(store)):
                break
        assert others.isdisjoint(block_files(store)), "what asked for nothing was evicted"
        assert kept <= set(block_files(store))
        assert engine.reset()
        again = engine.generate([retained]) + engine.generate([plain])
        assert [one.tokens for one in again] == [one.tokens for one in answers[:2]]
        assert again[0].cached == KEPT * BLOCK
        assert not again[1].cached
        for _ in range(MOST):  # an engine reads its tiers' counters every few seconds
            engine.generate([request(OTHER)])
            if (counters := engine.counters())["ucm:tier_evicted_blocks_total{tier=posix}"]:
                break
        assert counters["ucm:hints_total{outcome=retained}"] == 2
        assert counters["ucm:hints_total{outcome=malformed}"] == 1
        assert counters["ucm:tier_evicted_blocks_total{tier=posix}"] > 0
        assert "is not retained: ucm_retain_seconds is str, not a number of seconds" in engine.log
        assert nbytes_of(block_files(store).values()) <= CAPACITY
