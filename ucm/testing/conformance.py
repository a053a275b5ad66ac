"""The conformance suite of the store's back ends; see ``ucm.testing`` for how to use it.

All instances that a test opens with its ``config``, in any process, must share one medium that is empty when the test
begins and holds at least 8 MiB. The tests use only the public interface.
"""

from __future__ import annotations

import itertools
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ucm.clock import SYSTEM
from ucm.store.base import BlockGeometry, BlockKey, BlockMissingError, BlockTransfer
from ucm.store.factory import open_store
from ucm.testing.blocks import EVEN, MANY, ODD, Memory, content, fetch, filled, in_order, key, pick, save

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.store.base import KVStore
    from ucm.store.config import StoreConfig

NAMESPACE = "model/rank-0"
KEYS = [key(number) for number in range(8)]
#: Processes forked from one that has imported this module and has opened no store.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


def save_and_fetch(
    config: StoreConfig, namespace: str, geometry: BlockGeometry, keys: list[BlockKey], seed: int
) -> int:
    """Save and load blocks in random order; check their contents, and return how many were loaded in the end."""
    chance = np.random.default_rng(seed)
    with open_store(config, namespace, geometry) as store:
        for block in pick(chance, keys):
            assert save(store, [block], geometry).failed == {}
            for found, data in fetch(store, pick(chance, keys, 4), geometry)[0].items():
                assert data == content(found, geometry)
        return len(fetch(store, keys, geometry)[0])


