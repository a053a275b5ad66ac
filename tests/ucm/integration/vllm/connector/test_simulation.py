"""Scheduler side, worker side and stores together, in miniature engines, through thousands of steps.

Every engine serves random requests that share prefixes, with a store that is slow, loses blocks and fails, and is
restarted on the stored blocks. It must serve no wrong token, load and store no wrong block, write to no block while it
is saved, and always make progress.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from tests.simulated import repeatable
from tests.ucm.integration.vllm.connector.simulation.engine import Engine
from tests.ucm.integration.vllm.connector.simulation.setting import Setting, any_setting
from tests.ucm.integration.vllm.connector.simulation.truth import VOCABULARY, Keys
from tests.ucm.integration.vllm.connector.simulation.verify import wrong_blocks

if TYPE_CHECKING:
    from tests.clock import SimulatedClock

ROOT = Path(__file__).parents[5]
#: The number of starts on one store, and of requests in each.
STARTS, REQUESTS = 3, 30


def prompts(chance: random.Random) -> list[list[int]]:
    """Return prompts that share prefixes: each continues a part of an earlier one, or is new."""
    found: list[list[int]] = []
    for _ in range(12):
        base = chance.choice(found) if found and chance.random() < 0.7 else []
        kept = base[: chance.randint(0, len(base))]
        found.append([*kept, *(chance.randrange(1, VOCABULARY) for _ in range(chance.randint(1, 24)))])
    return found


def serve(engines: list[Engine], chance: random.Random, some: list[list[int]]) -> None:
    """Submit requests to engines at random times, then run them to their end."""
    left = REQUESTS
    while left:
        engine = chance.choice(engines)
        while left and chance.random() < 0.4:
            engine.submit(list(chance.choice(some)), chance.randint(1, 12))
            left -= 1
        engine.turn()
    for engine in engines:
        engine.drain()


def run(setting: Setting, directory: Path, seed: int, engines: int = 1) -> Counter[str]:
    """Start one or several engines repeatedly on one store; return the events of all."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    truth, keys, clock = setting.truth(), Keys(), repeatable(seed)
    some = prompts(chance)
    happened: Counter[str] = Counter()
    for _ in range(STARTS):
        started = [Engine(setting, directory, chance, truth, keys, clock) for _ in range(engines)]
        serve(started, chance, some)
        for engine in started:
            engine.close()
            happened += engine.happened
            happened["recovered"] += engine.scheduler.recovered
            happened["preempted"] += engine.scheduler.preempted
            happened["injected"] += sum(store.failed for store in engine.stores)
        stored, wrong = wrong_blocks(started[0], directory)
        assert wrong == []
        happened["stored"] = stored
    clock.run_until_idle()
    assert clock.alive == []
    return happened


HYBRID = ((4, None, 3), (4, 6, 3))
OTHER_SIZES = ((2, 3, 2), (4, None, 2))

