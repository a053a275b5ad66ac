"""The scheduler side's hits, loads and saves."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

from tests.ucm.integration.vllm.connector.scene import SIZE, Scene, request
from ucm.integration.vllm.connector.metadata import WeightsReport

if TYPE_CHECKING:
    from ucm.integration.vllm.connector.metadata import BlockMoves

TOKENS = list(range(18))  # four blocks and a half


def moved(moves: list[BlockMoves]) -> list[tuple[bytes, int]]:
    return [pair for found in moves for pair in zip(found.keys, found.block_ids, strict=True)]


def finish_computing(scene: Scene, count: int) -> Any:
    """Compute the first blocks of a request in one step; return the step's plan."""
    new = request(TOKENS)
    scene.admit(new)
    return scene.run(new, count, scene.rows)


# Lookup


def test_a_request_waits_until_its_inputs_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, new = Scene(), request(TOKENS, unread=True)
    scene.keep(TOKENS)
    of = create_autospec(scene.keys.of, side_effect=scene.keys.of)
    monkeypatch.setattr(scene.keys, "of", of)
    assert [scene.side.matched_tokens(new, 0) for _ in range(3)] == [None] * 3
    assert scene.matched(request(TOKENS, "other")) == 16, "no other one waits"
    assert new not in [call.args[0] for call in of.call_args_list]
    new.unread = False  # type: ignore[attr-defined] # as it was made
    assert scene.matched(new) == 16


def test_a_request_that_ends_before_its_inputs_are_hashed_saves_nothing() -> None:
    scene, new = Scene(), request(TOKENS, unread=True)
    assert scene.side.matched_tokens(new, 0) is None
    scene.side.finished(new)
    assert not scene.step({}).late_saves


def test_inputs_of_a_request_that_is_not_cached_are_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, new = Scene(), request(TOKENS)
    scene.side.matched_tokens(new, 0)
    scene.side.exclude(new)
    monkeypatch.setattr(scene.keys, "is_ready", create_autospec(scene.keys.is_ready, side_effect=AssertionError))
    assert scene.side.matched_tokens(new, 0) == 0


def test_vllm_that_asks_once_only_gets_its_answer() -> None:
    """Before 0.10.2: the inputs are hashed while the scheduler waits."""
    scene = Scene(asks_again=False)
    scene.keep(TOKENS)
    assert scene.side.matched_tokens(request(TOKENS, unread=True), 0) == 16


def test_an_idle_engine_waits_for_inputs_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    waited = create_autospec(scene.keys.wait)
    monkeypatch.setattr(scene.keys, "wait", waited)
    scene.side.matched_tokens(request(TOKENS, unread=True), 0)
    assert scene.step({}).idle
    [(seconds,)] = [call.args for call in waited.call_args_list]
    assert 0 < seconds < 0.1


def test_the_whole_blocks_that_the_store_has_are_found() -> None:
    scene = Scene()
    assert scene.matched(request(TOKENS, "none"), 0) == 0
    scene.keep(TOKENS[:8])
    assert scene.matched(request(TOKENS, "two"), 0) == 8
    assert scene.matched(request(TOKENS, "one more"), 4) == 4
    assert scene.matched(request(TOKENS, "as many"), 8) == 0
    assert scene.counted.calls == [(18, 0), (18, 8), (14, 4), (10, 0)]


def test_the_last_token_is_computed() -> None:
    scene = Scene()
    scene.keep(TOKENS)
    assert scene.matched(request(TOKENS[:16], "on the boundary"), 0) == 12
    assert scene.matched(request(TOKENS[:17], "one beyond"), 0) == 16
    assert scene.matched(request(TOKENS[:4], "one block"), 0) == 0
    assert scene.matched(request(TOKENS[:1], "one token"), 0) == 0


def test_a_gap_ends_a_hit() -> None:
    scene = Scene()
    chain = scene.keep(TOKENS)
    scene.store.keys.discard(chain[2])
    assert scene.matched(request(TOKENS, "from the start"), 0) == 8
    assert scene.matched(request(TOKENS, "behind it"), 12) == 4