class StoreConformance:
    @pytest.fixture
    def config(self) -> StoreConfig:
        raise NotImplementedError

    @pytest.fixture(params=[ODD, EVEN, MANY], ids=["odd", "even", "many"])
    def geometry(self, request: pytest.FixtureRequest) -> BlockGeometry:
        found: BlockGeometry = request.param
        return found

    @pytest.fixture
    def store(self, config: StoreConfig, geometry: BlockGeometry) -> Iterator[KVStore]:
        with open_store(config, NAMESPACE, geometry) as opened:
            yield opened

    # One block from end to end.

    def test_what_was_saved_is_loaded(self, store: KVStore, geometry: BlockGeometry) -> None:
        saved = save(store, KEYS, geometry)
        assert set(saved.done) == set(KEYS)
        assert saved.failed == {}
        loaded, failed = fetch(store, KEYS, geometry)
        assert failed == {}
        assert loaded == {block: content(block, geometry) for block in KEYS}

    def test_another_instance_finds_it(self, store: KVStore, config: StoreConfig, geometry: BlockGeometry) -> None:
        with open_store(config, NAMESPACE, geometry) as other:
            save(store, KEYS, geometry)
            assert other.lookup(KEYS) == [True] * len(KEYS)
            assert fetch(other, KEYS, geometry)[0] == {block: content(block, geometry) for block in KEYS}

    def test_it_outlives_the_instance(self, config: StoreConfig, geometry: BlockGeometry) -> None:
        with open_store(config, NAMESPACE, geometry) as first:
            save(first, KEYS, geometry)
        with open_store(config, NAMESPACE, geometry) as second:
            assert fetch(second, KEYS, geometry)[0] == {block: content(block, geometry) for block in KEYS}

    @pytest.mark.parametrize("nbytes", [16, 17, 32, 64])
    def test_keys_have_16_to_64_bytes(self, store: KVStore, geometry: BlockGeometry, nbytes: int) -> None:
        block = key(1, nbytes)
        assert save(store, [block], geometry).failed == {}
        assert fetch(store, [block], geometry)[0] == {block: content(block, geometry)}

    def test_the_result_counts_bytes(self, store: KVStore, geometry: BlockGeometry) -> None:
        memories = filled(KEYS, geometry)
        saved = store.save([memory.transfer() for memory in memories]).wait()
        loaded = store.load([memory.transfer() for memory in memories]).wait()
        assert saved.nbytes == loaded.nbytes == geometry.nbytes * len(KEYS)
        assert saved.seconds > 0
        assert loaded.seconds > 0

    # Layer slices.

    def test_some_slices_are_loaded_alone(self, store: KVStore, geometry: BlockGeometry) -> None:
        save(store, KEYS[:1], geometry)
        whole = Memory(KEYS[0], geometry, content(KEYS[0], geometry))
        count = len(geometry.slice_sizes)
        for first, wanted in [(0, 1), (0, count - 1), (1, 2), (count // 2, count - count // 2), (count - 1, 1)]:
            memory = Memory(KEYS[0], geometry)
            result = store.load([memory.transfer(first, wanted)]).wait()
            assert result.failed == {}
            for index, layer_slice in enumerate(memory.slices):
                expected = whole.slices[index] if first <= index < first + wanted else bytes(len(layer_slice))
                assert layer_slice == expected

    def test_one_buffer_holds_layer_slices_that_lie_one_after_the_other(
        self, store: KVStore, geometry: BlockGeometry
    ) -> None:
        whole, sizes = content(KEYS[0], geometry), geometry.slice_sizes
        assert store.save([BlockTransfer(KEYS[0], [memoryview(whole)])]).wait().failed == {}
        assert fetch(store, KEYS[:1], geometry)[0] == {KEYS[0]: whole}
        for first, end in [(0, len(sizes)), (0, 2), (1, 3), (1, len(sizes)), (len(sizes) - 1, len(sizes))]:
            memory = memoryview(bytearray(sum(sizes[first:end])))
            result = store.load([BlockTransfer(KEYS[0], [memory], first)]).wait()
            assert (result.failed, result.nbytes) == ({}, memory.nbytes)
            assert memory == whole[sum(sizes[:first]) :][: memory.nbytes]

    def test_buffers_end_anywhere(self, store: KVStore, geometry: BlockGeometry) -> None:
        def cut(memory: memoryview, *ends: int) -> list[memoryview]:
            places = [0, *(end % memory.nbytes for end in ends), memory.nbytes]
            return [memory[begin:end] for begin, end in itertools.pairwise(sorted(places))]

        whole, sizes = content(KEYS[0], geometry), geometry.slice_sizes
        assert store.save([BlockTransfer(KEYS[0], cut(memoryview(whole), 1, 777, 8192))]).wait().failed == {}
        for first, end in [(0, len(sizes)), (1, len(sizes)), (1, 3)]:
            memory = memoryview(bytearray(sum(sizes[first:end])))
            result = store.load([BlockTransfer(KEYS[0], cut(memory, 3, 1000, memory.nbytes - 1), first)]).wait()
            assert (result.failed, result.nbytes) == ({}, memory.nbytes)
            assert memory == whole[sum(sizes[:first]) :][: memory.nbytes]

    def test_two_parts_of_a_block_in_one_load(self, store: KVStore, geometry: BlockGeometry) -> None:
        save(store, KEYS[:1], geometry)
        memory = Memory(KEYS[0], geometry)
        result = store.load([memory.transfer(1), memory.transfer(0, 1)]).wait()
        assert result.failed == {}
        assert bytes(memory.data) == content(KEYS[0], geometry)
        assert result.nbytes == geometry.nbytes

    # A block is whole or absent.

    def test_a_part_of_a_block_is_not_saved(self, store: KVStore, geometry: BlockGeometry) -> None:
        memories = filled(KEYS[:2], geometry)
        count = len(geometry.slice_sizes)
        for first, some in [(0, count - 1), (1, count - 1), (0, 1)]:
            with pytest.raises(ValueError, match="without all of its layer slices"):
                store.save([memories[0].transfer(), memories[1].transfer(first, some)])
        assert store.lookup(KEYS[:2]) == [False, False]
        assert save(store, KEYS[:2], geometry).failed == {}
        assert fetch(store, KEYS[:2], geometry)[0] == {block: content(block, geometry) for block in KEYS[:2]}

    def test_a_block_twice_in_one_save(self, store: KVStore, geometry: BlockGeometry) -> None:
        memories = filled(KEYS[:1], geometry)
        result = store.save([memories[0].transfer(), memories[0].transfer()]).wait()
        assert set(result.done) == set(KEYS[:1])
        assert result.failed == {}
        assert fetch(store, KEYS[:1], geometry)[0] == {KEYS[0]: content(KEYS[0], geometry)}

    def test_a_block_that_is_there_is_not_written_again(self, store: KVStore, geometry: BlockGeometry) -> None:
        save(store, KEYS, geometry)
        again = store.save([memory.transfer() for memory in filled(KEYS, geometry, version=1)]).wait()
        assert set(again.done) == set(KEYS)
        assert again.nbytes == 0
        assert fetch(store, KEYS, geometry)[0] == {block: content(block, geometry) for block in KEYS}

    def test_close_finishes_saves(self, config: StoreConfig, geometry: BlockGeometry) -> None:
        store = open_store(config, NAMESPACE, geometry)
        memories = filled(KEYS, geometry)
        saved = store.save([memory.transfer() for memory in memories])
        store.close()
        store.close()
        assert saved.check()
        assert set(saved.wait().done) == set(KEYS)
        with open_store(config, NAMESPACE, geometry) as other:
            assert other.lookup(KEYS) == [True] * len(KEYS)

    # Lookups.

    def test_lookups(self, store: KVStore, geometry: BlockGeometry) -> None:
        there = [True, True, False, True, False, False, True, True]
        save(store, [block for block, saved in zip(KEYS, there, strict=True) if saved], geometry)
        assert store.lookup(KEYS) == there
        assert store.lookup([]) == []
        assert store.lookup_on_prefix([]) == 0
        for start in range(len(KEYS)):
            rest = there[start:]
            assert store.lookup_on_prefix(KEYS[start:]) == (rest.index(False) if False in rest else len(rest))

    def test_leased_blocks_are_blocks_like_others(self, store: KVStore, geometry: BlockGeometry) -> None:
        """Whether they are evicted later is the medium's business; nothing else changes, also for missing ones."""
        save(store, KEYS[:4], geometry)
        until = SYSTEM.time() + 600.0
        store.retain(in_order(KEYS), until)
        store.retain(in_order(KEYS[:2]), until + 60.0, pinned=True)
        store.retain(in_order([]), until)
        store.renew(in_order(KEYS))
        memory = filled(KEYS[4:5], geometry)[0]
        blocks = [BlockTransfer(memory.key, memory.slices, depth=4, retain_until=until)]
        assert store.save(blocks).wait().failed == {}
        assert store.lookup_on_prefix(KEYS) == 5
        assert fetch(store, KEYS[:5], geometry)[0] == {block: content(block, geometry) for block in KEYS[:5]}

    def test_an_instance_without_a_geometry_looks_up(
        self, store: KVStore, config: StoreConfig, geometry: BlockGeometry
    ) -> None:
        save(store, KEYS[:3], geometry)
        memory = filled(KEYS[:1], geometry)[0]
        with open_store(config, NAMESPACE, None) as finder:
            assert finder.lookup(KEYS) == [True] * 3 + [False] * 5
            assert finder.lookup_on_prefix(KEYS) == 3
            with pytest.raises(ValueError, match="geometry"):
                finder.load([memory.transfer()])
            with pytest.raises(ValueError, match="geometry"):
                finder.save([memory.transfer()])

    def test_namespaces_share_nothing(self, store: KVStore, config: StoreConfig, geometry: BlockGeometry) -> None:
        save(store, KEYS, geometry)
        for other in ("model", "model/rank-1", "model/rank-0/x"):
            with open_store(config, other, geometry) as stranger:
                assert stranger.lookup(KEYS) == [False] * len(KEYS)
                assert save(stranger, KEYS[:1], geometry, version=1).failed == {}
        assert fetch(store, KEYS, geometry)[0] == {block: content(block, geometry) for block in KEYS}

    def test_another_geometry_is_never_loaded(
        self, store: KVStore, config: StoreConfig, geometry: BlockGeometry
    ) -> None:
        save(store, KEYS, geometry)
        strangers = [
            BlockGeometry(geometry.slice_sizes, b"another meaning!"),
            BlockGeometry((*geometry.slice_sizes[:-1], geometry.slice_sizes[-1] + 1), geometry.fingerprint),
            BlockGeometry((geometry.nbytes,), geometry.fingerprint),
            BlockGeometry((4096,) * 4_000, geometry.fingerprint),
        ]
        for block, stranger in zip(KEYS, strangers, strict=False):
            with open_store(config, NAMESPACE, stranger) as other:
                loaded, failed = fetch(other, [block], stranger)
                assert loaded == {}
                assert set(failed) == {block}

    def test_what_is_missing_is_said(self, store: KVStore, geometry: BlockGeometry) -> None:
        save(store, KEYS[1:], geometry)
        loaded, failed = fetch(store, KEYS, geometry)
        assert set(loaded) == set(KEYS[1:])
        assert isinstance(failed[KEYS[0]], BlockMissingError)

    # Valid and invalid use.

    def test_misuse_is_refused(self, store: KVStore, geometry: BlockGeometry) -> None:
        sizes = geometry.slice_sizes
        good = [memoryview(bytearray(size)) for size in sizes]
        short = [*good[:-1], memoryview(bytearray(sizes[-1] + 1))]
        scattered = memoryview(bytearray(2 * sizes[0] + 2))[::2][: sizes[0]]
        bad = [
            BlockTransfer(KEYS[0], short),
            BlockTransfer(KEYS[0], good, 1),
            BlockTransfer(KEYS[0], good, -1),
            BlockTransfer(KEYS[0], []),
            BlockTransfer(KEYS[0], [], 1),
            BlockTransfer(KEYS[0], [memoryview(b"")], 1),
            BlockTransfer(KEYS[0], [*good, good[0]]),
            BlockTransfer(KEYS[0], [memoryview(bytearray(geometry.nbytes - 1))]),
            BlockTransfer(KEYS[0], [*good, memoryview(b"")]),
            BlockTransfer(KEYS[0], [*good, np.empty((0, 4), np.float16).data]),
            BlockTransfer(KEYS[0], [memoryview(bytearray(geometry.nbytes))], 1),
            BlockTransfer(BlockKey(b"short"), good),
            BlockTransfer(BlockKey(bytes(65)), good),
        ]
        if sizes[0] > 1:
            bad.append(BlockTransfer(KEYS[0], [scattered, *good[1:]]))
        for transfer in bad:
            with pytest.raises(ValueError, match=r".+"):
                store.save([transfer])
            with pytest.raises(ValueError, match=r".+"):
                store.load([transfer])
        with pytest.raises(ValueError, match="read-only"):
            store.load([BlockTransfer(KEYS[0], [memoryview(bytes(size)) for size in sizes])])
        assert save(store, KEYS[:1], geometry).failed == {}

    def test_read_only_memory_is_saved(self, store: KVStore, geometry: BlockGeometry) -> None:
        whole = content(KEYS[0], geometry)
        memory = Memory(KEYS[0], geometry, whole)
        frozen = [memoryview(bytes(layer_slice)) for layer_slice in memory.slices]
        store.save([BlockTransfer(KEYS[0], frozen)]).wait()
        assert fetch(store, KEYS[:1], geometry)[0] == {KEYS[0]: whole}

    def test_memory_may_be_of_any_type_and_shape(self, config: StoreConfig) -> None:
        arrays = [np.arange(size // 4, dtype=np.float32).reshape(2, -1) for size in EVEN.slice_sizes]
        into = [np.zeros_like(array) for array in arrays]
        with open_store(config, NAMESPACE, EVEN) as store:
            store.save([BlockTransfer(KEYS[0], [array.data for array in arrays])]).wait()
            for first in (0, 3):
                part = [array.data for array in into[first:]]
                assert store.load([BlockTransfer(KEYS[0], part, first)]).wait().failed == {}
            assert all(np.array_equal(*pair) for pair in zip(arrays, into, strict=True))

    def test_memory_is_the_callers_again_after_wait(self, store: KVStore, geometry: BlockGeometry) -> None:
        memory = Memory(KEYS[0], geometry)
        for block in KEYS:
            memory.data[:] = content(block, geometry)
            store.save([BlockTransfer(block, memory.slices)]).wait()
        assert fetch(store, KEYS, geometry)[0] == {block: content(block, geometry) for block in KEYS}

    def test_tasks_end_once(self, store: KVStore, geometry: BlockGeometry) -> None:
        for task in (store.save([]), store.load([])):
            assert task.check()
            assert task.wait().nbytes == 0
        task = store.save([memory.transfer() for memory in filled(KEYS, geometry)])
        result = task.wait()
        assert task.check()
        assert task.wait() == result

    def test_a_closed_store_takes_no_calls(self, config: StoreConfig, geometry: BlockGeometry) -> None:
        store = open_store(config, NAMESPACE, geometry)
        store.close()
        transfer = filled(KEYS[:1], geometry)[0].transfer()
        for call in (
            lambda: store.lookup(KEYS),
            lambda: store.lookup_on_prefix(KEYS),
            lambda: store.load([transfer]),
            lambda: store.save([transfer]),
        ):
            with pytest.raises(ValueError, match="closed"):
                call()

    def test_it_counts(self, store: KVStore, geometry: BlockGeometry) -> None:
        save(store, KEYS[:3], geometry)
        store.lookup(KEYS)
        fetch(store, KEYS[:4], geometry)
        assert store.flush(60)
        stats = store.stats()
        assert sum(tier.loaded_blocks for tier in stats.values()) == 3
        assert sum(tier.loaded_bytes for tier in stats.values()) == 3 * geometry.nbytes
        for tier in stats.values():
            assert tier.saved_blocks == 3
            assert tier.saved_bytes == 3 * geometry.nbytes
        first, last = next(iter(stats.values())), list(stats.values())[-1]
        assert (first.lookups, first.hits) == (8, 3)
        assert last.failures == {"load.missing": 1}
        first.hits += 1
        assert next(iter(store.stats().values())).hits == 3

    # Concurrency.

    def test_threads(self, store: KVStore, geometry: BlockGeometry) -> None:
        keys = [key(number) for number in range(24)]

        def work(seed: int) -> None:
            chance = np.random.default_rng(seed)
            for _ in range(6):
                some = pick(chance, keys, 6)
                for block, data in fetch(store, some, geometry)[0].items():
                    assert data == content(block, geometry)
                parts = filled(some[:2], geometry)
                store.save([memory.transfer() for memory in parts]).wait()
                found = store.lookup(some)
                assert len(found) == len(some)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert save(store, keys, geometry).failed == {}
        assert fetch(store, keys, geometry)[0] == {block: content(block, geometry) for block in keys}

    def test_processes(self, config: StoreConfig) -> None:
        keys = [key(number) for number in range(16)]
        with PROCESSES.Pool(3) as pool:
            outcomes = pool.starmap(save_and_fetch, [(config, NAMESPACE, EVEN, keys, seed) for seed in range(3)])
        assert outcomes == [len(keys)] * 3
        with open_store(config, NAMESPACE, EVEN) as store:
            assert fetch(store, keys, EVEN)[0] == {block: content(block, EVEN) for block in keys}
