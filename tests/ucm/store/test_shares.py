"""Shares of cache salts in the Posix tier, on real files with the store's own evictor, and after kills."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.ucm.store.evicting import evict_unpinned
from tests.ucm.store.test_chains import FILE, NAMESPACE, SMALL, TOUCH, found, has_no_gap, save
from tests.ucm.store.test_leases import UNIT, settle, wrote
from tests.ucm.store.workers import flood_until_killed, of_salt
from ucm.commands.store.prompt import check_pins
from ucm.errors import ConfigError, UcmError
from ucm.salts import tag_name, tag_of_salt
from ucm.store.config import StoreConfig
from ucm.store.factory import open_store
from ucm.store.posix import scan as posix_scan
from ucm.store.posix.layout import Layout
from ucm.store.posix.scan import evict, scan
from ucm.store.shares import OTHERS, Shares, Turns
from ucm.store.tier import LeaseRules, pinned_until
from ucm.testing.blocks import in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.clock import SimulatedClock
    from ucm.store.base import BlockKey, KVStore

SPAWN = multiprocessing.get_context("spawn")
DAY = 86_400.0
SHARED = Shares(DAY)


def name(salt: str) -> str:
    return tag_name(tag_of_salt(salt).hex())


def keys_of(salt: str, count: int, first: int = 0) -> list[BlockKey]:
    return [of_salt(salt, number) for number in range(first, first + count)]


@pytest.fixture
def shared(config: StoreConfig, clock: SimulatedClock) -> StoreConfig:
    """Room for 100 blocks, in shares."""
    clock.advance(3600.0)
    return replace(config, touch_seconds=TOUCH, posix_capacity_bytes=100 * UNIT, share_seconds=DAY)


def flood(clock: SimulatedClock, store: KVStore, salts: Sequence[str], first: int = 0, retain: float = 0.0) -> None:
    """Write chains of ten blocks for one salt after the other; the bound on the capacity holds at each moment."""
    for number, salt in enumerate(salts):
        keys = keys_of(salt, 10, first + 10 * number)
        for place in range(10):
            clock.run_until(lambda keys=keys, place=place: wrote(store, keys, place))  # type: ignore[misc]
        if retain:
            store.retain(in_order(keys), clock.time() + retain)
        used = store.stats()["posix"].used_bytes
        assert used is not None
        assert used <= 100 * UNIT
        clock.advance(1.0)


def make_files(config: StoreConfig, times: dict[BlockKey, float]) -> Layout:
    """Make files of a hundred bytes with these times of last use."""
    layout = Layout(config.directories[0], NAMESPACE)
    layout.make()
    for key, moment in times.items():
        path = Path(layout.block(key))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 100)
        os.utime(path, (moment, moment))
    return layout


def left(layout: Layout) -> Counter[str]:
    return Counter(tag_name(path.name[:8]) for path in Path(layout.base).glob("??/*"))


# Whose turn it is.


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1),
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.5, 1.0, 3.0])),
    st.floats(0, 1),
)
def test_who_loses_holds_the_most_for_its_weight(
    sizes: dict[str, list[int]], weights: dict[str, float], part: float
) -> None:
    shares = Shares(DAY, weights)
    held = {account: float(sum(of_one)) for account, of_one in sizes.items()}
    total = sum(held.values())
    goal, whole = part * total, sum(shares.weight(account) for account in held)
    turns: Turns[tuple[str, int]] = Turns(shares)
    for account, of_one in sizes.items():
        for number, nbytes in enumerate(of_one):
            turns.add(account, (account, number), nbytes)
    expected = {account: len(of_one) for account, of_one in sizes.items()}
    for account, item in turns:
        if sum(held.values()) <= goal:
            break
        level = held[account] / shares.weight(account)
        assert level == max(held[one] / shares.weight(one) for one in held)
        assert held[account] * whole >= goal * shares.weight(account), "nobody loses a block below its share"
        expected[account] -= 1
        assert item == (account, expected[account]), "its oldest"
        held[account] -= sizes[account][item[1]]


def test_equals_lose_the_oldest_first() -> None:
    turns: Turns[int] = Turns(SHARED)
    for age in (3, 1, 4, 0, 2):
        turns.add(f"salt {age}", age, 1.0)
    assert [age for _, age in turns] == [2, 0, 4, 1, 3]


def test_what_may_not_go_counts_and_stays() -> None:
    turns: Turns[str] = Turns(SHARED)
    for account, item, may_go in (("a", "pin", False), ("a", "pin", False), ("a", "1", True), ("b", "2", True)):
        turns.add(account, item, 1.0, may_go=may_go)
    turns.add("", "old", 1.0)
    assert list(turns) == [("", "old"), ("a", "1"), ("b", "2")]


def test_accounts() -> None:
    tag = tag_of_salt("a").hex()
    assert (SHARED.account(tag), SHARED.account("00000000")) == (name("a"), "no-salt")
    some = Shares(DAY, {name("a"): 2.0})
    assert (some.account(tag), some.account("00000000")) == (name("a"), OTHERS)
    assert (some.weight(name("a")), some.weight(OTHERS)) == (2.0, 1.0)


@pytest.mark.parametrize("weights", [{"tenant": 1.0}, {"no-salt": 0.0}, {OTHERS: -1.0}, {OTHERS: float("inf")}])
def test_what_is_no_weight_is_refused(weights: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"ucm store tag|not above 0"):
        StoreConfig(share_weights=weights)


# With the store's own evictor.


@pytest.mark.parametrize("seconds", [0.0, DAY])
def test_a_flood_evicts_itself(shared: StoreConfig, clock: SimulatedClock, seconds: float) -> None:
    steady = keys_of("steady", 40)
    with open_store(replace(shared, share_seconds=seconds), NAMESPACE, SMALL, clock=clock) as store:
        save(store, steady)
        settle(clock)
        flood(clock, store, ["flood"] * 30)
        assert all(found(store, steady)) == bool(seconds), "without shares, the oldest blocks are the steady ones"
        assert found(store, keys_of("flood", 300)).count(True) >= 50, "what others do not use is lent"


def test_a_salt_alone_loses_its_oldest_blocks_and_chains_their_ends(shared: StoreConfig, clock: SimulatedClock) -> None:
    chains = [keys_of("a", 30, 1000 * number) for number in range(4)]
    with open_store(shared, NAMESPACE, SMALL, clock=clock) as store:
        for keys in chains:
            for place in range(30):
                clock.run_until(lambda keys=keys, place=place: wrote(store, keys, place))  # type: ignore[misc]
            clock.advance(TOUCH)
        assert not all(found(store, chains[0]))
        assert all(all(found(store, keys)) for keys in chains[1:])
        assert has_no_gap(store, chains[0])


def test_leases_order_a_salts_own_blocks_only(shared: StoreConfig, clock: SimulatedClock) -> None:
    """A client that retains all that it uses does not evict who retains nothing."""
    steady = keys_of("steady", 40)
    with open_store(shared, NAMESPACE, SMALL, clock=clock) as store:
        save(store, steady)
        settle(clock)
        flood(clock, store, ["flood"] * 30, retain=3600.0)
        assert all(found(store, steady))


def test_pins_stay_count_for_their_salt_and_the_capacity_holds(shared: StoreConfig, clock: SimulatedClock) -> None:
    pinned, steady = keys_of("a", 48), keys_of("b", 40)
    with open_store(shared, NAMESPACE, SMALL, clock=clock) as store:
        save(store, pinned)
        store.retain(in_order(pinned), clock.time() + 3600.0, pinned=True)
        settle(clock)
        save(store, steady)
        settle(clock)
        flood(clock, store, ["a", "c"] * 10)
        assert all(found(store, pinned))
        # Of the 52 others, those two have 26 each; who holds pins has had more than its share.
        assert found(store, steady).count(True) in range(20, 27)
        assert has_no_gap(store, steady)


def test_pins_of_a_salt_leave_others_theirs_after_a_restart(shared: StoreConfig, clock: SimulatedClock) -> None:
    greedy, small = keys_of("greedy", 45), keys_of("small", 20)
    with open_store(shared, NAMESPACE, SMALL, clock=clock) as store:
        for keys, seconds in ((small, 3600.0), (greedy, 7200.0)):
            save(store, keys)
            store.retain(in_order(keys), clock.time() + seconds, pinned=True)
            settle(clock)
    with open_store(shared, NAMESPACE, SMALL, clock=clock) as store:
        flood(clock, store, [f"flood {number}" for number in range(20)])
        assert all(found(store, small))
        assert found(store, greedy).count(True) in range(25, 45)


def test_what_nobody_uses_any_more_goes_first(shared: StoreConfig, clock: SimulatedClock) -> None:
    gone, steady = keys_of("gone", 20), keys_of("steady", 30)
    with open_store(replace(shared, share_seconds=1800.0), NAMESPACE, SMALL, clock=clock) as store:
        save(store, [*gone])
        save(store, steady)
        clock.advance(1800.0 + 2 * TOUCH)
        store.renew(in_order(steady))
        settle(clock)
        flood(clock, store, ["flood"] * 20)
        assert all(found(store, steady))
        assert not any(found(store, gone))


def test_hits_evictions_and_bytes_are_counted_by_weighted_salt(shared: StoreConfig, clock: SimulatedClock) -> None:
    weighted = replace(shared, share_weights={name("steady"): 1.0, name("absent"): 1.0})
    with open_store(weighted, NAMESPACE, SMALL, clock=clock) as store:
        save(store, keys_of("steady", 40))
        settle(clock)
        assert store.lookup_on_prefix(keys_of("steady", 50)) == 40
        flood(clock, store, [f"flood {number}" for number in range(20)])
        clock.advance(61.0)
        stats = store.stats()["posix"]
        assert stats.hits_of[name("steady")] == 40
        assert stats.hits_of.keys() == {name("steady"), OTHERS}
        assert stats.evicted_of == {OTHERS: stats.evicted_blocks}
        assert stats.bytes_of[name("steady")] == 40 * FILE
        assert stats.bytes_of[name("absent")] == 0, "what a salt no longer holds is no longer shown"
        assert 40 * FILE <= stats.bytes_of[OTHERS] <= 60 * FILE
    with open_store(shared, NAMESPACE, SMALL, clock=clock) as store:
        store.lookup(keys_of("steady", 50))
        flood(clock, store, ["flood"] * 3)
        stats = store.stats()["posix"]
        assert (stats.hits_of, stats.evicted_of, stats.bytes_of) == ({}, {}, {}), "there may be any number of salts"


# Attacks.


def test_thousands_of_salts_take_what_they_hold_and_no_more(config: StoreConfig, clock: SimulatedClock) -> None:
    now = clock.time()
    many = {of_salt(f"one {number}", number): now - 10 + number / 1000 for number in range(2000)}
    layout = make_files(config, {**dict.fromkeys(keys_of("steady", 900), now - 1000), **many})
    assert evict_unpinned(layout.root, scan(layout.root), 600 * 100, lambda _: None, shares=SHARED, clock=clock) == (
        600,
        60_000,
    )
    assert left(layout)[name("steady")] == 300, "it holds 300 times as much as any other"
    evict_unpinned(layout.root, scan(layout.root), 299 * 100, lambda _: None, shares=SHARED, clock=clock)
    assert left(layout)[name("steady")] == 1
    evict_unpinned(layout.root, scan(layout.root), 100 * 100, lambda _: None, shares=SHARED, clock=clock)
    assert left(layout)[name("steady")] == 0
    lost = {number for number in range(2000) if not Path(layout.block(of_salt(f"one {number}", number))).exists()}
    assert lost == set(range(99)), "of equals, the oldest go"


def test_who_chooses_salts_freely_takes_nothing_from_those_with_weights(
    config: StoreConfig, clock: SimulatedClock
) -> None:
    now = clock.time()
    many = {of_salt(f"one {number}", number): now for number in range(1000)}
    shares = Shares(DAY, {name("steady"): 3.0, name("small"): 1.0})
    of_both = dict.fromkeys([*keys_of("steady", 500), *keys_of("small", 100)], now - 1000)
    layout = make_files(config, {**of_both, **many})
    evict_unpinned(layout.root, scan(layout.root), 1100 * 100, lambda _: None, shares=shares, clock=clock)
    found = left(layout)
    assert (found[name("steady")], found[name("small")], found.total()) == (300, 100, 500)


def test_salts_with_the_same_tag_share_an_account(config: StoreConfig, clock: SimulatedClock) -> None:
    layout = make_files(config, dict.fromkeys(keys_of("twins", 200), clock.time()))
    make_files(config, dict.fromkeys(keys_of("other", 150), clock.time() - 100))
    evict_unpinned(layout.root, scan(layout.root), 100 * 100, lambda _: None, shares=SHARED, clock=clock)
    assert left(layout) == {name("twins"): 125, name("other"): 125}


def test_pins_of_one_salt_beyond_all_shares_leave_the_rest_to_the_others(
    config: StoreConfig, clock: SimulatedClock
) -> None:
    now = clock.time()
    until = pinned_until(int((now + 3600) * 1e9))
    layout = make_files(config, dict.fromkeys(keys_of("pins", 300), now))
    for path in Path(layout.base).glob("??/*"):
        os.utime(path, ns=(until, until))
    make_files(config, dict.fromkeys([*keys_of("a", 60), *keys_of("b", 40)], now))
    rules = LeaseRules.of(config)
    evict(layout.root, scan(layout.root), 40 * 100, lambda _: None, rules, 1e9, shares=SHARED, clock=clock)
    assert left(layout) == {name("pins"): 300, name("a"): 30, name("b"): 30}


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("seconds", [0.0, DAY])
@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({}, {"greedy": 16, "other": 16, "small": 8}),
        ({"greedy": 3.0, "small": 1.0}, {"greedy": 24, "other": 8, "small": 8}),
        ({"small": 4.0, OTHERS: 2.0}, {"greedy": 28, "small": 12}),
    ],
)
def test_pins_are_divided_among_salts(
    config: StoreConfig,
    clock: SimulatedClock,
    weights: dict[str, float],
    expected: dict[str, int],
    *,
    seconds: float,
    sampled: bool,
) -> None:
    """Who pins much, and for long, takes no room from others; of its own pins, the last to end stay."""
    now = clock.time()
    for salt, count, until in (("greedy", 60, 9000), ("other", 20, 5000), ("small", 12, 1000)):
        keys = keys_of(salt, count)
        layout = make_files(config, dict.fromkeys(keys, now))
        for number, one in enumerate(keys):
            os.utime(layout.block(one), ns=(pinned_until(int((now + until + number) * 1e9)),) * 2)
    if not weights:  # less than its part
        for one in keys_of("small", 4):
            Path(layout.block(one)).unlink()
    shares = Shares(seconds, {salt if salt == OTHERS else name(salt): one for salt, one in weights.items()})
    found = scan(layout.root)
    found.exact = not sampled
    evict(layout.root, found, 1e12, lambda _: None, LeaseRules.of(config), 40 * 100, shares=shares, clock=clock)
    assert left(layout) == {name(salt): count for salt, count in expected.items()}
    assert all(Path(layout.block(one)).exists() for one in keys_of("small", expected["small"], 12 - expected["small"]))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.integers(1, 999)), max_size=20),
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 3.0])),
    st.integers(1, 60),
    st.lists(st.integers(1, 9), max_size=6),
    st.integers(1, 999),
)
@example([("b", 6, 5), ("b", 1, 1), ("a", 6, 3)], {}, 13, [5], 9)
@example([("b", 1, 1)], {}, 1, [1], 2)
def test_a_pin_that_is_accepted_is_kept_and_one_that_is_refused_would_not_be(
    tmp_path_factory: pytest.TempPathFactory,
    clock: SimulatedClock,
    pins: list[tuple[str, int, int]],
    weights: dict[str, float],
    most: int,
    new: list[int],
    until: int,
) -> None:
    """Also where blocks have several sizes, as those of several models."""
    root, now = tmp_path_factory.mktemp("pins"), clock.time()
    weighed = {name(salt): one for salt, one in weights.items()}
    config = StoreConfig(directories=(str(root),), posix_capacity_bytes=2 * most, share_weights=weighed)
    every = [*pins, *(("a", nbytes, until) for nbytes in new)]
    keys = [of_salt(salt, number) for number, (salt, *_) in enumerate(every)]
    layout, added = make_files(config, dict.fromkeys(keys, now)), keys[len(pins) :]
    ends = [pinned_until(int((now + 60 * end) * 1e9)) for *_, end in every]
    for key, (_, nbytes, _), end in zip(keys, every, ends, strict=True):
        Path(layout.block(key)).write_bytes(bytes(nbytes))
        if key not in added:
            os.utime(layout.block(key), ns=(end, end))
    refused, last = False, pinned_until(int((now + 60 * until) * 1e9)) / 1e9
    try:
        check_pins(config, {NAMESPACE: added}, last, clock=clock)
    except UcmError:
        refused = True
    for key in added:
        os.utime(layout.block(key), ns=(ends[-1], ends[-1]))
    rules, shares = LeaseRules.of(config), Shares.of(config)
    evict(layout.root, scan(layout.root), 1e12, lambda _: None, rules, most, shares=shares, clock=clock)
    account = shares.account_of(of_salt("a", 0))
    mine = [key for key in keys if shares.account_of(key) == account]
    kept = all(Path(layout.block(key)).exists() for key in mine)
    assert refused == (not kept and bool(added))


def test_pins_that_a_sample_misses_stay(config: StoreConfig, clock: SimulatedClock) -> None:
    now, pinned = clock.time(), keys_of("pins", 3)
    layout = make_files(config, {**dict.fromkeys(keys_of("retains", 40), now + 3600), **dict.fromkeys(pinned, now)})
    for one in pinned:
        os.utime(layout.block(one), ns=(pinned_until(int((now + 1800) * 1e9)),) * 2)
    found = scan(layout.root)
    found.files = [file for file in found.files if tag_name(file.tag) != name("pins")]
    found.exact = False
    evict(layout.root, found, 1e12, lambda _: None, LeaseRules.of(config), 1e12, clock=clock)
    assert left(layout) == {name("pins"): 3}


@pytest.mark.parametrize("seconds", [0.0, DAY])
def test_a_large_root_holds_shares_by_a_sample(
    config: StoreConfig, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """With weights alone, salts are only counted."""
    shares = Shares(seconds, {name("steady"): 1.0, name("small"): 1.0})
    now = clock.time()
    steady = {key: now - 1000 + place / 100 for place, key in enumerate(keys_of("steady", 1000))}
    floods = {key: now - 100 + place / 100 for place, key in enumerate(keys_of("flood", 2000))}
    layout = make_files(config, {**steady, **floods, of_salt("small", 1): now - 2000})
    monkeypatch.setattr(posix_scan, "_LEAST_SAMPLE", 500)
    found = scan(layout.root, sample_blocks=1000)
    assert not found.exact
    count, _ = evict_unpinned(layout.root, found, 700 * 100, lambda _: None, shares=shares, clock=clock)
    assert count == pytest.approx(700, rel=0.2)
    if not seconds:
        assert left(layout)[name("steady")] <= 1000 - 500
        assert left(layout)[name("flood")] == 2000
        return
    assert left(layout)[name("steady")] == 1000
    assert left(layout)[name("small")] == 1
    gone = [moment for key, moment in floods.items() if not Path(layout.block(key)).exists()]
    assert max(gone) < now - 100 + 2000 / 100 / 2, "the oldest"


@pytest.mark.parametrize("seconds", [0.0, DAY])
def test_shares_hold_for_all_processes_whoever_is_killed(config: StoreConfig, seconds: float) -> None:
    """Processes flood a store one after the other and together; each is killed while it evicts or writes."""
    shared = replace(config, posix_capacity_bytes=100 * UNIT, share_seconds=seconds)
    steady = keys_of("steady", 20)
    with open_store(shared, NAMESPACE, SMALL) as store:
        save(store, steady)
    for salts in (("a",), ("b", "a")):
        running = []
        for number, salt in enumerate(salts):
            ours, its = SPAWN.Pipe()
            arguments = (shared, NAMESPACE, SMALL, salt, 10_000 * number, its)
            process = SPAWN.Process(target=flood_until_killed, args=arguments)
            process.start()
            running.append((process, ours))
        for _, ours in running:
            for _ in range(5):
                ours.recv()
        for process, _ in running:
            process.kill()
            process.join()
    root = shared.directories[0]
    assert scan(root).nbytes <= 100 * UNIT
    with open_store(shared, NAMESPACE, SMALL) as store:
        assert found(store, steady).count(True) == (20 if seconds else 0)
