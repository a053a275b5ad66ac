"""A chain is evicted from its end, and a used prefix stays, whoever uses it and whether or not it is loaded."""

from __future__ import annotations

import os
import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.simulated import begin_span
from tests.ucm.store.evicting import evict_unpinned
from ucm.store.base import BlockGeometry, BlockTransfer
from ucm.store.factory import open_store
from ucm.store.format import HeaderCodec
from ucm.store.posix.directory import Directory
from ucm.store.posix.layout import Layout
from ucm.store.posix.paths import touch
from ucm.store.posix.scan import scan
from ucm.store.tier import DEEPEST, used_until
from ucm.testing.blocks import Memory, content, in_order, key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.clock import SimulatedClock
    from ucm.store.base import BlockKey, KVStore
    from ucm.store.config import StoreConfig

NAMESPACE = "n"
SMALL = BlockGeometry((64,), b"small geometry16")
FILE = HeaderCodec(NAMESPACE, SMALL).file_nbytes
COMMON = 12
TOUCH = 60.0


def chain(prompt: int, length: int) -> list[BlockKey]:
    """Return the keys of a prompt: a common prefix and blocks of its own."""
    return [key(place if place < COMMON else 1000 * (prompt + 1) + place) for place in range(length)]


def save(store: KVStore, keys: Sequence[BlockKey], first: int = 0) -> None:
    """Save the blocks of a chain from one on, which may fail for lack of room."""
    fresh = keys[first:]
    memories = [Memory(block, SMALL, content(block, SMALL)) for block in fresh]
    blocks = [BlockTransfer(m.key, m.slices, depth=depth) for depth, m in enumerate(memories, first)]
    store.save(blocks).wait()


def load(store: KVStore, keys: Sequence[BlockKey], first: int = 0) -> None:
    """Load the blocks of a chain from one on."""
    memories = [Memory(block, SMALL) for block in keys[first:]]
    store.load([BlockTransfer(m.key, m.slices, depth=depth) for depth, m in enumerate(memories, first)]).wait()


def found(store: KVStore, keys: Sequence[BlockKey]) -> list[bool]:
    return store.lookup(keys)


def has_no_gap(store: KVStore, keys: Sequence[BlockKey]) -> bool:
    there = found(store, keys)
    return there == sorted(there, reverse=True)


@pytest.fixture
def patient(config: StoreConfig, clock: SimulatedClock) -> StoreConfig:
    clock.advance(3600.0)  # the kernel's times of files, which are real, are in the past, however slow the machine is
    return replace(config, touch_seconds=TOUCH)


def shrink(config: StoreConfig, blocks: int) -> None:
    """Evict blocks, the least recently used first."""
    root = config.directories[0]
    assert evict_unpinned(root, scan(root), blocks * FILE, lambda _: None)[0] == blocks


@pytest.mark.parametrize("seconds", [0.0, 15.0])
def test_a_new_chain_is_evicted_from_its_end(patient: StoreConfig, clock: SimulatedClock, seconds: float) -> None:
    keys = chain(0, 30)
    begin_span(clock, TOUCH)  # a request that runs on in the next span is renewed as a whole
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        for first in range(0, 30, 10):  # a prompt that is computed in several steps
            save(store, keys[: first + 10], first)
            clock.advance(seconds)
        clock.advance(2.0)  # the evictor's thread sets the times
    shrink(patient, 18)
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        assert found(store, keys) == [True] * 12 + [False] * 18


