"""A worker's store on real files: no block is freed before the store has it, and no damaged block is returned."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="torch is not installed; tests/e2e/test_inside.py runs these beside it")

import torch

from tests.ucm.sparse.esa.memory import shared_memory
from tests.ucm.store.evicting import evict_unpinned
from tests.ucm.store.frozen import FrozenDirectory
from ucm.clock import SYSTEM
from ucm.sparse.esa import offload_store
from ucm.sparse.esa.offload_store import OffloadStore, remove_leftovers
from ucm.store.base import BlockGeometry, StoreFullError, StoreUnavailableError
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.memory.segment import delete_blocks
from ucm.store.posix import layout as posix_layout
from ucm.store.posix.layout import Layout, owner_name
from ucm.store.posix.scan import scan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tests.clock import SimulatedClock
    from ucm.clock import Clock
    from ucm.store.base import KVStore

pytest_plugins = ("tests.simulated",)

SIZES = (48, 80)


def config(root: Path, **others: Any) -> StoreConfig:
    root.mkdir(mode=0o700, exist_ok=True)
    return StoreConfig(directories=(str(root),), **others)


def copies() -> Any:
    """Return the `BlockCopies` of a worker's layers."""

    def host_rows(layer: int, blocks: int) -> Tensor:
        return torch.zeros(blocks, SIZES[layer], dtype=torch.uint8)

    return SimpleNamespace(geometry=BlockGeometry(SIZES, bytes(16)), host_rows=host_rows)


def blocks(count: int, seed: int = 0) -> list[Tensor]:
    chance = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (count, size), generator=chance, dtype=torch.uint8) for size in SIZES]


def files(root: Path) -> list[Path]:
    return [path for path in root.glob("offloaded+*/??/*") if path.is_file()]


@pytest.fixture
def store(tmp_path: Path, clock: SimulatedClock) -> Iterator[OffloadStore]:
    found = OffloadStore(config(tmp_path / "root"), copies(), owner_name(), 0, clock=clock)
    yield found
    found._end()


def settle(store: OffloadStore) -> None:
    for saving in store._saving:
        saving.task.wait()
    store.settle()


def fetched(store: OffloadStore, layer: int, *wanted: tuple[int, int]) -> Tensor:
    fetch = store.fetch(layer, wanted)
    assert store.wait(fetch) == []
    assert fetch.rows is not None
    return fetch.rows


def test_blocks_come_from_host_memory_and_then_from_the_store(store: OffloadStore) -> None:
    first, second = blocks(5), blocks(2, seed=1)
    store.save(7, 3, first)
    store.save(8, 0, second)
    for origin in ("from_host", "loaded"):
        before = store.counts[origin]
        for layer in range(len(SIZES)):
            got = fetched(store, layer, (7, 6), (8, 1), (7, 3))
            assert torch.equal(got, torch.stack((first[layer][3], second[layer][1], first[layer][0])))
        assert store.counts[origin] - before == 3 * len(SIZES)
        settle(store)
    assert not store._kept[7].copies


def test_nothing_of_a_request_is_left_when_it_has_ended(store: OffloadStore, tmp_path: Path) -> None:
    store.save(1, 0, blocks(4))
    store.save(2, 0, blocks(3))
    settle(store)
    assert len(files(tmp_path / "root")) == 7
    store.drop(1)
    store.save(3, 0, blocks(2))
    store.drop(3)  # while it is being written
    store.save(4, 0, blocks(5))
    settle(store)
    store.save(4, 5, blocks(1))
    store.drop(4)  # while the last of it is being written
    settle(store)
    store._cleaner.close()
    assert len(files(tmp_path / "root")) == 3


