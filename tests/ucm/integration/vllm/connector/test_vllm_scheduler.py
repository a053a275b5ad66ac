"""vLLM's own scheduler with our whole connector, on a model in miniature whose every wrong byte shows."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.ucm.integration.vllm.connector.simulation.setting import Setting
from tests.ucm.integration.vllm.connector.simulation.truth import CELL
from tests.ucm.integration.vllm.connector.test_simulation import prompts
from ucm.store.base import BlockKey, BlockTransfer

pytest.importorskip("vllm", reason="vLLM is not installed; the end-to-end session runs these tests beside it")

from tests.ucm.integration.vllm.connector.simulation.vllm_engine import VllmEngine

if TYPE_CHECKING:
    from pathlib import Path

STARTS, REQUESTS = 2, 40


def serve(engine: VllmEngine, chance: random.Random, some: list[list[int]]) -> None:
    left = REQUESTS
    while left:
        while left and chance.random() < 0.4:
            engine.submit(list(chance.choice(some)), chance.randint(1, 12))
            left -= 1
        engine.turn()
    engine.drain()


def check_stored(engine: VllmEngine) -> int:
    """Every block that is stored is right; returns how many there are."""
    count = 0
    keys = [BlockKey(key) for key in engine.known]
    groups = engine.setting.cache_groups().groups
    parts = [(memory, group) for memory in engine.memories for group in groups]
    for (memory, group), store in zip(parts, engine.stores, strict=True):
        layers = [layer for layer, of in enumerate(memory.group_of) if of == group.index]
        there = [key for key, found in zip(keys, store.lookup(keys), strict=True) if found]
        read = {key: [bytearray(group.block_size * CELL.itemsize) for _ in layers] for key in there}
        blocks = [BlockTransfer(key, [memoryview(row) for row in rows]) for key, rows in read.items()]
        for key in store.inner.wait(store.inner.load(blocks)).done:
            right = engine.truth.cells(engine.known[key])[memory.rank, layers, -group.block_size :]
            assert b"".join(read[key]) == right.astype(CELL).tobytes(), "a wrong block was stored"
            count += 1
    return count


def run(setting: Setting, directory: Path, seed: int) -> Counter[str]:
    chance = random.Random(seed)  # noqa: S311 - no secret
    truth = setting.truth()
    some = prompts(chance)
    happened: Counter[str] = Counter()
    known: dict[bytes, tuple[int, ...]] = {}
    for _ in range(STARTS):
        engine = VllmEngine(setting, directory, chance, truth)
        serve(engine, chance, some)
        known.update(engine.known)
        engine.known = known
        happened["stored"] = check_stored(engine)
        engine.close()
        happened += engine.happened
    return happened


ENGINES = {
    "direct": Setting(),
    "direct, loads fail": Setting(ranks=2, failing_loads=0.3, failing_dumps=0.05, aborts=0.2),
    "direct, all loads fail": Setting(failing_loads=1.0),
    "direct, asynchronous": Setting(asynchronous=True, ranks=2, failing_loads=0.2, aborts=0.2),
    "direct, no prefix cache": Setting(caching=False, failing_loads=0.1),
    "layer by layer": Setting(layerwise=True, ranks=2),
    "layer by layer, loads fail": Setting(layerwise=True, failing_loads=0.3, aborts=0.3, budget=8, chunk=5),
    "layer by layer, asynchronous": Setting(layerwise=True, asynchronous=True, aborts=0.2),
    "a window beside full attention": Setting(groups=((4, None, 3), (4, 6, 3)), ranks=2, blocks=48, aborts=0.1),
    "a window, asynchronous": Setting(
        groups=((4, None, 2), (4, 9, 2), (4, 1, 2)), asynchronous=True, blocks=72, layerwise=True
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_engines(name: str, tmp_path: Path) -> None:
    setting = ENGINES[name]
    happened = run(setting, tmp_path, seed=1)
    print(name, dict(happened))
    expected = {"stored", "loads", "finished"} | ({"invalid"} if setting.failing_loads else set())
    assert all(happened[what] for what in expected)
