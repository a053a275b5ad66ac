"""The saving and loading half of the conformance suite; see ``ucm.testing.conformance``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from ucm.store.base import BlockMissingError, IncompleteBlockError
from ucm.store.factory import open_store
from ucm.testing.blocks import EVEN, MANY, ODD, Memory, content, fetch, filled, key, pick, save

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
        saved = store.wait(store.save([memory.transfer() for memory in memories]))
        store.wait(store.commit(KEYS))
        loaded = store.wait(store.load([memory.transfer() for memory in memories]))
        assert saved.nbytes == loaded.nbytes == geometry.nbytes * len(KEYS)
        assert saved.seconds > 0
        assert loaded.seconds > 0

    # Layer slices.

    def test_slices_arrive_in_any_order(self, store: KVStore, geometry: BlockGeometry) -> None:
        memories = filled(KEYS, geometry)
        count = len(geometry.slice_sizes)
        step = max(1, count // 5)
        parts = [memory.transfer(first, step) for memory in memories for first in range(0, count, step)]
        tasks = [store.save([part]) for part in pick(np.random.default_rng(1), parts)]
        committed = store.commit(KEYS)
        assert all(not store.wait(task).failed for task in tasks)
        assert store.wait(committed).failed == {}
        assert fetch(store, KEYS, geometry)[0] == {block: content(block, geometry) for block in KEYS}

    def test_a_slice_saved_again_counts_as_it_was_last(self, store: KVStore, geometry: BlockGeometry) -> None:
        old, new = filled(KEYS[:1], geometry, version=1)[0], filled(KEYS[:1], geometry)[0]
        for memory in (old, new):
            store.wait(store.save([memory.transfer(0, 1)]))
            store.wait(store.save([memory.transfer(1)]))
        store.wait(store.commit(KEYS[:1]))
        assert fetch(store, KEYS[:1], geometry)[0] == {KEYS[0]: content(KEYS[0], geometry)}

    def test_some_slices_are_loaded_alone(self, store: KVStore, geometry: BlockGeometry) -> None:
        save(store, KEYS[:1], geometry)
        whole = Memory(KEYS[0], geometry, content(KEYS[0], geometry))
        count = len(geometry.slice_sizes)
        for first, wanted in [(0, 1), (0, count - 1), (1, 2), (count // 2, count - count // 2), (count - 1, 1)]:
            memory = Memory(KEYS[0], geometry)
            result = store.wait(store.load([memory.transfer(first, wanted)]))
            assert result.failed == {}
            for index, layer_slice in enumerate(memory.slices):
                expected = whole.slices[index] if first <= index < first + wanted else bytes(len(layer_slice))
                assert layer_slice == expected

    def test_two_parts_of_a_block_in_one_load(self, store: KVStore, geometry: BlockGeometry) -> None:
        save(store, KEYS[:1], geometry)
        memory = Memory(KEYS[0], geometry)
        result = store.wait(store.load([memory.transfer(1), memory.transfer(0, 1)]))
        assert result.failed == {}
        assert bytes(memory.data) == content(KEYS[0], geometry)
        assert result.nbytes == geometry.nbytes

    # A block is whole or absent.

    def test_nothing_is_visible_before_the_commit(
        self, store: KVStore, config: StoreConfig, geometry: BlockGeometry
    ) -> None:
        assert store.wait(store.save([memory.transfer() for memory in filled(KEYS, geometry)])).failed == {}
        with open_store(config, NAMESPACE, geometry) as other:
            for instance in (store, other):
                assert instance.lookup(KEYS) == [False] * len(KEYS)
                assert instance.lookup_on_prefix(KEYS) == 0
                loaded, failed = fetch(instance, KEYS, geometry)
                assert loaded == {}
                assert {type(error) for error in failed.values()} == {BlockMissingError}

    def test_an_incomplete_block_is_not_kept(self, store: KVStore, geometry: BlockGeometry) -> None:
        memory = filled(KEYS[:1], geometry)[0]
        store.wait(store.save([memory.transfer(0, len(geometry.slice_sizes) - 1)]))
        failed = store.wait(store.commit(KEYS[:1])).failed
        assert isinstance(failed[KEYS[0]], IncompleteBlockError)
        assert store.lookup(KEYS[:1]) == [False]
        # Its remains must not complete a later block.
        store.wait(store.save([memory.transfer(len(geometry.slice_sizes) - 1)]))
        assert isinstance(store.wait(store.commit(KEYS[:1])).failed[KEYS[0]], IncompleteBlockError)
        assert save(store, KEYS[:1], geometry).failed == {}
        assert fetch(store, KEYS[:1], geometry)[0] == {KEYS[0]: content(KEYS[0], geometry)}

    def test_one_failure_leaves_the_others(self, store: KVStore, geometry: BlockGeometry) -> None:
        memories = filled(KEYS, geometry)
        transfers = [memories[0].transfer(0, 1), *[memory.transfer() for memory in memories[1:]]]
        store.wait(store.save(transfers))
        result = store.wait(store.commit(KEYS))
        assert set(result.failed) == {KEYS[0]}
        assert set(result.done) == set(KEYS[1:])

    def test_a_block_never_saved_cannot_be_committed(self, store: KVStore, geometry: BlockGeometry) -> None:
        save(store, KEYS[:1], geometry)
        result = store.wait(store.commit([*KEYS[:2], *KEYS[:2]]))
        assert isinstance(result.failed[KEYS[1]], IncompleteBlockError)
        assert set(result.done) == set(KEYS[:1])

    def test_a_discarded_block_is_gone(self, store: KVStore, geometry: BlockGeometry) -> None:
        task = store.save([memory.transfer() for memory in filled(KEYS, geometry)])
        store.discard(KEYS)
        store.wait(task)
        assert len(store.wait(store.commit(KEYS)).failed) == len(KEYS)
        assert store.lookup(KEYS) == [False] * len(KEYS)
        assert save(store, KEYS, geometry).failed == {}
        store.discard(KEYS)
        assert store.lookup(KEYS) == [True] * len(KEYS)

    def test_a_block_that_is_there_is_not_written_again(self, store: KVStore, geometry: BlockGeometry) -> None:
        save(store, KEYS, geometry)
        again = store.wait(store.save([memory.transfer() for memory in filled(KEYS, geometry, version=1)]))
        assert set(again.done) == set(KEYS)
        assert again.nbytes == 0
        assert set(store.wait(store.commit(KEYS)).done) == set(KEYS)
        assert fetch(store, KEYS, geometry)[0] == {block: content(block, geometry) for block in KEYS}

    def test_close_finishes_what_was_committed_and_drops_the_rest(
        self, config: StoreConfig, geometry: BlockGeometry
    ) -> None:
        store = open_store(config, NAMESPACE, geometry)
        memories = filled(KEYS, geometry)
        saved = store.save([memory.transfer() for memory in memories])
        committed = store.commit(KEYS[:4])
        store.close()
        store.close()
        assert store.check(saved)
        assert set(store.wait(committed).done) == set(KEYS[:4])
        with open_store(config, NAMESPACE, geometry) as other:
            assert other.lookup(KEYS) == [True] * 4 + [False] * 4
