"""Retained and pinned blocks in the Posix tier, with the store's own evictor; and in memory."""

from __future__ import annotations

import os
import random
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.simulated import begin_span
from tests.ucm.store.test_chains import FILE, NAMESPACE, SMALL, TOUCH, chain, found, has_no_gap, save
from ucm.store.base import BlockCorruptError, BlockTransfer
from ucm.store.config import LONGEST
from ucm.store.factory import open_store, open_tier
from ucm.store.posix import paths, space
from ucm.store.posix.directory import Directory
from ucm.store.posix.files import quarantine
from ucm.store.posix.layout import Layout
from ucm.store.posix.paths import touch, unlink_if
from ucm.store.posix.scan import evict, scan
from ucm.store.tier import LeaseRules, kept_until, pinned_until, used_until
from ucm.testing.blocks import Memory, content, in_order, key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.clock import SimulatedClock
    from ucm.store.base import BlockKey, KVStore
    from ucm.store.config import StoreConfig

UNIT = 4096  #: what a file takes in the tally


@pytest.fixture
def patient(config: StoreConfig, clock: SimulatedClock) -> StoreConfig:
    """Room for 100 blocks; see the fixture of the same name in `test_chains`."""
    clock.advance(3600.0)
    return replace(config, touch_seconds=TOUCH, posix_capacity_bytes=100 * UNIT)


def settle(clock: SimulatedClock) -> None:
    """Let the evictor's thread set the times of files."""
    clock.advance(6.0)


