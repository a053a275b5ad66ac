"""Lookups report blocks verified in time as hits, and a medium that does not answer delays no one."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING
from unittest.mock import create_autospec

import pytest

from tests.ucm.integration.vllm.connector.scene import SIZE, Scene, request
from ucm.integration.vllm.connector import staging
from ucm.integration.vllm.connector.metadata import geometries_of, geometry_record
from ucm.integration.vllm.connector.staging import Lookup, Query
from ucm.store.base import BlockGeometry, BlockKey
from ucm.store.memory.slab import PAGE, State

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ucm.store.base import BlockTransfer, Task

TOKENS = list(range(33))  # eight blocks and a token


def query(scene: Scene, tokens: Sequence[int] = TOKENS, computed: int = 0) -> Query:
    limit = (len(tokens) - 1) // SIZE * SIZE
    keys = [scene.keys.chain(tokens, SIZE)[computed // SIZE : limit // SIZE] for _ in scene.groups.groups]
    return Query(tuple(keys), computed, limit)  # type: ignore[arg-type] # keys are bytes


def wait_until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.001)


def end(scene: Scene, lookup: Lookup) -> int:
    wait_until(lambda: scene.stager.poll(lookup))
    return lookup.end


def expire(scene: Scene, lookup: Lookup) -> int:
    """Let a lookup that a thread has begun reach its deadline; return the hit."""
    wait_until(lambda: lookup.begun)
    lookup.deadline = 0.0
    assert scene.stager.poll(lookup)
    return lookup.end


def looked_up(scene: Scene, tokens: Sequence[int] = TOKENS) -> int:
    return end(scene, scene.stager.submit(query(scene, tokens)))


def wait_for_rest(scene: Scene) -> None:
    wait_until(lambda: not scene.stager._stuck)


def test_what_is_staged_is_promised_at_once_and_without_a_medium() -> None:
    scene = Scene()
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


def test_memory_for_other_blocks_is_taken_once_lookups_are_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking it costs more than the reads, and the step that loads what was found needs the processors."""

    def taken(scene: Scene) -> int:
        assert scene.slab is not None
        return os.fstat(scene.slab.address.descriptor).st_blocks * 512 // PAGE

    monkeypatch.setattr(staging, "QUIET_SECONDS", 3600.0)
    scene = Scene()
    scene.keep(TOKENS)
    before = taken(scene)
    assert looked_up(scene) == 32
    wait_until(lambda: scene.stager._idle == 2)
    assert taken(scene) == before + 8
    monkeypatch.setattr(staging, "QUIET_SECONDS", 0.001)
    scene = Scene(rows=64)
    wait_until(lambda: taken(scene) >= 64)


def test_a_block_is_read_once_for_all_who_want_it() -> None:
    scene = Scene(ranks=2)
    chain = scene.keep(TOKENS)
    scene.store.answers.clear()
    lookups = [scene.stager.submit(query(scene)) for _ in range(3)]
    scene.store.answers.set()
    assert [end(scene, lookup) for lookup in lookups] == [32] * 3
    assert [sorted(store.read) for store in scene.stores[0]] == [sorted(chain)] * 2, "chunks, in any order"