def test_every_rank_must_have_a_block() -> None:
    scene = Scene(ranks=2)
    scene.keep(TOKENS)
    assert scene.matched(request(TOKENS), 0) == 16
    scene = Scene(ranks=2)
    scene.keep(TOKENS)
    scene.stores[0][1].keys.difference_update(scene.keys.chain(TOKENS, SIZE)[1:])
    assert scene.matched(request(TOKENS, "again"), 0) == 4


@pytest.mark.parametrize(("ratio", "hit"), [(1.0, 16), (0.9, 16), (0.5, 8), (0.1, 0)])
def test_the_share_of_a_request_that_may_come_from_caches(ratio: float, hit: int) -> None:
    scene = Scene(hit_ratio=ratio)
    scene.keep(TOKENS)
    assert scene.matched(request(TOKENS), 0) == hit


def test_short_hits_are_left_alone() -> None:
    scene = Scene(min_hit_tokens=8)
    scene.keep(TOKENS[:8])
    assert scene.matched(request(TOKENS, "long enough"), 0) == 8
    assert scene.matched(request(TOKENS, "too short"), 4) == 0


def test_a_draft_model_computes_the_last_block_of_a_hit() -> None:
    scene = Scene(drops_last_block=True)
    scene.keep(TOKENS[:12])
    assert scene.matched(request(TOKENS), 0) == 8


def test_a_window_that_reaches_back_from_there_is_looked_at_anew() -> None:
    scene = Scene(None, 6, drops_last_block=True)
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
def test_requests_whose_every_token_must_be_computed(more: dict[str, Any]) -> None:
    scene = Scene()
    scene.keep(TOKENS)
    assert scene.matched(request(TOKENS, "plain"), 0) == 16
    assert scene.matched(request(TOKENS, "special", **more), 0) == 0


def test_roles() -> None:
    writes, reads = Scene(loads=False), Scene(saves=False)
    writes.keep(TOKENS)
    reads.keep(TOKENS[:8])
    assert writes.matched(request(TOKENS, "writes"), 0) == 0
    new = request(TOKENS, "reads")
    assert reads.admit(new) == 8
    assert reads.run(new, 10, reads.rows).saves == []


def test_what_the_engine_itself_has_is_another_question() -> None:
    scene = Scene()
    scene.keep(TOKENS)
    new = request(TOKENS)
    assert scene.matched(new, 0) == 16
    assert scene.matched(new, 0) == 16
    assert scene.matched(new, 4) == 12
    assert scene.counted.calls == [(18, 16), (14, 12)]
    assert scene.used == 3


# While a lookup is pending


def test_the_outcome_is_asked_for_again() -> None:
    scene = Scene()
    scene.keep(TOKENS)
    scene.store.answers.clear()
    new = request(TOKENS)
    assert scene.side.matched_tokens(new, 0) is None
    assert scene.side.matched_tokens(new, 0) is None
    scene.store.answers.set()
    assert scene.matched(new, 0) == 16
    assert scene.counted.calls == [(18, 16)]


def test_a_request_that_needs_nothing_waits_for_nobody() -> None:
    scene = Scene()
    scene.store.answers.clear()
    assert scene.side.matched_tokens(request(TOKENS, "looked up"), 0) is None
    assert scene.side.matched_tokens(request(TOKENS, "has all"), 16) == 0
    assert scene.side.matched_tokens(request(TOKENS[:4], "short"), 0) == 0
    plan = scene.step({"has all": 2})  # a step with something to do does not wait
    assert not plan.idle
    scene.store.answers.set()


@pytest.mark.parametrize("how", ["aborted", "other blocks", "anew"])
def test_a_lookup_that_nobody_wants_any_more_keeps_nothing(how: str) -> None:
    scene = Scene()
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


def test_a_preempted_request_is_looked_up_again() -> None:
    scene = Scene()
    scene.keep(TOKENS)
    new = request(TOKENS)
    assert scene.admit(new) == 16
    scene.run(new, 2, scene.rows)
    new.num_computed_tokens, new.num_preemptions = 0, 1
    assert scene.admit(new) == 16
    assert len(moved(scene.run(new, 2, scene.rows).loads)) == 4


