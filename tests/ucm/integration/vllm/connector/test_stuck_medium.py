"""A first tier stuck in a write costs rows and blocks, but never delays a forward or stores anything wrong."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from tests.ucm.integration.vllm.connector.tensors import tensor
from tests.ucm.integration.vllm.connector.test_transfer_worker import Counts
from ucm.integration.vllm.connector import kv_cache, transfer_worker
from ucm.integration.vllm.connector.kv_cache import CacheGroup, DeviceMemory, HostMemory
from ucm.integration.vllm.connector.metadata import BlockMoves, StepPlan
from ucm.integration.vllm.connector.transfer import HostTransfer, StagedTransfer
from ucm.integration.vllm.connector.transfer_worker import TransferWorker
from ucm.store.base import BlockKey, BlockTransfer
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.memory.slab import SlabReader
from ucm.store.posix import directory, files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from tests.clock import SimulatedClock
    from ucm.integration.vllm.connector.transfer import GroupTransfer
    from ucm.store.base import Buffer

pytest_plugins = ("tests.simulated",)

BLOCKS, LAYERS, ROOM = 12, 3, 4
KEYS = [BlockKey(number.to_bytes(16, "big")) for number in range(BLOCKS)]

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed; the end-to-end session runs these tests beside vLLM",
)


class Stuck:
    """Writes that block after reading half of their bytes, until ``over``."""

    def __init__(self, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.over = clock.event()
        self.began = 0
        write_from = files.write_from

        def stuck(descriptor: int, buffers: Sequence[Buffer | bytearray], offset: int, nbytes: int) -> None:
            half = sum(memoryview(buffer).nbytes for buffer in buffers[: len(buffers) // 2])
            write_from(descriptor, buffers[: len(buffers) // 2], offset, half)
            self.began += 1
            self.over.wait()
            write_from(descriptor, buffers[len(buffers) // 2 :], offset + half, nbytes - half)

        monkeypatch.setattr(directory, "write_from", stuck)


class Setup:
    """KV caches, a worker, and a store with a queue for a few blocks."""

    def __init__(self, clock: SimulatedClock, directory: Path, *, on_device: bool) -> None:
        self.clock = clock
        self.caches = {f"layer {layer}": tensor((2, BLOCKS, 4, 8)) for layer in range(LAYERS)}
        group = CacheGroup(0, 4, None, {}, tuple(self.caches))
        config = StoreConfig(directories=(str(directory),), save_threads=2, save_nice=0)
        self.counts = Counts()
        if on_device:
            from tests.ucm.integration.vllm.connector.torch_tensors import all_as_torch  # noqa: PLC0415 - needs torch

            device = DeviceMemory(group, all_as_torch(self.caches), BLOCKS, {})
            nbytes, geometry = device.geometry.nbytes, device.geometry
            make: Callable[..., GroupTransfer] = partial(StagedTransfer, device, staging_bytes=4 * nbytes)
        else:
            with patch.object(kv_cache, "_storage", lambda found: memoryview(found.raw)):
                host = HostMemory(group, self.caches, BLOCKS, {})
            nbytes, geometry = host.geometry.nbytes, host.geometry
            make = partial(HostTransfer, host)
        self.geometry = geometry
        self.reopen = partial(open_store, config, "model/rank0", geometry, clock=clock)
        slab = SlabReader(clock=clock)
        transfer = make(store=self.reopen(), slab=slab, save_queue_bytes=ROOM * nbytes, clock=clock)
        self.worker = TransferWorker({(0, 0): transfer}, self.counts, clock=clock)
        self._step = 0

    def content(self, block: int) -> bytes:
        return b"".join(cache.view()[:, block].tobytes() for cache in self.caches.values())

    def step(self, saves: Iterable[int], overwritten: Iterable[int] = ()) -> None:
        """Run a step that overwrites some blocks and fills others; no time passes in it."""
        self._step += 1
        plan = StepPlan(self._step, saves=[self.moves(block) for block in saves], fresh_block_ids=set(overwritten))
        begun = self.clock.monotonic()
        self.worker.begin(plan)
        self.worker.load(plan)
        for name, cache in self.caches.items():
            self.worker.wait_for_layer(name)
            cache.view()[:, list(overwritten)] = 0xEE
        self.worker.save(plan)
        assert self.clock.monotonic() == begun, "it waits for the medium"
        self.clock.advance(1.0)

    def moves(self, block: int) -> BlockMoves:
        return BlockMoves("r", 0, [KEYS[block]], [block], [block])

    def stored(self, key: BlockKey) -> bytes | None:
        """Return what a new engine finds under a key."""
        memory = bytearray(self.geometry.nbytes)
        at, slices = 0, []
        for size in self.geometry.slice_sizes:
            slices.append(memoryview(memory)[at : at + size])
            at += size
        with self.reopen() as store:
            result = store.load([BlockTransfer(key, slices)]).wait()
        return bytes(memory) if result.done else None


@pytest.fixture(
    params=[
        pytest.param(False, id="host"),
        pytest.param(True, id="device", marks=needs_torch),
    ]
)
def setup(request: pytest.FixtureRequest, clock: SimulatedClock, tmp_path: Path) -> Setup:
    return Setup(clock, tmp_path, on_device=request.param)


@pytest.fixture
def stuck(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> Stuck:
    return Stuck(setup.clock, monkeypatch)  # the setup has created its directories by now


def test_a_forward_reuses_blocks_that_a_stuck_write_was_given(setup: Setup, stuck: Stuck) -> None:
    were = [setup.content(block) for block in range(BLOCKS)]
    setup.step([0, 1])
    assert stuck.began == 2, "all threads of the store"
    setup.step([2, 3], overwritten=[0, 1])
    setup.step([], overwritten=[2, 3])
    assert setup.content(0) != were[0]
    stuck.over.set()
    setup.worker.close()
    assert setup.counts.blocks == {"saved": 4}
    assert [setup.stored(key) for key in KEYS[:4]] == were[:4]


def test_what_has_no_row_is_not_saved_and_counted(setup: Setup, stuck: Stuck) -> None:
    were = [setup.content(block) for block in range(BLOCKS)]
    setup.step(range(ROOM))
    assert stuck.began == 2, "all threads of the store"
    setup.step([6, 7, 8], overwritten=range(ROOM))
    setup.step([9], overwritten=[6, 7, 8])
    stuck.over.set()
    setup.worker.close()
    assert setup.counts.blocks == {"saved": ROOM, "save.full": 4}
    found = [setup.stored(key) for key in KEYS]
    assert found == [*were[:ROOM], *[None] * (BLOCKS - ROOM)]


def test_closing_leaves_a_stuck_write_behind_and_what_it_ends_with_is_right_or_absent(
    setup: Setup, stuck: Stuck, caplog: pytest.LogCaptureFixture
) -> None:
    were = [setup.content(block) for block in range(BLOCKS)]
    setup.step([0, 1, 2])
    assert stuck.began == 2
    begun = setup.clock.monotonic()
    setup.worker.close()
    longest = transfer_worker.STILL_SECONDS + transfer_worker.CLOSE_SECONDS
    assert transfer_worker.STILL_SECONDS <= setup.clock.monotonic() - begun <= longest + 0.1
    assert "the store does not answer: it is abandoned" in caplog.text
    for cache in setup.caches.values():
        cache.raw[:] = 0xDD
    stuck.over.set()
    setup.clock.run_until_idle()
    assert not [name for name in setup.clock.alive if name.startswith(("ucm-save", "ucm-close"))]
    found = [setup.stored(key) for key in KEYS[:3]]
    assert all(there in (None, right) for there, right in zip(found, were[:3], strict=True))
