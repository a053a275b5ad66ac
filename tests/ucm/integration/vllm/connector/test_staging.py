"""Lookups report blocks verified in time as hits, and a medium that does not answer delays no one."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING
from unittest.mock import create_autospec

import pytest

from tests.clock import SimulatedClock
from tests.ucm.integration.vllm.connector.scene import SIZE, Scene, request
from ucm.integration.vllm.connector import staging
from ucm.integration.vllm.connector.metadata import geometries_of, geometry_record
from ucm.integration.vllm.connector.staging import Lookup, Query, Use
from ucm.logger import get_logger
from ucm.store.base import BlockGeometry, BlockKey
from ucm.store.memory.slab import KEEP_SECONDS, PAGE, State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ucm.store.base import BlockTransfer, Task

TOKENS = list(range(33))  # eight blocks and a token


def query(scene: Scene, tokens: Sequence[int] = TOKENS, computed: int = 0) -> Query:
    limit = (len(tokens) - 1) // SIZE * SIZE
    keys = [scene.keys.chain(tokens, SIZE)[computed // SIZE : limit // SIZE] for _ in scene.groups.groups]
    return Query(tuple(keys), computed, limit)  # type: ignore[arg-type] # keys are bytes


def end(scene: Scene, lookup: Lookup) -> int:
    scene.clock.run_until(lambda: scene.stager.poll(lookup))
    return lookup.end


def expire(scene: Scene, lookup: Lookup) -> int:
    """Let a lookup reach its deadline, without an answer of the store; return the hit."""
    scene.clock.run_until_idle()
    assert id(lookup) in scene.stager._running
    scene.clock.advance(lookup.deadline - scene.clock.monotonic() - 0.001)
    assert not scene.stager.poll(lookup)
    scene.clock.advance(0.001)
    assert scene.stager.poll(lookup)
    return lookup.end


def looked_up(scene: Scene, tokens: Sequence[int] = TOKENS) -> int:
    return end(scene, scene.stager.submit(query(scene, tokens)))


def test_blocks_for_which_there_is_never_room_are_logged(
    clock: SimulatedClock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    scene = Scene(clock, begins=False, rows=1)
    scene.keep(TOKENS)
    scene.stager.begin(scene.stores, {0: [BlockGeometry((PAGE + 1,), b"")]})
    assert looked_up(scene) == 0
    assert f"has {2 * PAGE} bytes" in caplog.text


def test_what_is_staged_is_promised_at_once_and_without_a_medium(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    first = scene.stager.submit(query(scene))
    assert end(scene, first) == 32
    scene.store.answers.clear()
    second = scene.stager.submit(query(scene))
    assert (second.finished, second.end) == (True, 32)
    assert second.rows == first.rows
    scene.stager.release(first)
    assert scene.used == 8
    scene.stager.release(second)
    assert scene.used == 0
    scene.store.answers.set()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_medium_is_asked_only_for_what_is_not_staged(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Prompts that begin alike: their common blocks are found in memory, also if the medium has lost them meanwhile."""
    scene = Scene(clock, ranks=ranks)
    other = [*TOKENS[:16], *range(100, 117)]
    common, rest = scene.keep(TOKENS)[:4], scene.keep(other)[4:]
    assert looked_up(scene) == 32
    asked: list[list[BlockKey]] = []

    def ask(keys: Sequence[BlockKey]) -> int:
        asked.append(list(keys))
        return len(keys)

    for store in scene.stores[0]:
        store.keys -= set(common)
        monkeypatch.setattr(store, "lookup_on_prefix", create_autospec(store.lookup_on_prefix, side_effect=ask))
    assert looked_up(scene, other) == 32
    assert asked == [rest] * ranks
    scene.stager.start_anew()
    assert looked_up(scene, other) == 0
    assert asked[ranks:] == [[*common, *rest]] * ranks, "what was staged under other weights is not found any more"


def test_an_engine_without_requests_gives_memory_back(clock: SimulatedClock) -> None:
    """Its scheduler makes no calls, so a thread of the stager does."""
    scene = Scene(clock)
    scene.keep(TOKENS)
    lookup = scene.stager.submit(query(scene))
    assert end(scene, lookup) == 32
    assert scene.slab is not None
    file = scene.slab.address.descriptor
    held = os.fstat(file).st_blocks
    scene.stager.release(lookup)
    clock.advance(2 * KEEP_SECONDS)
    assert os.fstat(file).st_blocks == held - 8 * PAGE // 512


