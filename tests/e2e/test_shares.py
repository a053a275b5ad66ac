"""A salt that floods a store with a capacity evicts its own blocks where salts have shares, in a real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.prefix_workload import prompt, request
from tests.e2e.workload import BLOCK

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.prefix_runs import PrefixRuns

pytestmark = [pytest.mark.e2e, pytest.mark.newest_only]

#: Whole blocks of the steady salt's prompt, and of each of the others.
STEADY, OTHER = 6, 8
CAPACITY = 3 << 20
#: How many of the others there are at most.
MOST = 400


@pytest.mark.parametrize("share_seconds", [86_400.0, 0.0], ids=["shares", "no shares"])
def test_a_steady_salt_keeps_its_blocks_beside_one_that_floods(
    prefix_runs: PrefixRuns, tmp_path: Path, share_seconds: float
) -> None:
    from tests.e2e.prefix_engine import PrefixEngine, connector, posix  # noqa: PLC0415 - needs the build's packages
    from tests.e2e.prefix_runs import block_files, nbytes_of  # noqa: PLC0415
    from tests.e2e.processes import IN_PROCESS  # noqa: PLC0415

    steady = request(prompt(STEADY * BLOCK + 1, "steady"), 4, salt="steady")
    store = tmp_path / "store"
    settings = {
        **posix(store),
        "posix_capacity": CAPACITY,
        "share_seconds": share_seconds,
        "touch_seconds": 0.001,
    }
    with PrefixEngine(prefix_runs.environments[False], tmp_path / "engine", connector(settings), IN_PROCESS) as engine:
        (answer,) = engine.generate([steady])
        engine.settle()
        kept = set(block_files(store))
        assert len(kept) == STEADY
        first = set[str]()
        for number in range(MOST):  # while the evictor is behind, blocks of some are not saved
            engine.generate([request(prompt(OTHER * BLOCK + 1, f"flood {number}"), 4, salt="flood")])
            if not first:
                engine.settle()
                first = set(block_files(store)) - kept
                assert len(first) == OTHER
            elif first.isdisjoint(block_files(store)):
                break
        files = block_files(store)
        assert first.isdisjoint(files), "the flood's own oldest blocks went"
        assert (kept <= set(files)) == bool(share_seconds)
        assert nbytes_of(files.values()) <= CAPACITY
        flood = nbytes_of(path for name, path in files.items() if name not in kept)
        assert flood > CAPACITY / 2, "what the steady salt does not use is lent"
        assert engine.reset()
        (again,) = engine.generate([steady])
    assert again.tokens == answer.tokens
    assert again.cached == (STEADY * BLOCK if share_seconds else 0)
