"""A worker: its KV cache, and the connector's worker side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from unittest.mock import patch

from ucm.compat import LoadPolicy
from ucm.integration.vllm.connector import kv_cache
from ucm.integration.vllm.connector.kv_cache import DeviceMemory, HostMemory
from ucm.integration.vllm.connector.transfer import HostTransfer, StagedTransfer
from ucm.integration.vllm.connector.transfer_worker import TransferWorker
from ucm.integration.vllm.metrics import ConnectorCounters
from ucm.store.memory.slab import SlabReader

if TYPE_CHECKING:
    from tests.clock import SimulatedClock
    from tests.ucm.integration.vllm.connector.simulation.setting import Setting
    from tests.ucm.integration.vllm.connector.simulation.truth import Keys, Truth
    from ucm.integration.vllm.connector.kv_cache import CacheGroup, CacheGroups
    from ucm.integration.vllm.connector.metadata import BlockMoves, StepPlan
    from ucm.integration.vllm.connector.transfer import GroupTransfer
    from ucm.store.base import BlockGeometry, KVStore


class OpenStore(Protocol):
    """Opens the store of a part of a group's blocks, by its place among those of all ranks."""

    def __call__(self, part: int, group: int, geometry: BlockGeometry) -> KVStore: ...


class Rank:
    """One of the engine's workers.

    Args:
        number: Its rank.
        groups: The model's groups.
        setting: The engine's settings.
        open_store: Opens its stores.
        clock: Time and threads.
    """

    def __init__(
        self, number: int, groups: CacheGroups, setting: Setting, open_store: OpenStore, clock: SimulatedClock
    ) -> None:
        self._clock = clock
        self.number = number
        self.memory = setting.memory(number)
        self.geometries: dict[int, BlockGeometry] = {}
        self._open_store = open_store
        self.slab = SlabReader(clock=clock)
        parts = [part for group in groups.groups for part in group.parts]
        transfers = {(part.index, part.place): self._transfer(part, setting) for part in parts}
        for part in parts:
            transfers[part.index, part.place].place = self._place(part)
        self.worker = TransferWorker(
            transfers,
            ConnectorCounters(),
            policy=LoadPolicy(setting.between_steps, setting.background),
            layer_wise=setting.layerwise,
            clock=clock,
        )
        self._between_steps = setting.between_steps
        self._loads: dict[str, list[BlockMoves]] = {}

    def begin(self, plan: StepPlan, *, loads_last: bool) -> None:
        """Make vLLM's calls before a forward.

        Args:
            plan: The connector's part of the step.
            loads_last: Whether loads are started after the forward, as newer releases do between steps.
        """
        self._plan, self._loads_last = plan, loads_last
        self.worker.begin(plan)
        self.worker.begin(plan)
        if not loads_last:
            self.worker.load(plan)
        for moves in plan.loads:
            self._loads.setdefault(moves.request_id, []).append(moves)

    def end(self, truth: Truth, keys: Keys) -> tuple[set[int], set[str]]:
        """Make vLLM's calls after a forward; return the blocks that failed to load, and requests whose loads ended."""
        if self._loads_last:
            self.worker.load(self._plan)
        self.worker.save(self._plan)
        loaded = self.worker.take_loaded()
        failed = self.worker.take_failed_blocks()
        for request_id in loaded if self._between_steps else list(self._loads):
            for moves in self._loads.pop(request_id, ()):
                self.memory.check(moves, failed, truth, keys)
        return failed, loaded

    def _place(self, group: CacheGroup) -> int:
        return self.number * len(group.parts) + group.place

    def _transfer(self, group: CacheGroup, setting: Setting) -> GroupTransfer:
        caches = self.memory.caches
        if setting.staged:
            from tests.ucm.integration.vllm.connector.torch_tensors import all_as_torch  # noqa: PLC0415 - needs torch

            device = DeviceMemory(group, all_as_torch(caches), setting.blocks, {})
            self.geometries[group.index] = device.geometry
            # Room for two blocks in each direction, so that there are several chunks.
            store = self._open_store(self._place(group), group.index, device.geometry)
            room = setting.rows * device.geometry.nbytes
            return StagedTransfer(
                device, store, self.slab, 2 * device.geometry.nbytes, save_queue_bytes=room, clock=self._clock
            )
        with patch.object(kv_cache, "_storage", lambda tensor: memoryview(tensor.raw)):
            host = HostMemory(group, caches, setting.blocks, {})
        self.geometries[group.index] = host.geometry
        store = self._open_store(self._place(group), group.index, host.geometry)
        return HostTransfer(host, store, self.slab, setting.rows * host.geometry.nbytes, clock=self._clock)