def test_a_block_is_read_once_for_all_who_want_it(clock: SimulatedClock) -> None:
    scene = Scene(clock, ranks=2)
    chain = scene.keep(TOKENS)
    scene.store.answers.clear()
    lookups = [scene.stager.submit(query(scene)) for _ in range(3)]
    clock.run_until_idle()
    scene.store.answers.set()
    assert [end(scene, lookup) for lookup in lookups] == [32] * 3
    assert [sorted(store.read) for store in scene.stores[0]] == [sorted(chain)] * 2, "chunks, in any order"


def test_a_read_that_its_request_gave_up_is_another_s(clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is not a miss because the first request that wanted it was aborted."""
    monkeypatch.setattr(staging, "CHUNKS", 1)
    scene = Scene(clock)
    scene.stager._blocks_at_once = 2
    scene.keep(TOKENS)

    def all_there(keys: Sequence[BlockKey]) -> int:
        return len(keys)

    monkeypatch.setattr(scene.store, "lookup_on_prefix", all_there)
    scene.store.answers.clear()
    first = scene.stager.submit(query(scene))
    clock.run_until_idle()
    assert scene.used == 8
    second = scene.stager.submit(query(scene))
    clock.run_until_idle()
    assert scene.slab is not None
    assert all(row.users == 3 for row in scene.slab._table.values())
    scene.stager.release(first)
    scene.store.answers.set()
    assert end(scene, second) == 32
    assert sorted(second.rows[0]) == list(range(8))
    assert {row.state for row in second.rows[0].values()} == {State.WHOLE}


def test_a_hit_beyond_the_room_is_shortened(clock: SimulatedClock) -> None:
    scene = Scene(clock, rows=3)
    scene.keep(TOKENS)
    assert looked_up(scene) == 12
    assert looked_up(scene, TOKENS[::-1]) == 0


def test_a_window_has_room_before_the_rest(clock: SimulatedClock) -> None:
    scene = Scene(clock, None, 6, rows=5)
    scene.keep(TOKENS)
    scene.keep(TOKENS, group=1)
    lookup = scene.stager.submit(query(scene))
    assert end(scene, lookup) == 12
    assert {group: sorted(rows) for group, rows in lookup.rows.items()} == {0: [0, 1, 2], 1: [1, 2]}


@pytest.mark.parametrize("group", [0, 1])
def test_a_damaged_block_shortens_the_hit_of_all_groups(clock: SimulatedClock, group: int) -> None:
    scene = Scene(clock, None, 6)
    scene.keep(TOKENS)
    chain = scene.keep(TOKENS, group=1)
    scene.stores[group][0].damaged.add(chain[6])
    lookup = scene.stager.submit(query(scene))
    assert end(scene, lookup) == 24
    assert sorted(lookup.rows[1]) == [4, 5]


def test_a_block_that_vanishes_between_lookup_and_read(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    chain = scene.keep(TOKENS)
    scene.store.lookup_on_prefix = len  # type: ignore[method-assign, assignment]
    scene.store.keys.discard(chain[2])
    assert looked_up(scene) == 8


def test_what_is_verified_in_time_is_promised(clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNKS", 1)
    scene = Scene(clock)
    scene.stager._blocks_at_once = 2
    scene.keep(TOKENS)
    load, store = scene.store.load, scene.store

    def freezing(blocks: Sequence[BlockTransfer]) -> Task:
        if len(store.read) == 4:
            store.answers.clear()
        return load(blocks)

    monkeypatch.setattr(store, "load", freezing)
    lookup = scene.stager.submit(query(scene))
    clock.run_until_idle()
    assert len(store.read) == 6
    assert expire(scene, lookup) == 16
    assert sorted(lookup.rows[0]) == [0, 1, 2, 3]
    scene.stager.release(lookup)
    assert scene.used == 4  # rows that the store may still write, and rows not requested yet
    store.answers.set()
    clock.run_until_idle()
    assert scene.used == 0


def test_a_frozen_medium_costs_one_deadline_in_a_rest(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    other = [7] * 9
    scene.keep(other)
    assert looked_up(scene, other) == 8
    scene.store.answers.clear()
    frozen = scene.stager.submit(query(scene))
    assert not frozen.finished
    assert expire(scene, frozen) == 0
    for _ in range(20):
        now = scene.stager.submit(query(scene))
        assert (now.finished, now.end) == (True, 0)
    staged = scene.stager.submit(query(scene, other))
    assert (staged.finished, staged.end) == (True, 8)  # without the medium
    longer = scene.stager.submit(query(scene, [*other[:8], *TOKENS]))
    assert (longer.finished, longer.end) == (True, 8)
    # After the rest, one lookup probes the medium, and the others do not wait for it.
    clock.advance(3600.0 - 0.001)
    assert scene.stager.submit(query(scene)).finished
    clock.advance(0.001)
    probe = scene.stager.submit(query(scene))
    assert not probe.finished
    assert scene.stager.submit(query(scene)).finished
    scene.store.answers.set()
    assert end(scene, probe) == 32
    clock.run_until_idle()
    assert looked_up(scene, TOKENS) == 32


def test_so_many_threads_may_be_stuck_and_no_more(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    scene.store.answers.clear()
    for _ in range(staging.MOST_THREADS):
        expire(scene, scene.stager.submit(query(scene)))
        scene.stager._rests_until = 0.0
    assert len(scene.stager._threads) == staging.MOST_THREADS
    assert scene.stager.submit(query(scene)).finished
    scene.store.answers.set()
    clock.run_until_idle()
    assert looked_up(scene) == 32


def test_one_thread_does_where_the_system_allows_no_more(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    clock.run_until_idle()
    refuse = create_autospec(clock.thread)
    refuse.return_value.start.side_effect = RuntimeError("can't start new thread")
    monkeypatch.setattr(clock, "thread", refuse)
    scene.store.answers.clear()
    lookups = [scene.stager.submit(query(scene, TOKENS[place:])) for place in range(3)]
    clock.run_until_idle()
    refuse.return_value.start.assert_called()
    assert clock.alive == ["ucm-stage-0"]
    scene.store.answers.set()
    assert [end(scene, lookup) for lookup in lookups] == [32, 0, 0]


def test_a_question_that_a_frozen_medium_keeps_counts_as_stuck(clock: SimulatedClock) -> None:
    """Otherwise a blocked lookup thread would count as free, and every request would wait for its deadline."""
    scene = Scene(clock)
    chain = scene.keep(TOKENS)
    scene.store.answers.clear()
    scene.stager.use(use(scene, chain))
    for _ in range(staging.MOST_THREADS - 1):
        expire(scene, scene.stager.submit(query(scene)))
        scene.stager._rests_until = 0.0
    assert scene.stager.submit(query(scene)).finished
    assert scene.stager._jobs.empty()
    scene.store.answers.set()
    clock.run_until_idle()
    assert not scene.stager._answering
    assert looked_up(scene) == 32


def test_a_store_that_raises_costs_its_lookup(clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)

    def broken(keys: Sequence[BlockKey]) -> int:
        raise RuntimeError(len(keys))

    monkeypatch.setattr(scene.store, "lookup_on_prefix", broken)
    assert looked_up(scene) == 0
    monkeypatch.undo()
    assert looked_up(scene) == 32


def test_a_store_that_raises_while_it_reads(clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)

    def broken(blocks: Sequence[BlockTransfer]) -> Task:
        raise RuntimeError(len(blocks))

    monkeypatch.setattr(scene.store, "load", broken)
    assert looked_up(scene) == 0
    monkeypatch.undo()
    assert scene.slab is not None
    assert scene.slab._used == 8, "the store may yet write to these rows"
    assert looked_up(scene) == 32


def test_names_are_promised_where_nothing_is_staged(clock: SimulatedClock) -> None:
    scene = Scene(clock, rows=0)
    scene.keep(TOKENS)
    lookup = scene.stager.submit(query(scene))
    assert end(scene, lookup) == 32
    assert lookup.rows == {}
    assert scene.store.read == []


def use(scene: Scene, keys: Sequence[bytes], expected: range | None = None) -> Use:
    """Return a use of a chain whose blocks are all expected, unless the test says which."""
    chain = [BlockKey(key) for key in keys]
    return Use("r", scene.groups.groups[0], chain, range(len(keys)) if expected is None else expected)


def test_which_block_is_missing_is_told_later_or_not_at_all(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    chain = scene.keep(TOKENS)
    scene.stager.use(use(scene, chain))
    scene.store.keys.discard(chain[1])
    scene.stager.use(use(scene, chain))
    scene.stager.use(use(scene, [b"x" * 16]))
    scene.stager.use(use(scene, chain, range(1)))
    scene.stager.use(use(scene, chain, range(0)))
    assert scene.stager.answers() == []
    clock.run_until_idle()
    assert scene.stager.answers() == [("r", 0, 1), ("r", 0, 1), ("r", 0, 0)]
    assert scene.store.renewed == [chain, chain, [b"x" * 16], chain, chain]
    scene.store.answers.clear()
    expire(scene, scene.stager.submit(query(scene)))
    scene.stager.use(use(scene, chain))
    assert scene.stager.answers() == []
    scene.store.answers.set()


def test_what_many_requests_use_is_not_asked_for_each_time(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    chain = scene.keep(TOKENS)

    def asked(keys: Sequence[bytes] = chain) -> int:
        before = scene.store.lookups
        scene.stager.use(use(scene, keys))
        clock.run_until_idle()
        return scene.store.lookups - before

    assert [asked(chain[:4]), asked(chain[:4]), asked(), asked(chain[:6])] == [1, 0, 1, 0]
    scene.store.keys.clear()
    clock.advance(staging.STORED_SECONDS)
    assert (asked(), scene.stager.answers()) == (1, [("r", 0, 0)])
    scene.keep(TOKENS)
    assert [asked(), asked()] == [1, 0], "what was missing is asked for again"
    scene.stager.begin(scene.stores)
    assert asked() == 1, "other stores, of another identity, may have other blocks"


def test_a_window_is_searched_for_the_blocks_in_it_alone(clock: SimulatedClock) -> None:
    scene = Scene(clock, 2 * SIZE)
    chain = scene.keep(TOKENS)
    for gone in chain[0], chain[3]:
        scene.store.keys.discard(gone)
    for expected in range(1, 3), range(2, 4):
        scene.stager.use(use(scene, chain, expected))
        clock.run_until_idle()
    assert scene.stager.answers() == [("r", 0, 3)]


def test_the_scheduler_s_thread_never_waits_for_a_frozen_medium(clock: SimulatedClock) -> None:
    """With the medium frozen, a call that waits would not return, and its time-out would move the clock."""
    scene = Scene(clock, seconds=60.0)
    scene.store.answers.clear()
    begun = clock.monotonic()
    for number in range(200):
        new = request([number, *[7] * 1024], f"r{number}")
        for _ in range(3):
            assert scene.side.matched_tokens(new, 0) is None
            clock.run_until_idle()
    assert clock.monotonic() == begun


@pytest.mark.parametrize("seed", range(12))
def test_lookups_that_share_blocks_and_end_early_leave_no_block_behind(seed: int) -> None:
    """Requests come, are aborted and give up in any order, beside several threads that read for them."""
    chance, clock = random.Random(seed), SimulatedClock(seed)  # noqa: S311 - no secret
    scene = Scene(clock, None, 6, rows=12, ranks=2)
    chain = scene.keep(TOKENS)
    scene.keep(TOKENS, group=1)
    scene.stores[0][1].damaged.add(chain[5])
    lookups: list[Lookup] = []
    for _ in range(60):
        what = chance.randrange(5)
        if what == 0 and lookups:
            scene.stager.release(lookups.pop(chance.randrange(len(lookups))))
        elif what == 1 and lookups:
            scene.stager.give_up(chance.choice(lookups))
        elif what == 2:
            (scene.store.answers.clear if chance.random() < 0.5 else scene.store.answers.set)()
        else:
            lookups.append(scene.stager.submit(query(scene, TOKENS[: chance.choice((17, 25, 33))])))
        for lookup in lookups:
            if lookup.finished:
                assert lookup.end <= 20, "a damaged block was promised"
                assert all(row.state is State.WHOLE for rows in lookup.rows.values() for row in rows.values())
    scene.store.answers.set()
    clock.run_until_idle()
    for lookup in lookups:
        scene.stager.release(lookup)
    clock.advance(1.0)  # who waits for another thread's read looks again after a while
    assert (scene.used, scene.stager._running) == (0, {})
    scene.stager.close()
    assert clock.alive == []


def test_geometries_travel_as_records() -> None:
    one, two = BlockGeometry((1624,), b"a" * 16, 2), BlockGeometry((4,), b"b" * 16)
    records = {
        0: {"groups": {"0": geometry_record([0], one), "1": geometry_record([0], two)}},
        1: {"groups": {"0": geometry_record([1], two), "1": geometry_record([0], two)}},
    }
    assert geometries_of(records, {0: 2, 1: 1}) == {0: [one, two], 1: [two]}
    with pytest.raises(ValueError, match="rank 2 lays out KV-cache group 0 differently"):
        geometries_of({**records, 2: {"groups": {"0": geometry_record([0], two)}}}, {0: 2})
    with pytest.raises(ValueError, match="which has 3"):
        geometries_of(records, {0: 3, 1: 1})