def test_an_idle_engine_waits_for_a_lookup_but_not_for_long() -> None:
    scene = Scene()
    scene.keep(TOKENS)
    scene.store.answers.clear()
    new = request(TOKENS)
    assert scene.side.matched_tokens(new, 0) is None
    assert scene.step({}).idle  # returns although the store does not answer
    scene.store.answers.set()
    assert scene.matched(new, 0) == 16


def test_where_vllm_cannot_ask_again_a_lookup_is_waited_for_a_moment() -> None:
    scene = Scene(asks_again=False)
    scene.keep(TOKENS)
    assert scene.side.matched_tokens(request(TOKENS), 0) == 16
    scene.store.answers.clear()
    assert scene.side.matched_tokens(request(TOKENS[::-1], "frozen"), 0) == 0
    scene.store.answers.set()


# Loads


def test_what_was_found_is_loaded_into_the_blocks_behind_the_computed_ones() -> None:
    scene = Scene()
    chain = scene.keep(TOKENS[:12])
    new = request(TOKENS)
    assert scene.admit(new, computed=4, had=[70]) == 8
    plan = scene.run(new, 6, scene.rows)
    blocks = scene.rows[0]
    assert moved(plan.loads) == [(chain[1], blocks[1]), (chain[2], blocks[2])]
    assert moved(plan.saves) == [(scene.keys.chain(TOKENS, SIZE)[3], blocks[3])]
    assert plan.fresh_block_ids == set(blocks[1:])
    assert scene.run(new, 1).loads == []


def test_a_request_may_wait_for_its_load_between_steps() -> None:
    scene = Scene()
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


def test_a_load_that_brought_nothing_is_not_tried_again() -> None:
    """vLLM frees the blocks and asks again; a block that always fails would make the request wait for ever."""
    scene = Scene()
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


def test_several_groups_load_what_each_still_reads() -> None:
    scene = Scene(None, 6)
    chain = scene.keep(TOKENS[:16])
    scene.keep(TOKENS[:16], group=1)
    new = request(TOKENS)
    assert scene.admit(new) == 16
    plan = scene.run(new, 2, scene.rows)
    assert [moves.group for moves in plan.loads] == [0, 1]
    assert plan.loads[0].keys == chain
    assert plan.loads[1].keys == chain[2:]
    assert plan.loads[1].block_ids == scene.rows[1][2:4]


def test_requests_that_load_are_left_room_for_the_rest_of_their_blocks() -> None:
    scene = Scene(room=12)

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


def test_small_requests_that_load_do_not_keep_a_large_one_waiting_for_ever() -> None:
    scene = Scene(room=12)
    scene.keep(TOKENS)

    def loading(name: str) -> Any:
        new = request(TOKENS[:9], name)  # four blocks
        assert scene.matched(new, 0) == 8
        scene.give(new, 0, 8)
        return new

    first, second = loading("first"), loading("second")
    large, small = request(TOKENS * 2, "large"), request(TOKENS[:9], "small")
    until = time.monotonic() + 60
    while scene.side._first != "large":
        assert scene.side.matched_tokens(large, 0) is None
        assert time.monotonic() < until
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


def test_one_that_waits_alone_may_need_all_there_is() -> None:
    scene = Scene(room=1)
    scene.keep(TOKENS)
    assert scene.matched(request(TOKENS), 0) == 16


# Saves


def test_blocks_are_saved_with_the_step_that_fills_them() -> None:
    scene = Scene()
    new = request(TOKENS)
    scene.admit(new)
    chain, blocks = scene.keys.chain(TOKENS, SIZE), scene.rows[0]
    assert moved(scene.run(new, 6, scene.rows).saves) == [(chain[0], blocks[0])]
    assert moved(scene.run(new, 1).saves) == []
    assert moved(scene.run(new, 9).saves) == list(zip(chain[1:], blocks[1:], strict=False))
    assert moved(scene.run(new, 2).saves) == []


