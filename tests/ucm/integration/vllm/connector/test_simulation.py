"""Scheduler side, worker side and stores together, in engines in miniature, through thousands of steps.

Every engine serves random requests that share prefixes, on a store that is slow, loses blocks and fails, and starts
again on what was stored. No wrong token may be served, no wrong block be loaded or stored, no block be written while it
is dumped, and the engine must get on.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.ucm.integration.vllm.connector.simulation.engine import Engine
from tests.ucm.integration.vllm.connector.simulation.setting import Setting
from tests.ucm.integration.vllm.connector.simulation.truth import VOCABULARY, Keys
from tests.ucm.integration.vllm.connector.simulation.verify import wrong_blocks

if TYPE_CHECKING:
    from pathlib import Path


#: Starts on one store, and requests in each.
STARTS, REQUESTS = 4, 40


def prompts(chance: random.Random) -> list[list[int]]:
    """Prompts that share prefixes: each goes on from a piece of an earlier one, or begins anew."""
    found: list[list[int]] = []
    for _ in range(12):
        base = chance.choice(found) if found and chance.random() < 0.7 else []
        kept = base[: chance.randint(0, len(base))]
        found.append([*kept, *(chance.randrange(1, VOCABULARY) for _ in range(chance.randint(1, 24)))])
    return found


def serve(engine: Engine, chance: random.Random, some: list[list[int]]) -> None:
    """Requests at random moments, then all to their end."""
    left = REQUESTS
    while left:
        while left and chance.random() < 0.4:
            engine.submit(list(chance.choice(some)), chance.randint(1, 12))
            left -= 1
        engine.turn()
    engine.drain()


def run(setting: Setting, directory: Path, seed: int) -> Counter[str]:
    """Several starts of an engine on one store; what happened in all of them."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    truth, keys = setting.truth(), Keys()
    some = prompts(chance)
    happened: Counter[str] = Counter()
    for _ in range(STARTS):
        engine = Engine(setting, directory, chance, truth, keys)
        serve(engine, chance, some)
        engine.close()
        happened += engine.happened
        happened["recovered"] += engine.scheduler.recovered
        happened["preempted"] += engine.scheduler.preempted
        happened["injected"] += sum(store.failed for store in engine.stores)
        stored, wrong = wrong_blocks(engine, directory)
        assert wrong == []
        happened["stored"] = stored
    return happened


SETTINGS = {
    "plain": Setting(),
    "layer by layer": Setting(layerwise=True, loads="within"),
    "losses": Setting(losses=0.05),
    "failing dumps": Setting(failing_dumps=0.1, aborts=0.02),
    "failing loads": Setting(failing_loads=0.1),
    "failing loads within": Setting(failing_loads=0.1, loads="within"),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SETTINGS)
def test_engines(name: str, seed: int, tmp_path: Path) -> None:
    happened = run(SETTINGS[name], tmp_path, seed)
    print(name, dict(happened))
    assert happened["stored"] > 0
    assert happened["loads"] > 0
