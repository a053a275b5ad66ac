"""A store compared with a dictionary: a load returns what was saved, or nothing, in any order of operations."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.simulated import repeatable
from tests.ucm.store.evicting import evict_unpinned
from ucm.store.base import BlockGeometry, BlockKey, BlockMissingError
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.posix.layout import Layout
from ucm.store.posix.scan import scan
from ucm.store.posix.tier import PosixTier
from ucm.store.tiered import TieredStore
from ucm.testing.blocks import Memory, content, fetch, key, save

GEOMETRY = BlockGeometry((5, 4096, 1, 700), b"stateful 16bytes")
SLICES = len(GEOMETRY.slice_sizes)
BLOCKS = 4
#: A block is drawn by its index in `Storing.keys`.
blocks = st.integers(0, BLOCKS - 1)


class Storing(RuleBasedStateMachine):
    """Two instances of one store; ``visible`` is its expected content."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.visible: dict[BlockKey, bytes] = {}

    @initialize(several=st.booleans(), order=st.none() | st.integers(0, 99))
    def open(self, several: bool, order: int | None) -> None:
        self.clock = repeatable(order)
        roots = [Path(self.directory.name, name) for name in ("a", "b")[: 1 + several]]
        for root in roots:
            root.mkdir()
        self.config = StoreConfig(directories=tuple(map(str, roots)))
        self.stores = [open_store(self.config, "n", GEOMETRY, clock=self.clock) for _ in range(2)]
        # A block's directory depends on the directories' random paths. Two blocks of each keep a replay the same.
        lane = self.posix_tier(0).lane
        places = [place for place in range(len(roots)) for _ in range(BLOCKS // len(roots))]
        names = map(key, itertools.count())
        self.keys = [next(name for name in names if lane(name) == place) for place in places]

    @rule(which=st.integers(0, 1), numbers=st.lists(blocks, max_size=4), version=st.integers(0, 3))
    def save(self, which: int, numbers: list[int], version: int) -> None:
        some = [self.keys[number] for number in numbers]
        result = save(self.stores[which], some, GEOMETRY, version)
        assert set(result.done) == set(some)
        for block in some:
            self.visible.setdefault(block, content(block, GEOMETRY, version))

    @rule(which=st.integers(0, 1), numbers=st.lists(blocks, max_size=4, unique=True))
    def load(self, which: int, numbers: list[int]) -> None:
        some = [self.keys[number] for number in numbers]
        loaded, failed = fetch(self.stores[which], some, GEOMETRY)
        assert loaded == {block: self.visible[block] for block in some if block in self.visible}
        assert {type(error) for error in failed.values()} <= {BlockMissingError}

    @rule(which=st.integers(0, 1), number=blocks, data=st.data())
    def load_some(self, which: int, number: int, data: st.DataObject) -> None:
        block = self.keys[number]
        first = data.draw(st.integers(0, SLICES - 1))
        count = data.draw(st.integers(1, SLICES - first))
        memory = Memory(block, GEOMETRY)
        result = self.stores[which].load([memory.transfer(first, count)]).wait()
        assert (block in result.done) == (block in self.visible)
        if block in self.visible:
            begin = sum(GEOMETRY.slice_sizes[:first])
            end = begin + sum(GEOMETRY.slice_sizes[first : first + count])
            expected = bytes(begin) + self.visible[block][begin:end] + bytes(GEOMETRY.nbytes - end)
            assert bytes(memory.data) == expected

    @rule(which=st.integers(0, 1), numbers=st.lists(blocks, max_size=6))
    def look_up(self, which: int, numbers: list[int]) -> None:
        some = [self.keys[number] for number in numbers]
        expected = [block in self.visible for block in some]
        assert self.stores[which].lookup(some) == expected
        assert self.stores[which].lookup_on_prefix(some) == [*expected, False].index(False)

    @precondition(lambda self: self.visible)
    @rule()
    def evict_the_oldest(self) -> None:
        """Evict the oldest block in each directory, by times of ours: when a store sets its own is not modelled."""
        for used, block in enumerate(self.visible, 1_000_000_000):
            os.utime(self.path(block), (used, used))
        for root in self.config.directories:
            oldest = next((block for block in self.visible if self.path(block).is_relative_to(root)), None)
            if oldest is None:
                continue  # evicting would delete a block in quarantine, which the model does not know
            gone: list[str] = []
            evict_unpinned(root, scan(root), 1, gone.append)
            assert gone == [str(self.path(oldest))]
            del self.visible[oldest]

    @precondition(lambda self: self.visible)
    @rule(data=st.data(), which=st.integers(0, 1))
    def damage(self, data: st.DataObject, which: int) -> None:
        block = data.draw(st.sampled_from(list(self.visible)))
        path = self.path(block)
        whole = bytearray(path.read_bytes())
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1
        path.write_bytes(whole)
        assert fetch(self.stores[which], [block], GEOMETRY)[0] == {}
        del self.visible[block]

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = open_store(self.config, "n", GEOMETRY, clock=self.clock)

    @invariant()
    def no_temporary_is_left(self) -> None:
        assert not list(Path(self.directory.name).glob("*/n/tmp/*"))

    def teardown(self) -> None:
        for store in getattr(self, "stores", []):
            store.close()
        if hasattr(self, "clock"):
            self.clock.close()
        self.directory.cleanup()

    def posix_tier(self, which: int) -> PosixTier:
        store = self.stores[which]
        assert isinstance(store, TieredStore)
        tier = store._tiers[0]
        assert isinstance(tier, PosixTier)
        return tier

    def path(self, block: BlockKey) -> Path:
        return Path(Layout(self.config.directories[self.posix_tier(0).lane(block)], "n").block(block))


Storing.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestStoring = Storing.TestCase