def test_a_token_that_is_not_known_yet_fills_no_block() -> None:
    """Asynchronous scheduling computes tokens before the scheduler knows their values."""
    scene = Scene(batches=2)
    new = request(TOKENS[:7])
    scene.admit(new)
    scene.run(new, 7, scene.rows)
    assert scene.run(new, 1).saves == []
    new.output.append(7)
    key = scene.keys.chain(TOKENS[:8], SIZE)[1]
    assert moved(scene.run(new, 1).saves) == [(key, scene.rows[0][1])]


def test_a_request_that_ends_has_its_last_blocks_saved_later() -> None:
    scene = Scene(batches=2)
    new = request(TOKENS[:7])
    scene.admit(new)
    scene.run(new, 7, scene.rows)
    scene.run(new, 1)
    new.output.append(7)
    scene.side.finished(new)
    key = scene.keys.chain(TOKENS[:8], SIZE)[1]
    assert moved(scene.step({}).late_saves) == [(key, scene.rows[0][1])]
    assert scene.step({}).late_saves == []


def test_but_not_from_a_block_that_was_given_away() -> None:
    scene = Scene(batches=2)
    new = request(TOKENS[:7])
    scene.admit(new)
    scene.run(new, 7, scene.rows)
    scene.run(new, 1)
    new.output.append(7)
    scene.side.finished(new)
    other = request([90, 91], "other")
    assert scene.step({"other": 2}, [(other, [[scene.rows[0][1]]])]).late_saves == []
    assert scene.counted.failures == ["save.other"]


def test_a_block_that_was_given_away_costs_no_other_of_its_request() -> None:
    scene = Scene(batches=2)
    new = request(TOKENS[:12])
    scene.admit(new)
    scene.step({}, [(new, scene.rows)])
    new.num_computed_tokens = 12
    scene.side.finished(new)
    rows, chain = scene.rows[0], scene.keys.chain(TOKENS[:12], SIZE)
    other = request([90, 91], "other")
    late = scene.step({"other": 2}, [(other, [[rows[1]]])]).late_saves
    assert moved(late) == [(chain[0], rows[0]), (chain[2], rows[2])]
    assert scene.counted.failures == ["save.other"]


def test_nothing_is_found_or_saved_until_it_is_known_whose_blocks_these_are() -> None:
    """Blocks computed by then are saved then."""
    scene = Scene(begins=False)
    scene.keep(TOKENS)
    new = request(TOKENS)
    assert scene.admit(new) == 0
    plan = scene.run(new, 10, scene.rows)
    assert (plan.namespace, plan.saves) == ("", [])
    scene.begin()
    plan = scene.run(new, 8)
    assert plan.namespace == "model"
    chain = scene.keys.chain(TOKENS, SIZE)
    assert moved(plan.saves) == list(zip(chain, scene.rows[0], strict=False))
    assert scene.matched(request(TOKENS, "later"), 0) == 16


def test_a_key_is_saved_once_in_a_step() -> None:
    scene = Scene()
    first, second = request(TOKENS, "first"), request(TOKENS, "second")
    rows = {}
    for new in (first, second):
        scene.admit(new)
        rows[new.request_id] = scene.rows
    plan = scene.step({"first": 8, "second": 9}, [(first, rows["first"]), (second, rows["second"])])
    chain = scene.keys.chain(TOKENS, SIZE)
    assert moved(plan.saves) == list(zip(chain[:2], rows["first"][0][:2], strict=True))


def test_generated_tokens_may_be_left_out() -> None:
    scene = Scene(save_decode_blocks=False)
    new = request(TOKENS[:7])
    new.output += TOKENS[7:]
    scene.admit(new)
    chain = scene.keys.chain(TOKENS, SIZE)
    assert moved(scene.run(new, 18, scene.rows).saves) == [(chain[0], scene.rows[0][0])]