def flood(clock: SimulatedClock, store: KVStore, prompt: int, blocks: int) -> None:
    """Write blocks of other prompts, in chains of ten; the bound on the capacity holds at each moment."""
    for number in range(blocks // 10):
        keys = [key(100_000 * (prompt + 1) + 10 * number + place) for place in range(10)]
        for place in range(10):
            clock.run_until(partial(wrote, store, keys, place))
        used = store.stats()["posix"].used_bytes
        assert used is not None
        assert used <= 100 * UNIT
        clock.advance(1.0)


def wrote(store: KVStore, keys: Sequence[BlockKey], place: int) -> bool:
    save(store, keys[: place + 1], place)
    return store.lookup([keys[place]]) == [True]


def stamps(config: StoreConfig, keys: Sequence[BlockKey]) -> list[int]:
    layout = Layout(config.directories[0], NAMESPACE)
    return [Path(layout.block(one)).stat().st_mtime_ns for one in keys]


@pytest.mark.parametrize("pinned", [False, True])
def test_a_leased_chain_outlives_others_and_then_goes_from_its_end(
    patient: StoreConfig, clock: SimulatedClock, *, pinned: bool
) -> None:
    keys = chain(0, 30)
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        save(store, keys)
        store.retain(in_order(keys), clock.time() + 1800.0, pinned=pinned)
        settle(clock)
        flood(clock, store, 1, 300)
        assert all(found(store, keys))
        clock.advance(1800.0 + TOUCH)
        flood(clock, store, 2, 80)
        assert not all(found(store, keys)), "the lease has ended, and with it the block's advantage"
        assert has_no_gap(store, keys)
        flood(clock, store, 3, 100)
        assert not any(found(store, keys))


def test_without_a_lease_the_chain_goes(patient: StoreConfig, clock: SimulatedClock) -> None:
    keys = chain(0, 30)
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        save(store, keys)
        settle(clock)
        flood(clock, store, 1, 300)
        assert not any(found(store, keys))


def test_retained_blocks_go_when_nothing_else_is_left_and_pinned_ones_do_not(
    patient: StoreConfig, clock: SimulatedClock
) -> None:
    soft, hard = chain(0, 80), [key(7000 + place) for place in range(40)]
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        save(store, hard)
        store.retain(in_order(hard), clock.time() + 1800.0, pinned=True)
        settle(clock)
        save(store, soft[:50])
        store.retain(in_order(soft), clock.time() + 3600.0)  # for longer than the pins
        settle(clock)
        flood(clock, store, 1, 60)
        assert all(found(store, hard))
        root = patient.directories[0]
        evict(root, scan(root), 99 * UNIT, lambda _: None, LeaseRules.of(patient), 50 * UNIT, clock=clock)
        assert all(found(store, hard))
        assert not any(found(store, soft))


def test_pins_beyond_half_of_the_capacity_are_only_retained(patient: StoreConfig, clock: SimulatedClock) -> None:
    early, late = [key(7000 + place) for place in range(40)], [key(8000 + place) for place in range(40)]
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        for keys, seconds in ((early, 900.0), (late, 1800.0)):
            save(store, keys)
            settle(clock)
            store.retain(in_order(keys), clock.time() + seconds, pinned=True)
            settle(clock)
        root = patient.directories[0]
        evict(root, scan(root), 1e12, lambda _: None, LeaseRules.of(patient), 50 * FILE, clock=clock)
        assert all(found(store, late))
        assert found(store, early) == [True] * 10 + [False] * 30


@pytest.mark.parametrize("sampled", [False, True])
def test_the_limit_of_pins_holds_where_many_end_at_once(
    patient: StoreConfig, clock: SimulatedClock, *, sampled: bool
) -> None:
    """As do all that ask for more than the longest lease, in one span."""
    keys = [key(7000 + place) for place in range(40)]
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        for one in keys:  # no chain
            save(store, [one])
        settle(clock)
        for one in keys:
            store.retain(in_order([one]), clock.time() + 1e9, pinned=True)
        settle(clock)
        assert len(set(stamps(patient, keys))) == 1
        rules, root = LeaseRules.of(patient), patient.directories[0]
        for _ in range(3):  # always the same ones stay
            seen = scan(root)
            seen.exact = not sampled
            evict(root, seen, 1e12, lambda _: None, rules, 25 * FILE, clock=clock)
            assert sum(found(store, keys)) == 25


@pytest.mark.parametrize("pinned", [False, True])
def test_a_use_never_shortens_a_lease(patient: StoreConfig, clock: SimulatedClock, *, pinned: bool) -> None:
    keys = chain(0, 5)
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        save(store, keys)
        until = clock.time() + 1800.0
        store.retain(in_order(keys), until, pinned=pinned)
        settle(clock)
        expected = [kept_until(until, depth) + 500 * pinned for depth in range(5)]
        assert stamps(patient, keys) == expected
        store.renew(in_order(keys))
        memories = [Memory(one, SMALL) for one in keys]
        store.load([BlockTransfer(m.key, m.slices, depth=d) for d, m in enumerate(memories)]).wait()
        store.retain(in_order(keys), until - 600.0)
        settle(clock)
        assert stamps(patient, keys) == expected
        # Two leases join: the later end, pinned if one is.
        store.retain(in_order(keys), until + 600.0)
        settle(clock)
        assert stamps(patient, keys) == [kept_until(until + 600.0, depth) + 500 * pinned for depth in range(5)]
        # After its end a block is like any other.
        clock.advance(2400.0 + TOUCH)
        store.renew(in_order(keys))
        settle(clock)
        now = clock.time()
        assert stamps(patient, keys)[0] in {used_until(now, TOUCH, 0), used_until(now - 6.0, TOUCH, 0)}


def test_a_lease_is_bounded_and_a_wrong_clock_makes_no_block_immortal(
    patient: StoreConfig, clock: SimulatedClock
) -> None:
    keys = chain(0, 3)
    layout = Layout(patient.directories[0], NAMESPACE)
    with open_store(replace(patient, lease_seconds=600.0), NAMESPACE, SMALL, clock=clock) as store:
        save(store, keys)
        begin_span(clock, TOUCH)
        span_ends = (clock.time() // TOUCH + 1) * TOUCH
        store.retain(in_order(keys), clock.time() + 1e9, pinned=True)
        settle(clock)
        assert stamps(patient, keys)[0] == pinned_until(kept_until(span_ends + 600.0, 0))
        wrong = int((clock.time() + 10 * 365 * 86400) * 1e9) // 1000 * 1000 + 500
        os.utime(layout.block(keys[2]), ns=(wrong, wrong))
        rules = LeaseRules.of(replace(patient, lease_seconds=600.0))
        assert evict(layout.root, scan(layout.root), 1, lambda _: None, rules, 1e9, clock=clock) == (1, FILE)
        assert found(store, keys) == [True, True, False]
        os.utime(layout.block(keys[1]), ns=(wrong, wrong))
        store.renew(in_order(keys))
        clock.advance(TOUCH)
        store.renew(in_order(keys))
        settle(clock)
        assert stamps(patient, keys[1:2])[0] < wrong, "a use corrects it"


def test_a_lease_is_set_at_once(patient: StoreConfig, clock: SimulatedClock) -> None:
    """By a process that does not evict, which looks every five seconds: another one may evict in between."""
    keys, until = chain(0, 3), clock.time() + 900.0
    with (
        open_store(patient, NAMESPACE, SMALL, clock=clock) as evicts,
        open_store(patient, NAMESPACE, SMALL, clock=clock) as store,
    ):
        save(evicts, keys)
        settle(clock)
        store.renew(in_order(keys))
        settle(clock)
        store.retain(in_order(keys), until)
        clock.advance(0.05)
        assert stamps(patient, keys)[0] == kept_until(until, 0)


@pytest.mark.parametrize("until", [float("nan"), float("-inf"), -1e300, 0.0, 1.0])
def test_what_is_no_time_or_past_is_no_lease(patient: StoreConfig, clock: SimulatedClock, until: float) -> None:
    (one,) = chain(0, 1)
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        memory = Memory(one, SMALL, content(one, SMALL))
        assert not store.save([BlockTransfer(one, memory.slices, retain_until=until)]).wait().failed
        settle(clock)
        before = stamps(patient, [one])
        store.retain(in_order([one]), until, pinned=True)
        settle(clock)
        assert stamps(patient, [one]) == before


def test_the_longest_lease_is_one_that_files_can_have(patient: StoreConfig, clock: SimulatedClock) -> None:
    (one,), longest = chain(0, 1), LONGEST
    with open_store(replace(patient, lease_seconds=longest), NAMESPACE, SMALL, clock=clock) as store:
        save(store, [one])
        asked = clock.time()  # settling may pass the end of a span
        store.retain(in_order([one]), float("inf"), pinned=True)
        settle(clock)
        assert stamps(patient, [one])[0] > (asked + longest) * 1e9


def test_times_that_wait_for_a_stuck_directory_do_not_pile_up(
    patient: StoreConfig, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "_MOST_TOUCHES", 3)
    keys, failed = chain(0, 5), list[int]()
    evictor = space.Evictor(Layout(patient.directories[0], NAMESPACE), patient, lambda _: None, clock=clock)
    for number, one in enumerate(keys):
        evictor.touch(one.hex(), 1, partial(failed.append, number))
    assert failed == [3, 4]


def test_no_leases_if_the_longest_is_0(patient: StoreConfig, clock: SimulatedClock) -> None:
    keys = chain(0, 1)
    with open_store(replace(patient, lease_seconds=0.0), NAMESPACE, SMALL, clock=clock) as store:
        save(store, keys)
        settle(clock)
        before = stamps(patient, keys)
        store.retain(in_order(keys), clock.time() + 600.0, pinned=True)
        settle(clock)
        assert stamps(patient, keys) == before


def test_blocks_are_saved_with_their_lease_in_every_tier(
    patient: StoreConfig, clock: SimulatedClock, memory: str
) -> None:
    both = replace(patient, pipeline="Dram|Posix", dram_directory=memory, dram_capacity_bytes=1 << 20)
    keys = chain(0, 3)
    until = clock.time() + 1800.0
    with open_store(both, NAMESPACE, SMALL, clock=clock) as store:
        memories = [Memory(one, SMALL, content(one, SMALL)) for one in keys]
        blocks = [BlockTransfer(m.key, m.slices, depth=d, retain_until=until) for d, m in enumerate(memories)]
        store.save(blocks).wait()
        assert store.flush(60.0)
        settle(clock)
        assert stamps(patient, keys) == [kept_until(until, depth) for depth in range(3)]
        clock.advance(3.0)
        store.renew(in_order(keys))
        settle(clock)
    in_memory = [int.from_bytes(segment.read_bytes()[48:56], "little") for segment in Path(memory).rglob("segments/*")]
    assert max(in_memory) == kept_until(until, 0)


def test_a_damaged_block_has_no_lease(patient: StoreConfig, clock: SimulatedClock) -> None:
    keys = chain(0, 2)
    layout = Layout(patient.directories[0], NAMESPACE)
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        save(store, keys)
        store.retain(in_order(keys), clock.time() + 600.0, pinned=True)
        settle(clock)
    assert quarantine(layout, keys[0], BlockCorruptError("x"), 16)
    begin_span(clock, TOUCH)
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        save(store, [key(7)])
        settle(clock)
        gone: list[str] = []
        evict(layout.root, scan(layout.root), 1, gone.append, LeaseRules.of(patient), 1e9, clock=clock)
        assert [path[-8:] for path in gone] == ["-corrupt"], "it goes before what was just used"
        evict(layout.root, scan(layout.root), 1e9, gone.append, LeaseRules.of(patient), 1e9, clock=clock)
        assert found(store, [keys[1], key(7)]) == [True, False]


def test_what_another_process_touches_is_neither_touched_nor_deleted(
    patient: StoreConfig, clock: SimulatedClock
) -> None:
    with open_store(patient, NAMESPACE, SMALL, clock=clock) as store:
        save(store, chain(0, 1))
    path = Layout(patient.directories[0], NAMESPACE).block(chain(0, 1)[0])
    before = Path(path).stat().st_mtime_ns

    def inside(old: int) -> int:
        with pytest.raises(BlockingIOError):
            touch(path, lambda _: 1)
        with pytest.raises(BlockingIOError):
            unlink_if(path, before.__eq__)
        return old + 1000

    assert touch(path, inside) == before + 1000
    assert not unlink_if(path, before.__eq__)
    assert unlink_if(path, (before + 1000).__eq__)
    with pytest.raises(FileNotFoundError):
        touch(path, lambda old: old)


def test_joined_times_form_a_lattice() -> None:
    """Whatever the order of leases and uses, the outcome is the same."""
    rules, now, chance = LeaseRules(10**15), 10**18, random.Random(3)  # noqa: S311 - no secret
    for _ in range(300):
        given = [now + 1000 * chance.randrange(-9, 999) + 500 * (chance.random() < 0.3) for _ in range(4)]
        ends = set()
        for _ in range(6):
            chance.shuffle(given)
            stamp = now - 10**6
            for new in given:
                stamp = rules.joined(stamp, new, now)
            ends.add(stamp)
        assert len(ends) == 1
        (end,) = ends
        assert end >= max(given) - 500
        assert rules.is_pinned(end, now) == any(rules.is_pinned(one, now) for one in given)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_slower_writer_of_a_block_does_not_end_its_lease(
    patient: StoreConfig, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch, *, at_once: bool
) -> None:
    """Also where a file system cannot rename to a new name in one step, if the other writer is not as fast as that."""
    keys, until, publish = chain(0, 1), clock.time() + 900.0, Directory.publish
    if not at_once:
        monkeypatch.setattr(paths, "system_call", lambda *_: None)

    def overtaken(self: Directory, private: str, path: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Directory, "publish", publish)
            save(other, keys)
            with closing(open_tier(patient, "Posix", NAMESPACE)) as tier:
                assert tier.lease({keys[0]: 0}, until, pinned=True).leased == 1
        publish(self, private, path)

    with (
        open_store(patient, NAMESPACE, SMALL, clock=clock) as other,
        open_store(patient, NAMESPACE, SMALL, clock=clock) as store,
    ):
        monkeypatch.setattr(Directory, "publish", overtaken)
        save(store, keys)
        settle(clock)
        assert stamps(patient, keys) == [pinned_until(kept_until(until, 0))]
        assert len(list(Path(patient.directories[0]).rglob("tmp/*"))) == 0
