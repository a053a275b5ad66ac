"""The scheduler side's hits and loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

from tests.ucm.integration.vllm.connector.scene import SIZE, TOKENS, Scene, moved, request
from tests.ucm.integration.vllm.connector.simulation.truth import STATE
from ucm.integration.vllm.connector.prefix_cache import IDLE_SECONDS

if TYPE_CHECKING:
    from tests.clock import SimulatedClock

# Lookup


def test_a_request_waits_until_its_inputs_are_hashed(clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, new = Scene(clock), request(TOKENS, unread=True)
    scene.keep(TOKENS)
    of = create_autospec(scene.keys.of, side_effect=scene.keys.of)
    monkeypatch.setattr(scene.keys, "of", of)
    assert [scene.side.matched_tokens(new, 0) for _ in range(3)] == [None] * 3
    assert scene.matched(request(TOKENS, "other")) == 16, "no other one waits"
    assert new not in [call.args[0] for call in of.call_args_list]
    new.unread = False  # type: ignore[attr-defined] # as it was made
    assert scene.matched(new) == 16


def test_a_request_that_ends_before_its_inputs_are_hashed_saves_nothing(clock: SimulatedClock) -> None:
    scene, new = Scene(clock), request(TOKENS, unread=True)
    assert scene.side.matched_tokens(new, 0) is None
    scene.side.finished(new)
    assert not scene.step({}).late_saves


def test_inputs_of_a_request_that_is_not_cached_are_not_hashed_again(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, new = Scene(clock), request(TOKENS)
    scene.side.matched_tokens(new, 0)
    scene.side.exclude(new)
    monkeypatch.setattr(scene.keys, "is_ready", create_autospec(scene.keys.is_ready, side_effect=AssertionError))
    assert scene.side.matched_tokens(new, 0) == 0


def test_the_log_says_which_group_ends_a_hit(clock: SimulatedClock) -> None:
    scene, new = Scene(clock, None, STATE), request(TOKENS)
    chain = scene.keep(TOKENS)
    scene.keep(TOKENS[:8], 1)
    assert scene.matched(new) == 8
    lookup = scene.side._requests["r"].lookup
    assert lookup is not None
    expected = f"then block {chain[2].hex()[:16]} of KV-cache group 1 is missing"
    assert scene.side._first_missing(lookup) == expected


def test_vllm_that_asks_once_only_gets_its_answer(clock: SimulatedClock) -> None:
    """Before 0.10.2: the inputs are hashed while the scheduler waits."""
    scene = Scene(clock, asks_again=False)
    scene.keep(TOKENS)
    assert scene.side.matched_tokens(request(TOKENS, unread=True), 0) == 16


def test_an_idle_engine_waits_for_inputs_but_not_for_long(
    clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(clock)
    waited = create_autospec(scene.keys.wait)
    monkeypatch.setattr(scene.keys, "wait", waited)
    scene.side.matched_tokens(request(TOKENS, unread=True), 0)
    assert scene.step({}).idle
    [(seconds,)] = [call.args for call in waited.call_args_list]
    assert 0 < seconds < 0.1


def test_the_whole_blocks_that_the_store_has_are_found(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    assert scene.matched(request(TOKENS, "none"), 0) == 0
    scene.keep(TOKENS[:8])
    assert scene.matched(request(TOKENS, "two"), 0) == 8
    assert scene.matched(request(TOKENS, "one more"), 4) == 4
    assert scene.matched(request(TOKENS, "as many"), 8) == 0
    assert scene.counted.calls == [(18, 0), (18, 8), (14, 4), (10, 0)]


def test_the_last_token_is_computed(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    assert scene.matched(request(TOKENS[:16], "on the boundary"), 0) == 12
    assert scene.matched(request(TOKENS[:17], "one beyond"), 0) == 16
    assert scene.matched(request(TOKENS[:4], "one block"), 0) == 0
    assert scene.matched(request(TOKENS[:1], "one token"), 0) == 0


def test_a_gap_ends_a_hit(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    chain = scene.keep(TOKENS)
    scene.store.keys.discard(chain[2])
    assert scene.matched(request(TOKENS, "from the start"), 0) == 8
    assert scene.matched(request(TOKENS, "behind it"), 12) == 4


def test_every_rank_must_have_a_block(clock: SimulatedClock) -> None:
    scene = Scene(clock, ranks=2)
    scene.keep(TOKENS)
    assert scene.matched(request(TOKENS), 0) == 16
    scene = Scene(clock, ranks=2)
    scene.keep(TOKENS)
    scene.stores[0][1].keys.difference_update(scene.keys.chain(TOKENS, SIZE)[1:])
    assert scene.matched(request(TOKENS, "again"), 0) == 4


@pytest.mark.parametrize(("ratio", "hit"), [(1.0, 16), (0.9, 16), (0.5, 8), (0.1, 0)])
def test_the_share_of_a_request_that_may_come_from_caches(clock: SimulatedClock, ratio: float, hit: int) -> None:
    scene = Scene(clock, hit_ratio=ratio)
    scene.keep(TOKENS)
    assert scene.matched(request(TOKENS), 0) == hit


def test_short_hits_are_left_alone(clock: SimulatedClock) -> None:
    scene = Scene(clock, min_hit_tokens=8)
    scene.keep(TOKENS[:8])
    assert scene.matched(request(TOKENS, "long enough"), 0) == 8
    assert scene.matched(request(TOKENS, "too short"), 4) == 0


def test_a_draft_model_computes_the_last_block_of_a_hit(clock: SimulatedClock) -> None:
    scene = Scene(clock, drops_last_block=True)
    scene.keep(TOKENS[:12])
    assert scene.matched(request(TOKENS), 0) == 8


def test_a_window_that_reaches_back_from_there_is_looked_at_anew(clock: SimulatedClock) -> None:
    scene = Scene(clock, None, 6, drops_last_block=True)
    scene.keep(TOKENS[:16])
    scene.stores[1][0].keys.update(scene.keys.chain(TOKENS[:16], SIZE)[2:])
    new = request(TOKENS)
    assert scene.matched(new, 0) == 0  # 16 would be possible, but for 12 a block of the window is missing
    assert scene.used == 0
    scene.keep(TOKENS[:16], group=1)
    again = request(TOKENS, "again")
    assert scene.admit(again) == 12
    plan = scene.run(again, 2, scene.rows)
    assert [len(moves.keys) for moves in plan.loads] == [3, 2]


@pytest.mark.parametrize(
    "more",
    [
        {"sampling_params": SimpleNamespace(prompt_logprobs=0)},
        {"skip_reading_prefix_cache": True},
        {"pooling_params": SimpleNamespace()},  # a release that does not report what the pooler needs
        {"resumable": True},
    ],
    ids=str,
)
def test_requests_whose_every_token_must_be_computed(clock: SimulatedClock, more: dict[str, Any]) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    assert scene.matched(request(TOKENS, "plain"), 0) == 16
    assert scene.matched(request(TOKENS, "special", **more), 0) == 0


def test_roles(clock: SimulatedClock) -> None:
    writes, reads = Scene(clock, loads=False), Scene(clock, saves=False)
    writes.keep(TOKENS)
    reads.keep(TOKENS[:8])
    assert writes.matched(request(TOKENS, "writes"), 0) == 0
    new = request(TOKENS, "reads")
    assert reads.admit(new) == 8
    assert reads.run(new, 10, reads.rows).saves == []


def test_what_the_engine_itself_has_is_another_question(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    new = request(TOKENS)
    assert scene.matched(new, 0) == 16
    assert scene.matched(new, 0) == 16
    assert scene.matched(new, 4) == 12
    assert scene.counted.calls == [(18, 16), (14, 12)]
    assert scene.used == 3


# While a lookup is pending


def test_the_outcome_is_asked_for_again(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    scene.store.answers.clear()
    new = request(TOKENS)
    assert scene.side.matched_tokens(new, 0) is None
    assert scene.side.matched_tokens(new, 0) is None
    scene.store.answers.set()
    assert scene.matched(new, 0) == 16
    assert scene.counted.calls == [(18, 16)]


def test_a_request_that_needs_nothing_waits_for_nobody(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    scene.store.answers.clear()
    assert scene.side.matched_tokens(request(TOKENS, "looked up"), 0) is None
    assert scene.side.matched_tokens(request(TOKENS, "has all"), 16) == 0
    assert scene.side.matched_tokens(request(TOKENS[:4], "short"), 0) == 0
    plan = scene.step({"has all": 2})  # a step with something to do does not wait
    assert not plan.idle
    scene.store.answers.set()


@pytest.mark.parametrize("how", ["aborted", "other blocks", "anew"])
def test_a_lookup_that_nobody_wants_any_more_keeps_nothing(clock: SimulatedClock, how: str) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    scene.store.answers.clear()
    new = request(TOKENS)
    assert scene.side.matched_tokens(new, 0) is None
    if how == "aborted":
        scene.side.finished(new)
    elif how == "anew":
        scene.side.start_anew()
    else:
        assert scene.side.matched_tokens(new, 12) is None
    scene.store.answers.set()
    if how == "other blocks":
        assert scene.matched(new, 12) == 4
        scene.side.finished(new)
    scene.matched(request([7] * 9, "another that is looked up behind it"), 0)
    assert scene.used == 0


def test_a_preempted_request_is_looked_up_again(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    new = request(TOKENS)
    assert scene.admit(new) == 16
    scene.run(new, 2, scene.rows)
    new.num_computed_tokens, new.num_preemptions = 0, 1
    assert scene.admit(new) == 16
    assert len(moved(scene.run(new, 2, scene.rows).loads)) == 4


def test_an_idle_engine_waits_for_a_lookup_but_not_for_long(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    scene.store.answers.clear()
    new = request(TOKENS)
    assert scene.side.matched_tokens(new, 0) is None
    assert scene.step({}).idle  # returns although the store does not answer
    scene.store.answers.set()
    assert scene.matched(new, 0) == 16


def test_where_nothing_runs_the_first_lookup_of_a_step_is_answered_at_once(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    scene.step({})
    first, second = request(TOKENS, "first"), request([*TOKENS[:8], *TOKENS], "second")
    assert scene.side.matched_tokens(first, 0) == 16
    assert scene.side.matched_tokens(second, 0) is None, "many requests at once wait no longer than one"
    rows = scene.give(first, 0, 16)
    scene.run(first, 2, rows)
    assert scene.side.matched_tokens(request(TOKENS[::-1], "third"), 0) is None, "a running request does not wait"
    scene.side.finished(first)
    assert scene.side.matched_tokens(request([7, *TOKENS], "fourth"), 0) == 0


def test_a_medium_that_does_not_answer_keeps_an_idle_engine_for_a_moment_only(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    scene.step({})
    scene.store.answers.clear()
    before = clock.monotonic()
    assert scene.side.matched_tokens(request(TOKENS, "first"), 0) is None
    assert clock.monotonic() - before == pytest.approx(IDLE_SECONDS)
    assert scene.side.matched_tokens(request(TOKENS[::-1], "second"), 0) is None
    assert clock.monotonic() - before == pytest.approx(IDLE_SECONDS)
    scene.store.answers.set()


def test_a_step_in_flight_is_not_nothing(clock: SimulatedClock) -> None:
    scene = Scene(clock, batches=2)
    first = request(TOKENS, "first")
    scene.admit(first)
    scene.run(first, 18, scene.rows)
    scene.store.answers.clear()
    before = clock.monotonic()
    scene.step({})
    assert scene.side.matched_tokens(request(TOKENS[::-1], "second"), 0) is None
    assert clock.monotonic() == before
    scene.store.answers.set()


def test_where_vllm_cannot_ask_again_a_lookup_is_waited_for_a_moment(clock: SimulatedClock) -> None:
    scene = Scene(clock, asks_again=False)
    scene.keep(TOKENS)
    assert scene.side.matched_tokens(request(TOKENS), 0) == 16
    scene.store.answers.clear()
    assert scene.side.matched_tokens(request(TOKENS[::-1], "frozen"), 0) == 0
    scene.store.answers.set()


# Loads


def test_what_was_found_is_loaded_into_the_blocks_behind_the_computed_ones(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    chain = scene.keep(TOKENS[:12])
    new = request(TOKENS)
    assert scene.admit(new, computed=4, had=[70]) == 8
    plan = scene.run(new, 6, scene.rows)
    blocks = scene.rows[0]
    assert moved(plan.loads) == [(chain[1], blocks[1]), (chain[2], blocks[2])]
    assert moved(plan.saves) == [(scene.keys.chain(TOKENS, SIZE)[3], blocks[3])]
    assert plan.fresh_block_ids == set(blocks[1:])
    assert scene.run(new, 1).loads == []


def test_a_request_may_wait_for_its_load_between_steps(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    chain = scene.keep(TOKENS[:8])
    new = request(TOKENS)
    assert scene.admit(new) == 8
    first = scene.step({})
    blocks = scene.rows[0]
    assert moved(first.loads) == [(chain[0], blocks[0]), (chain[1], blocks[1])]
    assert first.fresh_block_ids == set(blocks[:2])
    assert first.idle
    scene.side.allocated(new, SimpleNamespace(get_block_ids=lambda: ([],)), 0)
    second = scene.run(new, 10, scene.rows)
    assert second.loads == []
    assert second.fresh_block_ids == set(blocks[2:])
    assert not second.idle


def test_a_load_that_brought_nothing_is_not_tried_again(clock: SimulatedClock) -> None:
    """vLLM frees the blocks and asks again; a block that always fails would make the request wait for ever."""
    scene = Scene(clock)
    scene.keep(TOKENS)
    new = request(TOKENS)
    assert scene.admit(new) == 16
    scene.step({})
    new.num_computed_tokens = 0
    assert scene.matched(new, 0) == 0
    rows = scene.give(new, 0, 0)
    assert scene.run(new, 18, rows).loads == []
    # Once the request has run, it may be tried again.
    new.num_computed_tokens = 0
    assert scene.matched(new, 0) == 16


def test_several_groups_load_what_each_still_reads(clock: SimulatedClock) -> None:
    scene = Scene(clock, None, 6)
    chain = scene.keep(TOKENS[:16])
    scene.keep(TOKENS[:16], group=1)
    new = request(TOKENS)
    assert scene.admit(new) == 16
    plan = scene.run(new, 2, scene.rows)
    assert [moves.group for moves in plan.loads] == [0, 1]
    assert plan.loads[0].keys == chain
    assert plan.loads[1].keys == chain[2:]
    assert plan.loads[1].block_ids == scene.rows[1][2:4]


@pytest.mark.parametrize(
    ("windows", "stored", "computed", "tokens", "found"),
    [
        ((None,), 0, 0, 16, {"posix": 16}),
        ((None,), 0, 4, 12, {"posix": 12}),
        ((None,), 0, 4, 6, {"posix": 6}),
        ((None,), 8, 4, 12, {"posix": 12}),  # a chunk that begins with computed tokens
        ((STATE, None), 0, 0, 16, {"posix": 16}),  # as the group with all blocks says
        ((6,), 0, 0, 16, {"posix": 8}),  # nobody loads what the window does not reach
    ],
)
def test_the_tiers_that_a_hit_comes_from(
    clock: SimulatedClock, windows: tuple[int | None, ...], stored: int, computed: int, tokens: int, found: Any
) -> None:
    scene = Scene(clock, *windows, stored_tokens=stored)
    for group in scene.groups.groups:
        scene.stores[group.index][0].keys.update(scene.keys.chain(TOKENS, group.chunk_tokens))
    new = request(TOKENS)
    assert scene.side.tiers(new, 16) == {}, "nothing was asked for"
    assert scene.matched(new, computed) == 16 - computed
    assert scene.side.tiers(new, 16) == {}, "vLLM has no room for it yet"
    scene.give(new, computed, 16 - computed, range(1, 1 + computed // SIZE))
    assert scene.side.tiers(new, tokens) == found


def test_where_workers_read_the_store_nobody_knows_the_tiers_before(clock: SimulatedClock) -> None:
    scene, new = Scene(clock, rows=0), request(TOKENS)
    scene.keep(TOKENS)
    assert scene.admit(new) == 16
    assert scene.side.tiers(new, 16) == {}


def test_requests_that_load_are_left_room_for_the_rest_of_their_blocks(clock: SimulatedClock) -> None:
    scene = Scene(clock, room=12)

    def room_for(new: Any) -> int | None:
        scene.side.matched_tokens(new, 0)
        scene.step({})  # its lookup ends
        return scene.side.matched_tokens(new, 0)

    scene.keep(TOKENS)
    first, second = request(TOKENS, "first"), request(TOKENS, "second")
    assert scene.admit(first) == 16  # its 18 tokens and the next ones need six blocks
    assert scene.matched(second, 0) == 16
    third = request(TOKENS, "third")
    scene.give(second, 0, 16)
    assert room_for(third) is None
    # vLLM would stop at it for lack of blocks, and never reach the requests that load.
    assert room_for(request([99] * 18, "finds nothing")) is None
    assert scene.side.matched_tokens(request(TOKENS, "is computed", skip_reading_prefix_cache=True), 0) is None
    scene.step({})
    assert room_for(third) is None
    scene.run(first, 2, [[1, 2, 3, 4, 5]])
    assert scene.matched(third, 0) == 16
    scene.give(third, 0, 16)
    fourth = request(TOKENS, "fourth")
    assert room_for(fourth) is None
    scene.side.finished(second)
    assert scene.matched(fourth, 0) == 16


def test_small_requests_that_load_do_not_keep_a_large_one_waiting_for_ever(clock: SimulatedClock) -> None:
    scene = Scene(clock, room=12)
    scene.keep(TOKENS)

    def loading(name: str) -> Any:
        new = request(TOKENS[:9], name)  # four blocks
        assert scene.matched(new, 0) == 8
        scene.give(new, 0, 8)
        return new

    first, second = loading("first"), loading("second")
    large, small = request(TOKENS * 2, "large"), request(TOKENS[:9], "small")
    assert scene.side.matched_tokens(large, 0) is None
    clock.run_until_idle()
    assert scene.side.matched_tokens(large, 0) is None
    assert scene.side._first == "large"
    scene.side.matched_tokens(small, 0)
    lookup = scene.side._requests["small"].lookup
    assert lookup is not None
    assert scene.side.stager.wait([lookup], 60)
    assert scene.side.matched_tokens(small, 0) is None, "it fits, but is not the first that waits"
    assert scene.matched(request([99] * 5, "loads nothing"), 0) == 0
    scene.side.finished(first)
    assert scene.side.matched_tokens(small, 0) is None
    scene.side.finished(second)
    assert scene.side.matched_tokens(large, 0) == 16
    assert scene.side.matched_tokens(small, 0) == 8


def test_one_that_waits_alone_may_need_all_there_is(clock: SimulatedClock) -> None:
    scene = Scene(clock, room=1)
    scene.keep(TOKENS)
    assert scene.matched(request(TOKENS), 0) == 16


# Staging


def test_what_is_promised_was_verified_and_stays_until_it_is_loaded(clock: SimulatedClock) -> None:
    scene = Scene(clock, None, 6, batches=2)
    chain = scene.keep(TOKENS[:16])
    scene.keep(TOKENS[:16], group=1)
    new = request(TOKENS)
    assert scene.admit(new) == 16
    plan = scene.run(new, 2, scene.rows)
    assert scene.used == 6
    assert [len(moves.places) for moves in plan.loads] == [4, 2]
    for moves in plan.loads:
        for key, place in zip(moves.keys, moves.places, strict=True):
            assert scene.staged(place) == key[:1] * 16
    assert scene.store.read == chain
    scene.run(new, 1)
    assert scene.used == 6
    scene.run(new, 1)  # the step of the load is known to have ended
    assert scene.used == 0


def test_a_damaged_block_is_not_promised(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    chain = scene.keep(TOKENS)
    scene.store.damaged.add(chain[2])
    assert scene.matched(request(TOKENS), 0) == 8
    assert scene.used == 2
    scene.step({})
    assert scene.counted.failures == ["load.corrupt"]


def test_what_is_not_loaded_is_let_go(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    new = request(TOKENS, "ends while it waits")
    assert scene.matched(new, 0) == 16
    scene.side.finished(new)
    assert scene.used == 0
    other = request(TOKENS, "is given blocks without a load")
    assert scene.matched(other, 0) == 16
    scene.give(other, 0, 0)
    assert scene.used == 0
    short = Scene(clock, min_hit_tokens=100)
    short.keep(TOKENS)
    assert short.matched(request(TOKENS, "too short a hit"), 0) == 0
    assert short.store.read == []