def test_tokens_whose_kv_is_their_requests_own_are_neither_stored_nor_looked_up() -> None:
    """For instance tokens generated under a method with dense prompts, even after a preemption."""
    scene = Scene(lasting_tokens=lambda prompt: prompt)
    new = request(TOKENS[:7])
    new.output += TOKENS[7:]
    chain = scene.keep(TOKENS)
    assert scene.admit(new) == SIZE
    scene.store.keys.clear()
    scene = Scene(lasting_tokens=lambda prompt: prompt)
    scene.admit(new)
    assert moved(scene.run(new, 18, scene.rows).saves) == [(chain[0], scene.rows[0][0])]
    scene.side.finished(new)
    assert moved(scene.step({}).late_saves) == []


def test_a_request_without_a_lasting_block_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's hashes of its blocks do not show how those of other requests are made."""
    scene = Scene(lasting_tokens=lambda prompt: prompt)
    new = request(TOKENS[: SIZE - 1])
    scene.admit(new)
    new.output += TOKENS[SIZE - 1 :]
    named = create_autospec(scene.keys.of, return_value=[])
    monkeypatch.setattr(scene.keys, "of", named)
    scene.admit(new)
    scene.run(new, 18, scene.rows)
    named.assert_not_called()


def test_what_the_engine_had_is_saved_if_the_store_has_it_not() -> None:
    scene = Scene()
    chain = scene.keys.chain(TOKENS, SIZE)
    new = request(TOKENS)
    scene.admit(new, computed=8, had=[70, 71])
    assert moved(scene.run(new, 4, scene.rows).saves) == [(chain[2], scene.rows[0][2])]
    until = time.monotonic() + 60
    while not (saves := moved(scene.step({"r": 0}).saves)):
        assert time.monotonic() < until
    assert saves == [(chain[0], 70), (chain[1], 71), (chain[2], scene.rows[0][2])]


def test_what_the_engine_had_is_not_saved_again() -> None:
    scene = Scene()
    chain = scene.keep(TOKENS[:8])
    new = request(TOKENS)
    scene.admit(new, computed=8, had=[70, 71])
    expected = scene.keys.chain(TOKENS, SIZE)[2]
    assert expected not in chain
    assert moved(scene.run(new, 4, scene.rows).saves) == [(expected, scene.rows[0][2])]


def test_what_is_computed_again_is_saved_again() -> None:
    scene = Scene()
    new = request(TOKENS)
    scene.admit(new)
    scene.run(new, 16, scene.rows)
    new.num_computed_tokens = 4  # vLLM resets it after a failed load
    chain, blocks = scene.keys.chain(TOKENS, SIZE), scene.rows[0]
    assert moved(scene.run(new, 8).saves) == [(chain[1], blocks[1]), (chain[2], blocks[2])]


def test_a_window_saves_what_has_not_slid_out_of_it() -> None:
    scene = Scene(None, 6)
    new = request(TOKENS)
    scene.admit(new)
    scene.run(new, 3, scene.rows)
    new.num_computed_tokens = 14
    plan = scene.run(new, 2)
    assert [(moves.group, len(moves.keys)) for moves in plan.saves] == [(0, 4), (1, 2)]


# Staging


def test_what_is_promised_was_verified_and_stays_until_it_is_loaded() -> None:
    scene = Scene(None, 6, batches=2)
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


def test_a_damaged_block_is_not_promised() -> None:
    scene = Scene()
    chain = scene.keep(TOKENS)
    scene.store.damaged.add(chain[2])
    assert scene.matched(request(TOKENS), 0) == 8
    assert scene.used == 2
    scene.step({})
    assert scene.counted.failures == ["load.corrupt"]


def test_what_is_not_loaded_is_let_go() -> None:
    scene = Scene()
    scene.keep(TOKENS)
    new = request(TOKENS, "ends while it waits")
    assert scene.matched(new, 0) == 16
    scene.side.finished(new)
    assert scene.used == 0
    other = request(TOKENS, "is given blocks without a load")
    assert scene.matched(other, 0) == 16
    scene.give(other, 0, 0)
    assert scene.used == 0
    short = Scene(min_hit_tokens=100)
    short.keep(TOKENS)
    assert short.matched(request(TOKENS, "too short a hit"), 0) == 0
    assert short.store.read == []


# Starting anew


