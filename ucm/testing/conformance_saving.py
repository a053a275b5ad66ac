"""The saving and loading half of the conformance suite; see ``ucm.testing.conformance``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ucm.store.base import BlockTransfer
from ucm.store.factory import open_store
from ucm.testing.blocks import EVEN, MANY, ODD, Memory, content, fetch, filled, key, save

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ucm.store.base import BlockGeometry, KVStore
    from ucm.store.config import StoreConfig

NAMESPACE = "model/rank-0"
KEYS = [key(number) for number in range(8)]


class SavingConformance:
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
