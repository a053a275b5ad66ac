"""A worker: KV memory, a model that reads and writes it, and the connector's worker side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from unittest.mock import patch

import numpy as np

from tests.ucm.integration.vllm.connector.simulation.truth import CELL, cell
from tests.ucm.integration.vllm.connector.tensors import Tensor
from ucm.integration.vllm.connector import host_memory
from ucm.integration.vllm.connector.commit_gate import CommitGate
from ucm.integration.vllm.connector.host_memory import HostMemory
from ucm.integration.vllm.connector.layerwise import LayerWiseWorker
from ucm.integration.vllm.connector.transfer import HostTransfer
from ucm.integration.vllm.connector.worker import TransferWorker

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from tests.ucm.integration.vllm.connector.simulation.setting import Setting
    from tests.ucm.integration.vllm.connector.simulation.truth import Keys, Truth
    from ucm.integration.vllm.connector.groups import CacheGroups
    from ucm.integration.vllm.connector.metadata import BlockMoves, StepPlan
    from ucm.integration.vllm.connector.transfer import GroupTransfer
    from ucm.store.base import BlockGeometry, KVStore


class OpenStore(Protocol):
    """Opens a rank's store of one group."""

    def __call__(self, rank: int, group: int, geometry: BlockGeometry) -> KVStore: ...


@dataclass(frozen=True)
class Chunk:
    """Tokens of one request to compute in a step."""

    start: int
    tokens: Sequence[int]
    block_ids: list[list[int]]


class Uncounted:
    """Counters that nobody reads."""

    def loaded(self, *_: object) -> None:
        pass

    def dumped(self, *_: object) -> None:
        pass

    def failed(self, *_: object) -> None:
        pass


def layer_names(groups: CacheGroups) -> list[str]:
    """All layers, those of the first group first."""
    return [name for group in groups.groups for name in group.layer_names]


class Rank:
    """One of the engine's workers.

    Args:
        number: Which.
        groups: The model's groups; those with blocks of the same size lie in the same memory.
        setting: What the engine is like.
        open_store: Opens its stores.
    """

    def __init__(self, number: int, groups: CacheGroups, setting: Setting, open_store: OpenStore) -> None:
        self.number = number
        self.groups = groups
        self.group_of = [group.index for group in groups.groups for _ in group.layer_names]
        memory: dict[tuple[int, int], NDArray[np.uint8]] = {}
        self._cells: list[NDArray[np.uint64]] = []
        caches: dict[str, Tensor] = {}
        for group in groups.groups:
            for place, name in enumerate(group.layer_names):
                shape = (setting.blocks, group.block_size, 1)
                raw = memory.setdefault(
                    (group.block_size, place),
                    np.full(setting.blocks * group.block_size * CELL.itemsize, 0xEE, np.uint8),
                )
                caches[name] = Tensor(raw, shape, (group.block_size, 1, 1), CELL)
                self._cells.append(raw.view(CELL).reshape(shape[:2]))
        transfers: dict[int, GroupTransfer] = {}
        self.geometries: dict[int, BlockGeometry] = {}
        for group in groups.groups:
            with patch.object(host_memory, "_storage", lambda tensor: memoryview(tensor.raw)):
                found = HostMemory(group, caches, setting.blocks, {})
            self.geometries[group.index] = found.geometry
            transfers[group.index] = HostTransfer(found, open_store(number, group.index, found.geometry))
        self.worker = (LayerWiseWorker if setting.layerwise else TransferWorker)(
            transfers,
            CommitGate(setting.ranks, setting.batches),
            Uncounted(),
            places={group.index: number for group in groups.groups},
            saves=set(transfers),
            recovers=setting.loads != "held",
            between_steps=setting.loads == "between",
            background=setting.background,
        )
        self._between_steps = setting.loads == "between"
        self._loads: dict[str, list[BlockMoves]] = {}

    def step(
        self, plan: StepPlan, chunks: Iterable[Chunk], truth: Truth, keys: Keys, *, loads_last: bool
    ) -> tuple[set[int], set[str]]:
        """Execute a step in the order of vLLM's calls.

        Args:
            plan: The connector's part.
            chunks: What to compute.
            truth: What is right.
            keys: Names blocks.
            loads_last: Whether loads are started after the forward, as newer releases do between steps.

        Returns:
            The blocks that failed to load, and the requests whose loads have ended.
        """
        chunks = list(chunks)
        self.worker.begin(plan)
        self.worker.begin(plan)
        if not loads_last:
            self.worker.load(plan)
        for moves in plan.loads:
            self._loads.setdefault(moves.request_id, []).append(moves)
        for layer, name in enumerate(layer_names(self.groups)):
            self.worker.wait_for_layer(name)
            for chunk in chunks:
                self._compute(layer, chunk, truth.windows[layer])
            self.worker.layer_computed(name)
        if loads_last:
            self.worker.load(plan)
        self.worker.dump(plan)
        loaded = self.worker.take_loaded()
        failed = self.worker.take_failed_blocks()
        for request_id in loaded if self._between_steps else list(self._loads):
            for moves in self._loads.pop(request_id, ()):
                self._check(moves, failed, truth, keys)
        return failed, loaded

    def cells_at(self, position: int, block_ids: list[list[int]]) -> list[int]:
        """A token's cells in all layers."""
        return [int(self._at(layer, range(position, position + 1), block_ids)[0]) for layer in range(len(self._cells))]

    def _compute(self, layer: int, chunk: Chunk, window: int | None) -> None:
        group = self.groups.groups[self.group_of[layer]]
        begin = 0 if window is None else max(0, chunk.start + 1 - window)
        context = list(self._at(layer, range(begin, chunk.start), chunk.block_ids))
        for position, token in enumerate(chunk.tokens, chunk.start):
            if window is not None:
                context = context[-(window - 1) :] if window > 1 else []
            value = cell(np.array(context, CELL).tobytes(), token, layer, self.number)
            context.append(np.uint64(value))
            block = chunk.block_ids[group.index][position // group.block_size]
            self._cells[layer][block, position % group.block_size] = value

    def _at(self, layer: int, positions: range, block_ids: list[list[int]]) -> NDArray[np.uint64]:
        group = self.groups.groups[self.group_of[layer]]
        where = np.arange(positions.start, positions.stop)
        table = np.array(block_ids[group.index])
        found: NDArray[np.uint64] = self._cells[layer][table[where // group.block_size], where % group.block_size]
        return found

    def _check(self, moves: BlockMoves, failed: set[int], truth: Truth, keys: Keys) -> None:
        """What was loaded is what computing would have given."""
        group = self.groups.groups[moves.group]
        for key, block in zip(moves.keys, moves.block_ids, strict=True):
            if block not in failed:
                right = truth.cells(keys.tokens[key])[self.number, :, -group.block_size :]
                for layer, of in enumerate(self.group_of):
                    if of == group.index:
                        assert self._cells[layer][block].tolist() == right[layer].tolist(), "a wrong block was loaded"
