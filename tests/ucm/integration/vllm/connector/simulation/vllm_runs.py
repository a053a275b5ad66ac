"""Serve requests on successive engines with vLLM's own scheduler and the same store."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from tests.simulated import repeatable
from tests.ucm.integration.vllm.connector.simulation.truth import CELL
from ucm.store.base import BlockKey, BlockTransfer

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.clock import SimulatedClock
    from tests.ucm.integration.vllm.connector.simulation.setting import Setting
    from tests.ucm.integration.vllm.connector.simulation.truth import Truth
    from tests.ucm.integration.vllm.connector.simulation.vllm_engine import VllmEngine

#: The minimum and maximum number of starts on one store, and the requests in each.
STARTS, MOST_STARTS, REQUESTS = 2, 8, 40


def serve(
    make: Callable[[Setting, Path, random.Random, Truth, SimulatedClock], VllmEngine],
    setting: Setting,
    directory: Path,
    chance: random.Random,
    truth: Truth,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    *more: str,
) -> Counter[str]:
    """Serve some of the prompts; check every answer and every stored block, and that no block is leaked.

    Engines are started until every expected event has happened.

    Args:
        make: The engine's class.
        setting: The engine's settings.
        directory: The directory of its blocks.
        chance: The source of random choices.
        truth: The expected results.
        prompts: The possible prompts.
        lengths: The possible numbers of generated tokens.
        more: Expected events besides those of the setting.

    Returns:
        The number of events of each kind, in all engines together; ``stored`` is of the last one.
    """
    clock = repeatable(1)
    happened: Counter[str] = Counter()
    known: dict[bytes, tuple[int, ...]] = {}
    failing = "invalid" if setting.loads == "direct" else "injected"
    expected = {"stored", "loads", "finished", *more} | ({failing} if setting.failing_loads else set())
    for start in range(1, MOST_STARTS + 1):
        engine = make(setting, directory, chance, truth, clock)
        if setting.loads == "direct" and not engine.connector._scheduler.policy.between_steps:
            # This release cannot recompute what fails to load into such a model, so nothing may be loaded.
            expected -= {"loads", failing}
            assert not happened["loads"]
        happened += play(engine, prompts, lengths, known)
        happened["stored"] = engine.happened["stored"]
        if start >= STARTS and all(happened[what] for what in expected):
            return happened
    raise AssertionError(f"{expected - set(+happened)} did not happen")


def play(
    engine: VllmEngine, prompts: Sequence[Sequence[int]], lengths: Sequence[int], known: dict[bytes, tuple[int, ...]]
) -> Counter[str]:
    """Serve some of the prompts with one engine, and end it; check as `serve` does.

    Args:
        engine: A new engine.
        prompts: The possible prompts.
        lengths: The possible numbers of generated tokens.
        known: The tokens up to the end of each block, by its key; those of this engine are added.

    Returns:
        The number of events of each kind; ``stored``: of blocks in the store.
    """
    chance, left = engine.chance, REQUESTS
    with engine._patched:  # a failure here must not leak its patches into the next test
        while left:
            while left and chance.random() < 0.4:
                engine.submit(list(chance.choice(prompts)), chance.choice(lengths))
                left -= 1
            engine.turn()
        engine.drain()
        known.update(engine.known)
        engine.known = known
        engine.happened["stored"] = check_stored(engine)
        assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == engine.setting.blocks - 1
        engine.close()
    return engine.happened


def check_stored(engine: VllmEngine) -> int:
    """Check every stored block; return their number."""
    count = 0
    keys = [BlockKey(key) for key in engine.known]
    setting, ranks = engine.setting, len(engine.memories)
    groups = {group.index: group for group in setting.cache_groups().groups}
    begins = f"kv(?P<part>[0-9]+)of{setting.slices}" if setting.slices else f"tp(?P<part>[0-9]+|all)(of)?{ranks}"
    shared = [setting.precisions and not group.is_recurrent for group in groups.values()]
    assert len(engine.stores) == sum(setting.slices or (1 if of_all else ranks) for of_all in shared)
    for tag, store in engine.stores.items():
        found = re.match(begins + "-pp0of1-g(?P<group>[0-9]+)-", tag)
        assert found is not None, tag
        part = 0 if found["part"] == "all" else int(found["part"])
        group = groups[int(found["group"])]
        slices = len(group.layer_names) * group.chunk_blocks
        there = [key for key, found in zip(keys, store.lookup(keys), strict=True) if found]
        nbytes = (1 if group.is_recurrent else group.block_size) * (2 if setting.slices else 1) * CELL.itemsize
        read = {key: [bytearray(nbytes) for _ in range(slices)] for key in there}
        blocks = [BlockTransfer(key, [memoryview(row) for row in rows]) for key, rows in read.items()]
        for key in store.inner.load(blocks).wait().done:
            right = setting.stored(group, engine.known[key], engine.truth, part)
            assert b"".join(read[key]) == right, "a wrong block was stored"
            count += 1
    return count
