"""A store compared with a dictionary: a load returns what was committed, or nothing, in any order of operations."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.ucm.store.evicting import evict_unpinned
from ucm.store.base import BlockGeometry, BlockKey, BlockMissingError
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.posix.layout import Layout
from ucm.store.posix.scan import scan
from ucm.store.posix.tier import PosixTier
from ucm.store.tiered import TieredStore
from ucm.testing.blocks import Memory, content, fetch, key
from ucm.testing.clock import SimulatedClock

GEOMETRY = BlockGeometry((5, 4096, 1, 700), b"stateful 16bytes")
SLICES = len(GEOMETRY.slice_sizes)
BLOCKS = 4
#: A block is drawn by its index in `Storing.keys`.
blocks = st.integers(0, BLOCKS - 1)


class Storing(RuleBasedStateMachine):
    """Two instances of one store; ``visible`` and ``begun`` are its expected contents."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.visible: dict[BlockKey, bytes] = {}
        #: By instance and key: the layer slices that arrived, or None if the block was there when the first one did.
        self.begun: dict[tuple[int, BlockKey], dict[int, bytes] | None] = {}

    @initialize(direct=st.booleans(), several=st.booleans(), order=st.none() | st.integers(0, 99))
    def open(self, direct: bool, several: bool, order: int | None) -> None:
        self.clock = SimulatedClock(order)
        roots = [Path(self.directory.name, name) for name in ("a", "b")[: 1 + several]]
        for root in roots:
            root.mkdir()
        self.config = StoreConfig(directories=tuple(map(str, roots)), direct_io=direct, lookup_cache_keys=0)
        self.stores = [open_store(self.config, "n", GEOMETRY, clock=self.clock) for _ in range(2)]
        # A block's directory depends on the directories' random paths. Two blocks of each keep a replay the same.
        lane = self.posix_tier(0).lane
        places = [place for place in range(len(roots)) for _ in range(BLOCKS // len(roots))]
        names = map(key, itertools.count())
        self.keys = [next(name for name in names if lane(name) == place) for place in places]

    @rule(which=st.integers(0, 1), number=blocks, first=st.integers(0, SLICES - 1), data=st.data())
    def save(self, which: int, number: int, first: int, data: st.DataObject) -> None:
        block = self.keys[number]
        count = data.draw(st.integers(1, SLICES - first))
        memory = Memory(block, GEOMETRY, content(block, GEOMETRY))
        result = self.stores[which].wait(self.stores[which].save([memory.transfer(first, count)]))
        assert set(result.done) == {block}
        arrived = self.begun.setdefault((which, block), None if block in self.visible else {})
        if arrived is not None:
            arrived.update({index: bytes(memory.slices[index]) for index in range(first, first + count)})

    @rule(which=st.integers(0, 1), number=blocks)
    def save_whole(self, which: int, number: int) -> None:
        block = self.keys[number]
        memory = Memory(block, GEOMETRY, content(block, GEOMETRY))
        self.stores[which].wait(self.stores[which].save([memory.transfer()]))
        if self.begun.setdefault((which, block), None if block in self.visible else {}) is not None:
            self.begun[which, block] = {index: bytes(layer_slice) for index, layer_slice in enumerate(memory.slices)}

    @rule(which=st.integers(0, 1), numbers=st.lists(blocks, max_size=4, unique=True))
    def commit(self, which: int, numbers: list[int]) -> None:
        some = [self.keys[number] for number in numbers]
        result = self.stores[which].wait(self.stores[which].commit(some))
        for block in some:
            arrived = self.begun.pop((which, block), {})
            if arrived is None:
                # It existed; the next load shows whether it still does.
                assert block in result.done
            elif len(arrived) == SLICES:
                assert block in result.done
                self.visible[block] = b"".join(arrived[index] for index in range(SLICES))
            else:
                assert (block in result.done) == (not arrived and block in self.visible)

    @rule(which=st.integers(0, 1), numbers=st.lists(blocks, max_size=4))
    def discard(self, which: int, numbers: list[int]) -> None:
        some = [self.keys[number] for number in numbers]
        self.stores[which].discard(some)
        for block in some:
            self.begun.pop((which, block), None)

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
        result = self.stores[which].wait(self.stores[which].load([memory.transfer(first, count)]))
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
            self.lose(oldest)

    @precondition(lambda self: self.visible)
    @rule(data=st.data(), which=st.integers(0, 1))
    def damage(self, data: st.DataObject, which: int) -> None:
        block = data.draw(st.sampled_from(list(self.visible)))
        path = self.path(block)
        whole = bytearray(path.read_bytes())
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1
        path.write_bytes(whole)
        assert fetch(self.stores[which], [block], GEOMETRY)[0] == {}
        self.lose(block)

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = open_store(self.config, "n", GEOMETRY, clock=self.clock)
        for begun in [begun for begun in self.begun if begun[0] == which]:
            del self.begun[begun]

    @invariant()
    def temporaries_are_those_of_blocks_begun(self) -> None:
        begun = len([arrived for arrived in self.begun.values() if arrived is not None])
        self.clock.run_until_idle()  # discarding is asynchronous
        assert len(list(Path(self.directory.name).glob("*/n/tmp/*"))) <= begun

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

    def lose(self, block: BlockKey) -> None:
        """Note that a block is gone; who had begun to save it beside the one that is gone does so no more."""
        del self.visible[block]
        for which in [which for (which, begun), arrived in self.begun.items() if begun == block and arrived is None]:
            self.stores[which].discard([block])
            del self.begun[which, block]

    def path(self, block: BlockKey) -> Path:
        return Path(Layout(self.config.directories[self.posix_tier(0).lane(block)], "n").block(block))


Storing.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestStoring = Storing.TestCase
