"""Serving requests on engines around vLLM's own scheduler, one after the other on the same store."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.ucm.integration.vllm.connector.simulation.truth import CELL
from ucm.store.base import BlockKey, BlockTransfer

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.ucm.integration.vllm.connector.simulation.setting import Setting
    from tests.ucm.integration.vllm.connector.simulation.truth import Truth
    from tests.ucm.integration.vllm.connector.simulation.vllm_engine import VllmEngine

STARTS, REQUESTS = 2, 40


def serve(
    make: Callable[[Setting, Path, random.Random, Truth], VllmEngine],
    setting: Setting,
    directory: Path,
    chance: random.Random,
    truth: Truth,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
) -> Counter[str]:
    """Serve some of the prompts, and check every answer, every stored block and that no block is lost.

    Args:
        make: The engine's class.
        setting: What kind of engine.
        directory: Where its model and its blocks are.
        chance: Decides what is asked, and when.
        truth: What is right.
        prompts: What may be asked.
        lengths: How many tokens may be answered.

    Returns:
        How often what happened, in all engines together; ``stored`` is of the last one.
    """
    happened: Counter[str] = Counter()
    known: dict[bytes, tuple[int, ...]] = {}
    for _ in range(STARTS):
        engine = make(setting, directory, chance, truth)
        left = REQUESTS
        while left:
            while left and chance.random() < 0.4:
                engine.submit(list(chance.choice(prompts)), chance.choice(lengths))
                left -= 1
            engine.turn()
        engine.drain()
        known.update(engine.known)
        engine.known = known
        happened["stored"] = check_stored(engine)
        assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == setting.blocks - 1
        engine.close()
        happened += engine.happened
    return happened


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


def check_happened(happened: Counter[str], setting: Setting, *more: str) -> None:
    """What such engines are there for has happened."""
    expected = {"stored", "loads", "finished", *more} | ({"invalid"} if setting.failing_loads else set())
    assert all(happened[what] for what in expected), happened