def test_what_the_store_does_not_take_stays_in_host_memory_until_it_does(tmp_path: Path, clock: SimulatedClock) -> None:
    store = OffloadStore(config(tmp_path / "root", save_queue_bytes=200), copies(), owner_name(), 0, clock=clock)
    data = blocks(20)
    every = [(1, place) for place in range(20)]
    store.save(1, 0, data)
    settle(store)
    refused = store.counts["kept"]
    assert refused > 0
    assert not store._saving, "it is left alone for a while"
    assert torch.equal(fetched(store, 1, *every), data[1])
    assert (store.counts["from_host"], store.counts["loaded"]) == (refused, 20 - refused)
    settle(store)
    assert not store._saving
    for _ in range(60):
        clock.advance(offload_store.RETRY_SECONDS)
        settle(store)
    assert store.counts["kept"] == 0
    assert not store._kept[1].copies
    assert torch.equal(fetched(store, 1, *every), data[1])
    assert store.counts["loaded"] == 40 - refused
    store._end()


def test_a_live_block_is_not_evicted(store: OffloadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, evicted, data = str(tmp_path / "root"), list[str](), blocks(30)
    store.save(1, 0, data)
    settle(store)
    evict_unpinned(root, scan(root), 1 << 30, evicted.append)
    assert not evicted
    assert torch.equal(fetched(store, 0, *((1, place) for place in range(30))), data[0])
    monkeypatch.setattr(posix_layout, "is_stale", lambda name, age, stale_seconds: True)  # as if it had died
    evict_unpinned(root, scan(root), 1 << 30, evicted.append)
    assert len(evicted) == 30


def test_a_damaged_block_is_lost_and_later_ones_stay_in_host_memory(store: OffloadStore) -> None:
    data = blocks(4)
    store.save(1, 0, data)
    settle(store)
    hit = Path(store._layouts[0].block(store._kept[1].keys[2]))
    content = bytearray(hit.read_bytes())
    content[-1] ^= 1  # of the last layer
    hit.write_bytes(content)
    fetch = store.fetch(1, [(1, 1), (1, 2), (1, 3)])
    assert store.wait(fetch) == [1]
    assert fetch.rows is not None
    assert torch.equal(fetch.rows[[0, 2]], data[1][[1, 3]])
    assert (store.counts["retried"], store.counts["lost"]) == (1, 1)
    store.save(1, 4, blocks(1))
    assert not store._saving
    assert 4 in store._kept[1].copies


def test_blocks_are_loaded_from_memory(clock: SimulatedClock) -> None:
    """From the store, and from host memory while it has not settled; a block that is lost is told."""
    data = blocks(4)
    with shared_memory() as root:
        options = StoreConfig(pipeline="Dram", dram_directory=str(root), dram_capacity_bytes=1 << 24)
        store = OffloadStore(options, copies(), owner_name(), 0, clock=clock)
        store.save(1, 0, data)
        for _ in range(2):
            assert torch.equal(fetched(store, 1, *((1, place) for place in (3, 0, 2, 1))), data[1][[3, 0, 2, 1]])
            settle(store)
        assert store.counts["loaded"] == 4
        delete_blocks(store._layouts[0], [store._kept[1].keys[2]])
        fetch = store.fetch(1, [(1, 2), (1, 3)])
        assert store.wait(fetch) == [0]
        assert torch.equal(fetch.rows[1], data[1][3])
        store._end()


def test_a_directory_that_is_gone_costs_what_was_in_it(store: OffloadStore, tmp_path: Path) -> None:
    store.save(1, 0, blocks(2))
    settle(store)
    shutil.rmtree(tmp_path / "root")
    assert store.wait(store.fetch(0, [(1, 0), (1, 1)])) == [0, 1]
    later = blocks(3, seed=2)
    store.save(2, 0, later)
    settle(store)
    assert torch.equal(fetched(store, 0, (2, 0), (2, 2)), later[0][[0, 2]])


def test_the_namespace_goes_with_the_worker_or_with_the_next_one(tmp_path: Path, clock: SimulatedClock) -> None:
    root = tmp_path / "root"
    one = OffloadStore(config(root), copies(), owner_name(), 0, clock=clock)
    one.save(1, 0, blocks(1))
    settle(one)
    assert len(list(root.glob("offloaded+*"))) == 1
    one._end()
    assert not list(root.glob("offloaded+*"))
    host, _, _, *rest = owner_name().split("-")
    dead = f"{host}-999999999-1-{'-'.join(rest)}/0"
    for namespace in (f"offloaded/{dead}", f"offloaded/{owner_name()}/0", "others"):
        Layout(str(root), namespace).make()
    remove_leftovers([str(root)])
    there = sorted(path.name for path in root.iterdir() if path.is_dir())
    left = [name for name in there if "999999999" not in name]
    assert len(left) == len(there) == 2


def test_a_directory_that_does_not_answer_keeps_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    options, root, began = config(tmp_path / "root"), tmp_path / "root", clock.monotonic()
    frozen = FrozenDirectory(monkeypatch, str(root), clock=clock)
    store, data = OffloadStore(options, copies(), owner_name(), 0, clock=clock), blocks(6)
    clock.run_until_idle()
    assert frozen.held.is_set()
    store.save(1, 0, data)
    store.settle()
    assert store._saving, "what waits for the store waits in host memory"
    assert clock.monotonic() == began, "the worker has waited for nothing"
    clock.advance(options.stuck_seconds)
    waited = clock.monotonic()
    store.settle()
    assert not store._saving
    assert torch.equal(fetched(store, 1, *((1, place) for place in range(6))), data[1])
    store.drop(1)
    assert clock.monotonic() == waited
    assert (store.counts["kept"], store.counts["lost"]) == (6, 0)
    frozen.thawed.set()
    clock.run_until(lambda: bool(store._store.stats()))
    store.save(2, 0, data)
    settle(store)
    assert torch.equal(fetched(store, 0, (2, 5), (2, 0)), data[0][[5, 0]])
    assert store.counts["loaded"] == 2
    store._end()
    assert not list(root.glob("offloaded+*"))


def test_what_is_released_while_the_store_opens_goes_to_it_when_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    may_open = clock.event()

    def open_late(
        config: StoreConfig, namespace: str, geometry: BlockGeometry | None, *, clock: Clock = SYSTEM
    ) -> KVStore:
        may_open.wait()
        return open_store(config, namespace, geometry, clock=clock)

    monkeypatch.setattr(offload_store, "open_store", open_late)
    options = config(tmp_path / "root")
    store, data = OffloadStore(options, copies(), owner_name(), 0, clock=clock), blocks(6)
    store.save(1, 0, data)
    clock.advance(options.stuck_seconds)
    settle(store)
    assert store._retry_at < math.inf or store._saving, "they are tried again"
    may_open.set()
    for _ in range(3):
        clock.advance(offload_store.RETRY_SECONDS)
        settle(store)
    assert not store._kept[1].copies
    assert store.counts["kept"] == 0
    assert torch.equal(fetched(store, 1, *((1, place) for place in range(6))), data[1])
    assert store.counts["loaded"] == 6
    store._end()


def test_a_directory_that_does_not_answer_any_more_does_not_keep_the_end(
    store: OffloadStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SimulatedClock
) -> None:
    store.save(1, 0, blocks(2))
    settle(store)
    frozen = FrozenDirectory(monkeypatch, str(tmp_path / "root"), clock=clock)
    store.drop(1)
    clock.run_until_idle()
    assert frozen.held.is_set()
    store._end()
    assert not frozen.thawed.is_set()
    frozen.thawed.set()


def test_a_store_that_fails_otherwise_is_left_alone_for_a_while_too(
    store: OffloadStore, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, errors = list[int](), [StoreFullError("full"), StoreUnavailableError("off")]

    def save(blocks: Any) -> Any:
        saves.append(len(blocks))
        failed = dict.fromkeys([block.key for block in blocks], errors[min(len(saves), len(errors)) - 1])
        result = SimpleNamespace(done={}, failed=failed)
        return SimpleNamespace(check=lambda: True, wait=lambda: result)

    monkeypatch.setattr(store._store, "save", save)
    monkeypatch.setattr(store, "_at_once", 2)
    store.save(1, 0, blocks(5))
    store.settle()
    before = len(saves)
    clock.advance(offload_store.RETRY_SECONDS)
    for _ in range(20):
        store.settle()
    assert len(saves) == before + 1