def test_a_prefix_that_another_cache_serves_stays(patient: StoreConfig, clock: SimulatedClock) -> None:
    """vLLM serves it to 60 requests, whose other blocks are all written later than it was."""
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        save(store, chain(0, COMMON))
        used: list[int] = []  # the span of each prompt's use
        for prompt in range(60):
            clock.advance(7.0)
            store.renew(in_order(chain(prompt, COMMON)))
            save(store, chain(prompt, COMMON + 4), COMMON)
            used.append(int(clock.time() // TOUCH))
    shrink(patient, 200)
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        assert found(store, chain(0, COMMON)) == [True] * COMMON
        left = [sum(found(store, chain(prompt, COMMON + 4))) - COMMON for prompt in range(60)]
        pairs = [(one, other) for one in range(60) for other in range(60) if used[one] < used[other]]
        assert all(left[one] <= left[other] for one, other in pairs), "the oldest go first"
        assert sum(left) == 40
        assert all(has_no_gap(store, chain(prompt, COMMON + 4)) for prompt in range(60))


@pytest.mark.parametrize("seed", range(6))
def test_no_chain_ever_has_a_gap(patient: StoreConfig, clock: SimulatedClock, seed: int) -> None:
    """Several engines save, load and use the same chains; the longest idle blocks are evicted now and then."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    prompts = [chain(prompt, COMMON + chance.randrange(1, 20)) for prompt in range(12)]
    with ExitStack() as opened:
        engines = [opened.enter_context(open_store(patient, NAMESPACE, SMALL, clock=clock)) for _ in range(3)]
        for _ in range(60):
            clock.advance(chance.choice((1.0, 10.0, 100.0)))
            store, keys = chance.choice(engines), chance.choice(prompts)
            keys = keys[: chance.randrange(1, len(keys) + 1)]
            span, there = clock.time() // TOUCH, store.lookup_on_prefix(keys)
            store.renew(in_order(keys))
            if chance.random() < 0.5:
                load(store, keys[:there], chance.randrange(there + 1))
            clock.advance(chance.choice((0.0, 0.0, TOUCH)))  # it is computed
            save(store, keys, there)
            if clock.time() // TOUCH != span:  # as the connector does
                store.renew(in_order(keys))
            clock.advance(2.0)  # the evictors' threads renew what was used
            if chance.random() < 0.3:
                clock.advance(TOUCH)  # what an engine renewed in a span is not evicted in it
                root = patient.directories[0]
                evict_unpinned(root, scan(root), chance.randrange(1, 12) * FILE, lambda _: None)
                assert all(has_no_gap(store, one) for one in prompts)


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the files whose times were set."""
    found: list[str] = []

    def counted(path: str, change: Callable[[int], int]) -> int:
        found.append(path)
        return touch(path, change)

    monkeypatch.setattr("ucm.store.posix.space.touch", counted)
    return found


def test_a_chain_is_renewed_once_per_span(patient: StoreConfig, clock: SimulatedClock, touched: list[str]) -> None:
    begin_span(clock, TOUCH)
    keys = chain(0, COMMON)
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        save(store, keys)
        clock.advance(TOUCH)
        touched.clear()
        counts = []
        for seconds in (3.0, 3.0, TOUCH, 3.0, 3.0):
            store.renew(in_order(keys))
            clock.advance(seconds)
            counts.append(len(touched))
    assert counts == [COMMON, COMMON, COMMON, 2 * COMMON, 2 * COMMON]


def test_a_chain_that_is_loaded_and_used_is_renewed_once(
    patient: StoreConfig, clock: SimulatedClock, touched: list[str]
) -> None:
    begin_span(clock, TOUCH)
    keys = chain(0, COMMON)
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        save(store, keys)
        clock.advance(TOUCH)
        touched.clear()
        load(store, keys)
        load(store, keys)  # before the evictor's thread has set the times
        store.renew(in_order(keys))
        clock.advance(3.0)
        load(store, keys)
        clock.advance(3.0)
    assert len(touched) == COMMON


@pytest.mark.parametrize("touch_seconds", [0.0, TOUCH])
def test_a_long_prompt_is_evicted_from_its_end_whenever_it_is_written(
    patient: StoreConfig, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch, touch_seconds: float
) -> None:
    keys = chain(0, 3)
    layout = Layout(patient.directories[0], NAMESPACE)
    publish = Directory.publish

    def publish_now(self: Directory, private: str, path: str) -> None:
        """Give it the time of the clock, which the kernel does not go by."""
        now = int(clock.time() * 1e9)
        os.utime(private, ns=(now, now))
        publish(self, private, path)

    monkeypatch.setattr(Directory, "publish", publish_now)
    begin_span(clock, TOUCH)
    clock.advance(TOUCH - 0.1)  # the span is about to end
    with open_store(replace(patient, touch_seconds=touch_seconds), NAMESPACE, SMALL, clock=clock) as store:
        for place, one in enumerate(keys, 1):
            memory = Memory(one, SMALL, content(one, SMALL))
            assert not store.save([BlockTransfer(one, memory.slices, depth=place * 1_000_000)]).wait().failed
            clock.advance(0.01)
        clock.advance(6.0)  # the evictor's thread sets the times
    times = [Path(layout.block(one)).stat().st_mtime_ns for one in keys]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("touch_seconds", [0.0, 0.5, 60.0, 86_400.0])
def test_times_of_last_use_order_a_chain(touch_seconds: float) -> None:
    now = 1_790_000_000.25
    times = [used_until(now, touch_seconds, depth) for depth in range(1000)]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 1000
    assert used_until(now, touch_seconds, DEEPEST) >= int(now * 1e6) * 1000, "the time of a new file is the later one"
    if touch_seconds:
        assert used_until(now + touch_seconds, touch_seconds, 999) >= times[0] or touch_seconds < 1
    assert times[0] < 2**63
