"""Read a whole store, and compare every block with the expected content of its key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ucm.integration.vllm.connector.simulation.engine import open_blocks
from ucm.store.base import BlockKey, BlockTransfer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ucm.integration.vllm.connector.simulation.engine import Engine


def wrong_blocks(engine: Engine, directory: Path) -> tuple[int, list[str]]:
    """Return the number of blocks in the store for an engine's ranks and groups, and the wrong ones."""
    count, wrong = 0, []
    keys = [BlockKey(key) for key in engine.keys.tokens]
    for group in engine.setting.cache_groups().groups:
        geometry = engine.ranks[0].geometries[group.index]
        for part in range(len(engine.ranks) * len(group.parts)):
            with open_blocks(engine.clock, directory, part, group.index, geometry) as store:
                there = [key for key, found in zip(keys, store.lookup(keys), strict=True) if found]
                memory = {key: [bytearray(nbytes) for nbytes in geometry.slice_sizes] for key in there}
                blocks = [BlockTransfer(key, [memoryview(row) for row in rows]) for key, rows in memory.items()]
                done = store.load(blocks).wait().done
                count += len(done)
                for key in done:
                    tokens = engine.keys.tokens[key]
                    if b"".join(memory[key]) != engine.setting.stored(group, tokens, engine.truth, part):
                        wrong.append(f"part {part}, group {group.index}: {tokens}")
    return count, wrong