def test_what_was_computed_before_is_not_saved_under_new_names() -> None:
    scene = Scene(batches=2)
    running, ended, waiting = request(TOKENS, "running"), request(TOKENS[:8], "ended"), request(TOKENS, "waiting")
    scene.admit(running)
    scene.run(running, 6, scene.rows)
    scene.admit(ended)
    scene.run(ended, 7, scene.rows)
    ended.num_computed_tokens = 8
    scene.side.finished(ended)
    assert scene.matched(waiting, 0) == 0
    scene.side.start_anew()
    plan = scene.run(running, 12)
    assert plan.saves == []
    assert plan.late_saves == []
    scene.admit(waiting)
    assert len(moved(scene.run(waiting, 18, scene.rows).saves)) == 4


def test_what_was_found_before_is_not_loaded() -> None:
    scene = Scene()
    scene.keep(TOKENS)
    waiting, loading = request(TOKENS, "waiting"), request(TOKENS, "loading")
    assert scene.matched(waiting, 0) == 16
    assert scene.admit(loading) == 16
    scene.step({})
    scene.step({})
    scene.store.keys.clear()  # nothing is stored under the new keys
    scene.side.start_anew()
    assert scene.used == 0
    assert scene.matched(waiting, 0) == 0
    assert scene.run(loading, 2, scene.rows).saves == []


# Adapters


def adapted(tokens: list[int], adapter: str) -> Any:
    return request(tokens, adapter=adapter)


@pytest.mark.parametrize("batches", [1, 2])
def test_blocks_of_an_adapter_are_saved_when_the_engine_has_surely_read_what_was_hashed(batches: int) -> None:
    """The engine reads an adapter's files in the request's first step, after its keys were computed."""
    scene = Scene(batches=batches)
    new = adapted(TOKENS, "same")
    scene.admit(new)
    assert scene.run(new, 9, scene.rows).saves == []
    for _ in range(batches - 1):
        assert scene.run(new, 1).saves == []
    chain = scene.keys.chain(TOKENS, SIZE)
    saved = moved(scene.run(new, 1).saves)
    assert saved == list(zip(chain[:2], scene.rows[0], strict=False))


def test_blocks_of_an_adapter_that_changed_before_the_engine_read_it_are_never_saved() -> None:
    scene = Scene()
    new = adapted(TOKENS, "same")
    scene.admit(new)
    assert scene.run(new, 9, scene.rows).saves == []
    new.adapter = "changed"
    assert scene.run(new, 8).saves == []
    new.adapter = "same"
    assert scene.run(new, 1).saves == []
    scene.side.finished(new)
    assert scene.step({}).late_saves == []


@pytest.mark.parametrize(("adapter", "count"), [("same", 4), ("changed", 0)])
def test_blocks_of_an_adapters_request_that_ends_early(adapter: str, count: int) -> None:
    scene = Scene()
    new = adapted(TOKENS, adapter)
    scene.admit(new)
    assert scene.run(new, 18, scene.rows).saves == []
    scene.side.finished(new)
    assert len(moved(scene.step({}).late_saves)) == count


def test_what_another_connector_has_loaded_is_not_saved_nor_found_again_in_vllms_cache() -> None:
    scene = Scene(others=True)
    foreign, behind, resumed = (request(TOKENS, name) for name in ("foreign", "behind", "resumed"))
    scene.admit(foreign)
    foreign.num_computed_tokens = SIZE
    assert scene.run(foreign, 14, scene.rows).saves == []
    for later in (behind, resumed):
        scene.admit(later, SIZE)
        assert scene.run(later, 14, scene.rows).saves == []
    scene.side.finished(behind)
    scene.side.finished(resumed)
    assert scene.step({}).late_saves == []
    scene.side.forget_others()
    scene.admit(behind, SIZE)
    assert len(moved(scene.run(behind, 14, scene.rows).saves)) > 0


def test_what_is_computed_is_saved_though_another_connector_has_loaded_it_elsewhere() -> None:
    scene = Scene(others=True)
    foreign, computed = request(TOKENS, "foreign"), request(TOKENS, "computed")
    scene.admit(foreign)
    foreign.num_computed_tokens = SIZE
    scene.run(foreign, 14, scene.rows)
    scene.admit(computed)
    assert len(moved(scene.run(computed, 18, scene.rows).saves)) == 4