#: Engines, and the events without which the test would be meaningless.
ENGINES: dict[str, tuple[Setting, set[str]]] = {
    "staged": (Setting(blocks=20), {"preempted"}),
    "little room to stage": (Setting(rows=2, ranks=2), set()),
    "several ranks": (Setting(ranks=3, failing_saves=0.05), {"injected"}),
    "chunks": (Setting(stored_tokens=8, blocks=20), {"preempted"}),
    "chunks, reads fail": (Setting(stored_tokens=10, ranks=2, failing_loads=0.3, aborts=0.2), {"injected", "aborts"}),
    "chunks, layer by layer": (Setting(stored_tokens=8, loads="within", layerwise=True, drafts=1), {"preempted"}),
    "chunks, direct, loads fail": (
        Setting(stored_tokens=8, loads="direct", ranks=2, failing_loads=0.2, losses=0.1),
        {"invalid", "recovered"},
    ),
    "chunks, asynchronous": (
        Setting(stored_tokens=12, batches=2, asynchronous=True, drafts=3, failing_loads=0.1, aborts=0.1),
        {"injected", "aborts"},
    ),
    "chunks, windows": (
        Setting(groups=((4, None, 2), (4, 9, 2), (4, 1, 2)), stored_tokens=8, loads="within", losses=0.1, blocks=64),
        {"lost"},
    ),
    "a slow store": (Setting(late=0.97, blocks=20), {"preempted"}),
    "blocks get lost": (Setting(losses=0.2), {"lost"}),
    "reads fail": (Setting(ranks=2, failing_loads=0.3, aborts=0.2), {"injected", "aborts"}),
    "reads fail, asynchronous": (
        Setting(batches=2, asynchronous=True, ranks=2, failing_loads=0.1, aborts=0.1),
        {"injected"},
    ),
    "aborts": (Setting(aborts=0.3), {"aborts"}),
    "aborts that free at once": (Setting(aborts=0.3, background=False), {"aborts"}),
    "drafts": (Setting(drafts=3, failing_saves=0.1), {"injected"}),
    "prompts alone are stored": (Setting(save_decode_blocks=False), set()),
    "direct": (Setting(loads="direct", blocks=20), {"preempted"}),
    "direct, blocks get lost": (Setting(loads="direct", losses=0.2), {"lost", "invalid", "recovered"}),
    "direct, loads fail": (Setting(loads="direct", ranks=2, failing_loads=0.3), {"invalid", "recovered"}),
    "direct, aborts": (Setting(loads="direct", aborts=0.3, failing_loads=0.1), {"aborts", "invalid"}),
    "direct, no room is reserved": (
        Setting(loads="direct", reserves=False, blocks=20, failing_loads=0.1, aborts=0.1),
        {"recovered"},
    ),
    "direct, asynchronous with drafts": (
        Setting(loads="direct", batches=2, asynchronous=True, drafts=3, failing_loads=0.1),
        {"recovered"},
    ),
    "direct, a pipeline": (
        Setting(loads="direct", batches=3, ranks=2, failing_loads=0.1, aborts=0.1),
        {"invalid", "aborts"},
    ),
    "direct, no prefix cache of its own": (
        Setting(loads="direct", caching=False, ranks=2, batches=2, failing_loads=0.1),
        {"invalid"},
    ),
    "layer by layer": (Setting(loads="within", layerwise=True, drafts=1), {"preempted"}),
    "layer by layer, reads fail": (
        Setting(loads="within", layerwise=True, ranks=2, failing_loads=0.3, aborts=0.2, budget=8, chunk=5),
        {"injected", "aborts"},
    ),
    "within a step, asynchronous": (
        Setting(loads="within", losses=0.2, batches=2, asynchronous=True, ranks=2, aborts=0.2),
        {"lost", "aborts"},
    ),
    "a window beside full attention": (
        Setting(groups=HYBRID, loads="within", losses=0.1, blocks=48, batches=2, asynchronous=True),
        {"lost"},
    ),
    "a window, and little room to stage": (Setting(groups=HYBRID, loads="within", rows=4, blocks=48), set()),
    "blocks of different sizes": (
        Setting(groups=OTHER_SIZES, loads="within", ranks=2, blocks=64, layerwise=True),
        set(),
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_engines(name: str, tmp_path: Path) -> None:
    """Runs until every expected event has happened; the seed determines the events, and which thread goes first."""
    setting, expected = ENGINES[name]
    wanted = {"stored", "loads", "finished", *expected}
    happened: Counter[str] = Counter()
    for seed in range(1, 9):
        directory = tmp_path / str(seed)
        directory.mkdir()
        happened += run(setting, directory, seed)
        print(name, dict(happened))
        if all(happened[what] for what in wanted):
            return
    pytest.fail(f"{wanted - set(+happened)} did not happen")


@pytest.mark.parametrize("seed", range(24))
def test_any_engine(seed: int, tmp_path: Path) -> None:
    setting = any_setting(random.Random(seed))  # noqa: S311 - no secret
    print(setting)
    assert run(setting, tmp_path, seed)["finished"] == STARTS * REQUESTS


@pytest.mark.parametrize("loads", ["staged", "direct"])
def test_two_engines_on_one_store(loads: Literal["staged", "direct"], tmp_path: Path) -> None:
    setting = Setting(loads=loads, losses=0.1, failing_saves=0.05, ranks=2)
    assert run(setting, tmp_path, seed=2, engines=2)["loads"] > 0


#: Engines whose blocks are stored in slices of heads.
SLICED = {
    "staged": Setting(slices=2),
    "four slices, chunks, reads fail": Setting(slices=4, stored_tokens=8, failing_loads=0.1),
    "direct, blocks get lost": Setting(slices=2, loads="direct", losses=0.1),
    "layer by layer, a window": Setting(slices=2, groups=HYBRID, loads="within", layerwise=True, blocks=48),
}


def across_sizes(setting: Setting, directory: Path, sizes: tuple[int, int]) -> None:
    """Let engines of so many ranks, one after the other, serve requests; only the first one saves."""
    chance = random.Random(1)  # noqa: S311 - no secret
    truth, keys, clock = setting.truth(), Keys(), repeatable(1)
    some = prompts(chance)
    for one in (replace(setting, ranks=sizes[0]), replace(setting, ranks=sizes[1], failing_saves=1.0)):
        engine = Engine(one, directory, chance, truth, keys, clock)
        serve([engine], chance, some)
        engine.close()
        stored, wrong = wrong_blocks(engine, directory)
        assert wrong == []
        assert stored
    assert engine.happened["loads"] > 0
    assert engine.happened["finished"] == REQUESTS


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", SLICED)
def test_slices_of_heads_are_shared_between_sizes(name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    across_sizes(SLICED[name], tmp_path, sizes)


def test_an_engine_without_a_store_serves_the_same(clock: SimulatedClock, tmp_path: Path) -> None:
    """It computes the results to which all others are compared."""
    chance = random.Random(3)  # noqa: S311 - no secret
    setting = Setting(failing_saves=1.0)
    engine = Engine(setting, tmp_path, chance, setting.truth(), Keys(), clock)
    serve([engine], chance, prompts(chance))
    engine.close()
    assert engine.happened["loads"] == 0
    assert engine.happened["finished"] == REQUESTS


def test_a_seed_has_the_same_events_in_every_process() -> None:
    """Neither the order of sets nor the real time decides anything, so a failure can be repeated."""
    code = (
        "import pathlib, sys, tempfile\n"
        f"from {__name__} import ENGINES, run\n"
        "with tempfile.TemporaryDirectory() as directory:\n"
        "    print(run(ENGINES['staged'][0], pathlib.Path(directory), 1))\n"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ""},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "2")
    }
    assert len(told) == 1