def test_a_read_that_its_request_gave_up_is_another_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is not a miss because the first request that wanted it was aborted."""
    monkeypatch.setattr(staging, "CHUNKS", 1)
    scene = Scene()
    scene.stager._blocks_at_once = 2
    scene.keep(TOKENS)

    def all_there(keys: Sequence[BlockKey]) -> int:
        return len(keys)

    monkeypatch.setattr(scene.store, "lookup_on_prefix", all_there)
    scene.store.answers.clear()
    first = scene.stager.submit(query(scene))
    wait_until(lambda: scene.used == 8)
    second = scene.stager.submit(query(scene))
    assert scene.slab is not None
    rows = scene.slab._table.values()
    wait_until(lambda: all(row.users == 3 for row in rows))
    scene.stager.release(first)
    scene.store.answers.set()
    assert end(scene, second) == 32
    assert sorted(second.rows[0]) == list(range(8))
    assert {row.state for row in second.rows[0].values()} == {State.WHOLE}


def test_a_hit_beyond_the_room_is_shortened() -> None:
    scene = Scene(rows=3)
    scene.keep(TOKENS)
    assert looked_up(scene) == 12
    assert looked_up(scene, TOKENS[::-1]) == 0


def test_a_window_has_room_before_the_rest() -> None:
    scene = Scene(None, 6, rows=5)
    scene.keep(TOKENS)
    scene.keep(TOKENS, group=1)
    lookup = scene.stager.submit(query(scene))
    assert end(scene, lookup) == 12
    assert {group: sorted(rows) for group, rows in lookup.rows.items()} == {0: [0, 1, 2], 1: [1, 2]}


@pytest.mark.parametrize("group", [0, 1])
def test_a_damaged_block_shortens_the_hit_of_all_groups(group: int) -> None:
    scene = Scene(None, 6)
    scene.keep(TOKENS)
    chain = scene.keep(TOKENS, group=1)
    scene.stores[group][0].damaged.add(chain[6])
    lookup = scene.stager.submit(query(scene))
    assert end(scene, lookup) == 24
    assert sorted(lookup.rows[1]) == [4, 5]


def test_a_block_that_vanishes_between_lookup_and_read() -> None:
    scene = Scene()
    chain = scene.keep(TOKENS)
    scene.store.lookup_on_prefix = len  # type: ignore[method-assign, assignment]
    scene.store.keys.discard(chain[2])
    assert looked_up(scene) == 8


def test_what_is_verified_in_time_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNKS", 1)
    scene = Scene()
    scene.stager._blocks_at_once = 2
    scene.keep(TOKENS)
    load, store = scene.store.load, scene.store

    def freezing(blocks: Sequence[BlockTransfer]) -> Task:
        if len(store.read) == 4:
            store.answers.clear()
        return load(blocks)

    monkeypatch.setattr(store, "load", freezing)
    lookup = scene.stager.submit(query(scene))
    wait_until(lambda: len(store.read) == 6)
    assert expire(scene, lookup) == 16
    assert sorted(lookup.rows[0]) == [0, 1, 2, 3]
    scene.stager.release(lookup)
    assert scene.used == 4  # rows that the store may still write, and rows not requested yet
    store.answers.set()
    wait_for_rest(scene)
    assert scene.used == 0


def test_a_frozen_medium_costs_one_deadline_in_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
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
    monkeypatch.setattr(scene.stager, "_rests_until", time.monotonic())
    probe = scene.stager.submit(query(scene))
    assert not probe.finished
    assert scene.stager.submit(query(scene)).finished
    scene.store.answers.set()
    assert end(scene, probe) == 32
    wait_for_rest(scene)
    assert looked_up(scene, TOKENS) == 32


def test_so_many_threads_may_be_stuck_and_no_more() -> None:
    scene = Scene()
    scene.keep(TOKENS)
    scene.store.answers.clear()
    for _ in range(staging.MOST_THREADS):
        expire(scene, scene.stager.submit(query(scene)))
        scene.stager._rests_until = 0.0
    assert len(scene.stager._threads) == staging.MOST_THREADS
    assert scene.stager.submit(query(scene)).finished
    scene.store.answers.set()
    wait_for_rest(scene)
    assert looked_up(scene) == 32


def test_one_thread_does_where_the_system_allows_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.keep(TOKENS)
    refuse = create_autospec(threading.Thread.start, side_effect=RuntimeError("can't start new thread"))
    wait_until(lambda: scene.stager._idle == 1)  # and none is being started
    monkeypatch.setattr(threading.Thread, "start", refuse)
    scene.store.answers.clear()
    lookups = [scene.stager.submit(query(scene, TOKENS[place:])) for place in range(3)]
    wait_until(lambda: refuse.called)
    scene.store.answers.set()
    assert [end(scene, lookup) for lookup in lookups] == [32, 0, 0]


def test_a_question_that_a_frozen_medium_keeps_counts_as_stuck() -> None:
    """Otherwise a blocked lookup thread would count as free, and every request would wait for its deadline."""
    scene = Scene()
    chain = scene.keep(TOKENS)
    scene.store.answers.clear()
    scene.stager.ask("r", 0, BlockKey(chain[0]))
    for _ in range(staging.MOST_THREADS - 1):
        expire(scene, scene.stager.submit(query(scene)))
        scene.stager._rests_until = 0.0
    assert scene.stager.submit(query(scene)).finished
    assert scene.stager._jobs.empty()
    scene.store.answers.set()
    wait_for_rest(scene)
    wait_until(lambda: not scene.stager._answering)
    assert looked_up(scene) == 32


def test_a_store_that_raises_costs_its_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.keep(TOKENS)

    def broken(keys: Sequence[BlockKey]) -> int:
        raise RuntimeError(len(keys))

    monkeypatch.setattr(scene.store, "lookup_on_prefix", broken)
    assert looked_up(scene) == 0
    monkeypatch.undo()
    assert looked_up(scene) == 32


def test_a_store_that_raises_while_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.keep(TOKENS)

    def broken(blocks: Sequence[BlockTransfer]) -> Task:
        raise RuntimeError(len(blocks))

    monkeypatch.setattr(scene.store, "load", broken)
    assert looked_up(scene) == 0
    monkeypatch.undo()
    assert scene.used == 0
    assert looked_up(scene) == 32


def test_names_are_promised_where_nothing_is_staged() -> None:
    scene = Scene(rows=0)
    scene.keep(TOKENS)
    lookup = scene.stager.submit(query(scene))
    assert end(scene, lookup) == 32
    assert lookup.rows == {}
    assert scene.store.read == []


def test_whether_a_block_is_there_is_told_later_or_not_at_all() -> None:
    scene = Scene()
    chain = scene.keep(TOKENS)
    scene.stager.ask("r", 0, BlockKey(chain[0]))
    scene.stager.ask("r", 0, BlockKey(b"x" * 16))
    found: list[tuple[str, int, bool]] = []

    def told() -> bool:
        found.extend(scene.stager.answers())
        return len(found) == 2

    wait_until(told)
    assert found == [("r", 0, True), ("r", 0, False)]
    scene.store.answers.clear()
    expire(scene, scene.stager.submit(query(scene)))
    scene.stager.ask("r", 0, BlockKey(chain[0]))
    assert scene.stager.answers() == []
    scene.store.answers.set()


def test_the_scheduler_s_thread_never_waits_for_a_frozen_medium() -> None:
    """No timing is needed: with the medium frozen, a waiting call would never return."""
    scene = Scene(seconds=60.0)
    scene.store.answers.clear()
    stays: list[float] = []
    for number in range(200):
        new = request([number, *[7] * 1024], f"r{number}")
        for _ in range(3):
            begun = time.perf_counter()
            assert scene.side.matched_tokens(new, 0) is None
            stays.append(time.perf_counter() - begun)
    stays.sort()
    said = f"{1e3 * stays[len(stays) // 2]:.3f} ms, at most {1e3 * stays[-1]:.3f} ms"
    print(f"stay in matched_tokens with a frozen medium, the test's own hashing included: {said}")
    scene.store.answers.set()


def test_geometries_travel_as_records() -> None:
    one, two = BlockGeometry((16,) * 100 + (8, 16), b"a" * 16), BlockGeometry((4,), b"b" * 16)
    records = {
        0: {"groups": {"0": geometry_record(0, one), "1": geometry_record(0, two)}},
        1: {"groups": {"0": geometry_record(1, two), "1": geometry_record(0, two)}},
    }
    assert geometries_of(records, {0: 2, 1: 1}) == {0: [one, two], 1: [two]}
    assert len(str(records[0])) < 300
    with pytest.raises(ValueError, match="rank 2 lays out KV-cache group 0 differently"):
        geometries_of({**records, 2: {"groups": {"0": geometry_record(0, two)}}}, {0: 2})
    with pytest.raises(ValueError, match="which has 3"):
        geometries_of(records, {0: 3, 1: 1})