def test_what_we_have_loaded_is_no_other_connectors() -> None:
    scene = Scene(others=True)
    scene.keep(TOKENS[:SIZE])
    new = request(TOKENS)
    assert scene.admit(new) == SIZE
    assert len(moved(scene.run(new, 14, scene.rows).saves)) == 3


def test_after_new_names_nothing_in_vllms_cache_is_known_to_be_ours() -> None:
    scene = Scene(others=True)
    foreign, other = request(TOKENS, "foreign"), request([*range(50, 70)], "other")
    scene.admit(foreign)
    foreign.num_computed_tokens = SIZE
    scene.run(foreign, 14, scene.rows)
    scene.side.start_anew()
    scene.admit(other, SIZE)
    assert scene.run(other, 16, scene.rows).saves == []


def test_nothing_more_is_saved_or_found_for_an_adapter_that_was_replaced_in_place() -> None:
    """A running request continues with other weights, and its later blocks depend on the earlier KV."""
    scene = Scene()
    scene.keep(TOKENS)
    new, waiting = adapted(TOKENS, "same"), adapted(TOKENS, "same")
    new.lora_request, waiting.request_id = SimpleNamespace(lora_int_id=7), "waiting"
    scene.admit(new)
    loads = scene.run(new, 1, scene.rows).loads
    assert [moves.adapter for moves in loads] == [7]
    scene.store.keys.clear()
    assert scene.matched(waiting) == 16
    new.adapter = waiting.adapter = "replaced"
    assert scene.matched(waiting) == 0
    new.output += [1] * 8
    assert scene.run(new, 8).saves == []
    scene.side.finished(new)
    assert scene.step({}).late_saves == []


# Weights that were changed in place


def test_workers_look_at_all_weights_once_they_are_in_doubt() -> None:
    scene = Scene()
    assert [scene.step({}).verify for _ in range(2)] == [False, False]
    scene.side.doubt(waits=False)
    assert [scene.step({}).verify for _ in range(2)] == [True, False]


def test_promises_that_cannot_be_broken_wait_for_that() -> None:
    scene = Scene()
    scene.keep(TOKENS)
    scene.side.doubt(waits=True)
    assert scene.side.matched_tokens(request(TOKENS), 0) is None
    assert scene.step({}).verify
    assert not scene.side.reported(WeightsReport(looked=0))
    assert scene.side.matched_tokens(request(TOKENS), 0) is None
    assert not scene.side.reported(WeightsReport(looked=1))
    assert scene.matched(request(TOKENS), 0) == 16


def test_each_start_anew_is_another_epoch_and_news_of_an_old_one_starts_nothing() -> None:
    scene = Scene()
    assert scene.step({}).epoch == 0
    assert scene.side.reported(WeightsReport(changed=0))
    scene.side.start_anew()
    assert scene.step({}).epoch == 1
    assert not scene.side.reported(WeightsReport(changed=0))
    assert scene.side.reported(WeightsReport(changed=1))


def test_a_step_is_confirmed_when_all_ranks_have_looked_and_seen_nothing() -> None:
    scene = Scene(confirms=True)
    assert scene.step({}).confirmed == 0
    scene.side.reported(WeightsReport(looked=1))
    assert scene.step({}).confirmed == 1
    scene.side.reported(WeightsReport(changed=0, looked=2))
    assert scene.step({}).confirmed == 1
    assert Scene().step({}).confirmed is None


@pytest.mark.parametrize("others", [0, 3])
def test_a_save_says_which_step_was_the_last_to_compute_of_it(others: int) -> None:
    """The saves of an ended request do not wait for later steps of other requests."""
    scene = Scene(batches=2)
    new = request(TOKENS[:7])
    scene.admit(new)
    assert [moves.step for moves in scene.run(new, 7, scene.rows).saves] == [1]
    scene.run(new, 1)
    new.output.append(7)
    for _ in range(others):
        scene.step({})
    scene.side.finished(new)
    assert [moves.step for moves in scene.step({}).late_saves] == [2]
