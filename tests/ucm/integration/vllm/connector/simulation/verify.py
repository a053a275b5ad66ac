"""Read a whole store, and compare every block with the expected content of its key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.ucm.integration.vllm.connector.simulation.engine import open_blocks
from tests.ucm.integration.vllm.connector.simulation.truth import CELL
from ucm.store.base import BlockKey, BlockTransfer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ucm.integration.vllm.connector.simulation.engine import Engine


def wrong_blocks(engine: Engine, directory: Path) -> tuple[int, list[str]]:
    """Return the number of blocks in the store for an engine's ranks and groups, and the wrong ones."""
    count, wrong = 0, []
    keys = [BlockKey(key) for key in engine.keys.tokens]
    for rank in engine.ranks:
        for group in engine.setting.cache_groups().groups:
            layers = [layer for layer, of in enumerate(rank.memory.group_of) if of == group.index]
            with open_blocks(engine.clock, directory, rank.number, group.index, rank.geometries[group.index]) as store:
                there = [key for key, found in zip(keys, store.lookup(keys), strict=True) if found]
                sizes = rank.geometries[group.index].slice_sizes
                memory = {key: [bytearray(nbytes) for nbytes in sizes] for key in there}
                blocks = [BlockTransfer(key, [memoryview(row) for row in rows]) for key, rows in memory.items()]
                done = store.load(blocks).wait().done
                count += len(done)
                for key in done:
                    right = engine.truth.cells(engine.keys.tokens[key])[rank.number, layers, -group.chunk_tokens :]
                    if b"".join(memory[key]) != right.astype(CELL).tobytes():
                        wrong.append(f"rank {rank.number}, group {group.index}: {engine.keys.tokens[key]}")
    return count, wrong
