"""The scheduler side's hits, loads and saves."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import pytest

from tests.ucm.integration.vllm.connector.planner import SIZE, Planner, request
from ucm.integration.vllm.connector.metadata import WeightsReport

if TYPE_CHECKING:
    from ucm.integration.vllm.connector.metadata import BlockMoves

TOKENS = list(range(18))  # four blocks and a half


def moved(moves: list[BlockMoves]) -> list[tuple[bytes, int]]:
    return [pair for found in moves for pair in zip(found.keys, found.block_ids, strict=True)]


def finish_computing(planner: Planner, count: int) -> Any:
    """Compute the first blocks of a request in one step; return the step's plan."""
    new = request(TOKENS)
    planner.admit(new)
    return planner.run(new, count, planner.rows)


# Lookup


def test_a_request_waits_until_its_inputs_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, new = Planner(), request(TOKENS, unread=True)
    planner.keep(TOKENS)
    of = create_autospec(planner.keys.of, side_effect=planner.keys.of)
    monkeypatch.setattr(planner.keys, "of", of)
    assert [planner.side.matched_tokens(new, 0) for _ in range(3)] == [None] * 3
    assert planner.matched(request(TOKENS, "other")) == 16, "no other one waits"
    assert new not in [call.args[0] for call in of.call_args_list]
    new.unread = False  # type: ignore[attr-defined] # as it was made
    assert planner.matched(new) == 16


def test_a_request_that_ends_before_its_inputs_are_hashed_saves_nothing() -> None:
    planner, new = Planner(), request(TOKENS, unread=True)
    assert planner.side.matched_tokens(new, 0) is None
    planner.side.finished(new)
    assert not planner.step({}).late_saves


def test_inputs_of_a_request_that_is_not_cached_are_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, new = Planner(), request(TOKENS)
    planner.side.matched_tokens(new, 0)
    planner.side.exclude(new)
    monkeypatch.setattr(planner.keys, "is_ready", create_autospec(planner.keys.is_ready, side_effect=AssertionError))
    assert planner.side.matched_tokens(new, 0) == 0


def test_vllm_that_asks_once_only_gets_its_answer() -> None:
    """Before 0.10.2: the inputs are hashed while the scheduler waits."""
    planner = Planner(asks_again=False)
    planner.keep(TOKENS)
    assert planner.side.matched_tokens(request(TOKENS, unread=True), 0) == 16


def test_an_idle_engine_waits_for_inputs_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner()
    waited = create_autospec(planner.keys.wait)
    monkeypatch.setattr(planner.keys, "wait", waited)
    planner.side.matched_tokens(request(TOKENS, unread=True), 0)
    assert planner.step({}).idle
    [(seconds,)] = [call.args for call in waited.call_args_list]
    assert 0 < seconds < 0.1


def test_the_whole_blocks_that_the_store_has_are_found() -> None:
    planner = Planner()
    assert planner.matched(request(TOKENS, "none"), 0) == 0
    planner.keep(TOKENS[:8])
    assert planner.matched(request(TOKENS, "two"), 0) == 8
    assert planner.matched(request(TOKENS, "one more"), 4) == 4
    assert planner.matched(request(TOKENS, "as many"), 8) == 0
    assert planner.counted.calls == [(18, 0), (18, 8), (14, 4), (10, 0)]


def test_the_last_token_is_computed() -> None:
    planner = Planner()
    planner.keep(TOKENS)
    assert planner.matched(request(TOKENS[:16], "on the boundary"), 0) == 12
    assert planner.matched(request(TOKENS[:17], "one beyond"), 0) == 16
    assert planner.matched(request(TOKENS[:4], "one block"), 0) == 0
    assert planner.matched(request(TOKENS[:1], "one token"), 0) == 0


def test_a_gap_ends_a_hit() -> None:
    planner = Planner()
    chain = planner.keep(TOKENS)
    planner.store.keys.discard(chain[2])
    assert planner.matched(request(TOKENS, "from the start"), 0) == 8
    assert planner.matched(request(TOKENS, "behind it"), 12) == 4


def test_every_rank_must_have_a_block() -> None:
    planner = Planner(ranks=2)
    planner.keep(TOKENS)
    assert planner.matched(request(TOKENS), 0) == 16
    planner = Planner(ranks=2)
    planner.keep(TOKENS)
    planner.stores[0][1].keys.difference_update(planner.keys.chain(TOKENS, SIZE)[1:])
    assert planner.matched(request(TOKENS, "again"), 0) == 4


@pytest.mark.parametrize(("ratio", "hit"), [(1.0, 16), (0.9, 16), (0.5, 8), (0.1, 0)])
def test_the_share_of_a_request_that_may_come_from_caches(ratio: float, hit: int) -> None:
    planner = Planner(hit_ratio=ratio)
    planner.keep(TOKENS)
    assert planner.matched(request(TOKENS), 0) == hit


def test_short_hits_are_left_alone() -> None:
    planner = Planner(min_hit_tokens=8)
    planner.keep(TOKENS[:8])
    assert planner.matched(request(TOKENS, "long enough"), 0) == 8
    assert planner.matched(request(TOKENS, "too short"), 4) == 0


def test_a_draft_model_computes_the_last_block_of_a_hit() -> None:
    planner = Planner(drops_last_block=True)
    planner.keep(TOKENS[:12])
    assert planner.matched(request(TOKENS), 0) == 8


def test_a_window_that_reaches_back_from_there_is_looked_at_anew() -> None:
    planner = Planner(None, 6, drops_last_block=True)
    planner.keep(TOKENS[:16])
    planner.stores[1][0].keys.update(planner.keys.chain(TOKENS[:16], SIZE)[2:])
    new = request(TOKENS)
    assert planner.matched(new, 0) == 0  # 16 would be possible, but for 12 a block of the window is missing
    assert planner.used == 0
    planner.keep(TOKENS[:16], group=1)
    again = request(TOKENS, "again")
    assert planner.admit(again) == 12
    plan = planner.run(again, 2, planner.rows)
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
    planner = Planner()
    planner.keep(TOKENS)
    assert planner.matched(request(TOKENS, "plain"), 0) == 16
    assert planner.matched(request(TOKENS, "special", **more), 0) == 0


def test_roles() -> None:
    writes, reads = Planner(loads=False), Planner(saves=False)
    writes.keep(TOKENS)
    reads.keep(TOKENS[:8])
    assert writes.matched(request(TOKENS, "writes"), 0) == 0
    new = request(TOKENS, "reads")
    assert reads.admit(new) == 8
    assert reads.run(new, 10, reads.rows).saves == []


def test_what_the_engine_itself_has_is_another_question() -> None:
    planner = Planner()
    planner.keep(TOKENS)
    new = request(TOKENS)
    assert planner.matched(new, 0) == 16
    assert planner.matched(new, 0) == 16
    assert planner.matched(new, 4) == 12
    assert planner.counted.calls == [(18, 16), (14, 12)]
    assert planner.used == 3


# While a lookup is pending


def test_the_outcome_is_asked_for_again() -> None:
    planner = Planner()
    planner.keep(TOKENS)
    planner.store.answers.clear()
    new = request(TOKENS)
    assert planner.side.matched_tokens(new, 0) is None
    assert planner.side.matched_tokens(new, 0) is None
    planner.store.answers.set()
    assert planner.matched(new, 0) == 16
    assert planner.counted.calls == [(18, 16)]


def test_a_request_that_needs_nothing_waits_for_nobody() -> None:
    planner = Planner()
    planner.store.answers.clear()
    assert planner.side.matched_tokens(request(TOKENS, "looked up"), 0) is None
    assert planner.side.matched_tokens(request(TOKENS, "has all"), 16) == 0
    assert planner.side.matched_tokens(request(TOKENS[:4], "short"), 0) == 0
    plan = planner.step({"has all": 2})  # a step with something to do does not wait
    assert not plan.idle
    planner.store.answers.set()


@pytest.mark.parametrize("how", ["aborted", "other blocks", "anew"])
def test_a_lookup_that_nobody_wants_any_more_keeps_nothing(how: str) -> None:
    planner = Planner()
    planner.keep(TOKENS)
    planner.store.answers.clear()
    new = request(TOKENS)
    assert planner.side.matched_tokens(new, 0) is None
    if how == "aborted":
        planner.side.finished(new)
    elif how == "anew":
        planner.side.start_anew()
    else:
        assert planner.side.matched_tokens(new, 12) is None
    planner.store.answers.set()
    if how == "other blocks":
        assert planner.matched(new, 12) == 4
        planner.side.finished(new)
    planner.matched(request([7] * 9, "another that is looked up behind it"), 0)
    assert planner.used == 0


def test_a_preempted_request_is_looked_up_again() -> None:
    planner = Planner()
    planner.keep(TOKENS)
    new = request(TOKENS)
    assert planner.admit(new) == 16
    planner.run(new, 2, planner.rows)
    new.num_computed_tokens, new.num_preemptions = 0, 1
    assert planner.admit(new) == 16
    assert len(moved(planner.run(new, 2, planner.rows).loads)) == 4


def test_an_idle_engine_waits_for_a_lookup_but_not_for_long() -> None:
    planner = Planner()
    planner.keep(TOKENS)
    planner.store.answers.clear()
    new = request(TOKENS)
    assert planner.side.matched_tokens(new, 0) is None
    assert planner.step({}).idle  # returns although the store does not answer
    planner.store.answers.set()
    assert planner.matched(new, 0) == 16


def test_where_vllm_cannot_ask_again_a_lookup_is_waited_for_a_moment() -> None:
    planner = Planner(asks_again=False)
    planner.keep(TOKENS)
    assert planner.side.matched_tokens(request(TOKENS), 0) == 16
    planner.store.answers.clear()
    assert planner.side.matched_tokens(request(TOKENS[::-1], "frozen"), 0) == 0
    planner.store.answers.set()


# Loads


def test_what_was_found_is_loaded_into_the_blocks_behind_the_computed_ones() -> None:
    planner = Planner()
    chain = planner.keep(TOKENS[:12])
    new = request(TOKENS)
    assert planner.admit(new, computed=4, had=[70]) == 8
    plan = planner.run(new, 6, planner.rows)
    blocks = planner.rows[0]
    assert moved(plan.loads) == [(chain[1], blocks[1]), (chain[2], blocks[2])]
    assert moved(plan.saves) == [(planner.keys.chain(TOKENS, SIZE)[3], blocks[3])]
    assert plan.fresh_block_ids == set(blocks[1:])
    assert planner.run(new, 1).loads == []


def test_a_request_may_wait_for_its_load_between_steps() -> None:
    planner = Planner()
    chain = planner.keep(TOKENS[:8])
    new = request(TOKENS)
    assert planner.admit(new) == 8
    first = planner.step({})
    blocks = planner.rows[0]
    assert moved(first.loads) == [(chain[0], blocks[0]), (chain[1], blocks[1])]
    assert first.fresh_block_ids == set(blocks[:2])
    assert first.idle
    planner.side.allocated(new, SimpleNamespace(get_block_ids=lambda: ([],)), 0)
    second = planner.run(new, 10, planner.rows)
    assert second.loads == []
    assert second.fresh_block_ids == set(blocks[2:])
    assert not second.idle


def test_a_load_that_brought_nothing_is_not_tried_again() -> None:
    """vLLM frees the blocks and asks again; a block that always fails would make the request wait for ever."""
    planner = Planner()
    planner.keep(TOKENS)
    new = request(TOKENS)
    assert planner.admit(new) == 16
    planner.step({})
    new.num_computed_tokens = 0
    assert planner.matched(new, 0) == 0
    rows = planner.give(new, 0, 0)
    assert planner.run(new, 18, rows).loads == []
    # Once the request has run, it may be tried again.
    new.num_computed_tokens = 0
    assert planner.matched(new, 0) == 16


def test_several_groups_load_what_each_still_reads() -> None:
    planner = Planner(None, 6)
    chain = planner.keep(TOKENS[:16])
    planner.keep(TOKENS[:16], group=1)
    new = request(TOKENS)
    assert planner.admit(new) == 16
    plan = planner.run(new, 2, planner.rows)
    assert [moves.group for moves in plan.loads] == [0, 1]
    assert plan.loads[0].keys == chain
    assert plan.loads[1].keys == chain[2:]
    assert plan.loads[1].block_ids == planner.rows[1][2:4]


def test_requests_that_load_are_left_room_for_the_rest_of_their_blocks() -> None:
    planner = Planner(room=12)

    def room_for(new: Any) -> int | None:
        planner.side.matched_tokens(new, 0)
        planner.step({})  # its lookup ends
        return planner.side.matched_tokens(new, 0)

    planner.keep(TOKENS)
    first, second = request(TOKENS, "first"), request(TOKENS, "second")
    assert planner.admit(first) == 16  # its 18 tokens and the next ones need six blocks
    assert planner.matched(second, 0) == 16
    third = request(TOKENS, "third")
    planner.give(second, 0, 16)
    assert room_for(third) is None
    # vLLM would stop at it for lack of blocks, and never reach the requests that load.
    assert room_for(request([99] * 18, "finds nothing")) is None
    assert planner.side.matched_tokens(request(TOKENS, "is computed", skip_reading_prefix_cache=True), 0) is None
    planner.step({})
    assert room_for(third) is None
    planner.run(first, 2, [[1, 2, 3, 4, 5]])
    assert planner.matched(third, 0) == 16
    planner.give(third, 0, 16)
    fourth = request(TOKENS, "fourth")
    assert room_for(fourth) is None
    planner.side.finished(second)
    assert planner.matched(fourth, 0) == 16


def test_small_requests_that_load_do_not_keep_a_large_one_waiting_for_ever() -> None:
    planner = Planner(room=12)
    planner.keep(TOKENS)

    def loading(name: str) -> Any:
        new = request(TOKENS[:9], name)  # four blocks
        assert planner.matched(new, 0) == 8
        planner.give(new, 0, 8)
        return new

    first, second = loading("first"), loading("second")
    large, small = request(TOKENS * 2, "large"), request(TOKENS[:9], "small")
    until = time.monotonic() + 60
    while planner.side._first != "large":
        assert planner.side.matched_tokens(large, 0) is None
        assert time.monotonic() < until
    planner.side.matched_tokens(small, 0)
    lookup = planner.side._requests["small"].lookup
    assert lookup is not None
    assert planner.side.stager.wait([lookup], 60)
    assert planner.side.matched_tokens(small, 0) is None, "it fits, but is not the first that waits"
    assert planner.matched(request([99] * 5, "loads nothing"), 0) == 0
    planner.side.finished(first)
    assert planner.side.matched_tokens(small, 0) is None
    planner.side.finished(second)
    assert planner.side.matched_tokens(large, 0) == 16
    assert planner.side.matched_tokens(small, 0) == 8


def test_one_that_waits_alone_may_need_all_there_is() -> None:
    planner = Planner(room=1)
    planner.keep(TOKENS)
    assert planner.matched(request(TOKENS), 0) == 16


# Saves


def test_blocks_are_saved_with_the_step_that_fills_them() -> None:
    planner = Planner()
    new = request(TOKENS)
    planner.admit(new)
    chain, blocks = planner.keys.chain(TOKENS, SIZE), planner.rows[0]
    assert moved(planner.run(new, 6, planner.rows).saves) == [(chain[0], blocks[0])]
    assert moved(planner.run(new, 1).saves) == []
    assert moved(planner.run(new, 9).saves) == list(zip(chain[1:], blocks[1:], strict=False))
    assert moved(planner.run(new, 2).saves) == []


def test_a_token_that_is_not_known_yet_fills_no_block() -> None:
    """Asynchronous scheduling computes tokens before the scheduler knows their values."""
    planner = Planner(batches=2)
    new = request(TOKENS[:7])
    planner.admit(new)
    planner.run(new, 7, planner.rows)
    assert planner.run(new, 1).saves == []
    new.output.append(7)
    key = planner.keys.chain(TOKENS[:8], SIZE)[1]
    assert moved(planner.run(new, 1).saves) == [(key, planner.rows[0][1])]


def test_a_request_that_ends_has_its_last_blocks_saved_later() -> None:
    planner = Planner(batches=2)
    new = request(TOKENS[:7])
    planner.admit(new)
    planner.run(new, 7, planner.rows)
    planner.run(new, 1)
    new.output.append(7)
    planner.side.finished(new)
    key = planner.keys.chain(TOKENS[:8], SIZE)[1]
    assert moved(planner.step({}).late_saves) == [(key, planner.rows[0][1])]
    assert planner.step({}).late_saves == []


def test_but_not_from_a_block_that_was_given_away() -> None:
    planner = Planner(batches=2)
    new = request(TOKENS[:7])
    planner.admit(new)
    planner.run(new, 7, planner.rows)
    planner.run(new, 1)
    new.output.append(7)
    planner.side.finished(new)
    other = request([90, 91], "other")
    assert planner.step({"other": 2}, [(other, [[planner.rows[0][1]]])]).late_saves == []
    assert planner.counted.failures == ["save.other"]


def test_a_block_that_was_given_away_costs_no_other_of_its_request() -> None:
    planner = Planner(batches=2)
    new = request(TOKENS[:12])
    planner.admit(new)
    planner.step({}, [(new, planner.rows)])
    new.num_computed_tokens = 12
    planner.side.finished(new)
    rows, chain = planner.rows[0], planner.keys.chain(TOKENS[:12], SIZE)
    other = request([90, 91], "other")
    late = planner.step({"other": 2}, [(other, [[rows[1]]])]).late_saves
    assert moved(late) == [(chain[0], rows[0]), (chain[2], rows[2])]
    assert planner.counted.failures == ["save.other"]


def test_nothing_is_found_or_saved_until_it_is_known_whose_blocks_these_are() -> None:
    """Blocks computed by then are saved then."""
    planner = Planner(begins=False)
    planner.keep(TOKENS)
    new = request(TOKENS)
    assert planner.admit(new) == 0
    plan = planner.run(new, 10, planner.rows)
    assert (plan.namespace, plan.saves) == ("", [])
    planner.begin()
    plan = planner.run(new, 8)
    assert plan.namespace == "model"
    chain = planner.keys.chain(TOKENS, SIZE)
    assert moved(plan.saves) == list(zip(chain, planner.rows[0], strict=False))
    assert planner.matched(request(TOKENS, "later"), 0) == 16


def test_a_key_is_saved_once_in_a_step() -> None:
    planner = Planner()
    first, second = request(TOKENS, "first"), request(TOKENS, "second")
    rows = {}
    for new in (first, second):
        planner.admit(new)
        rows[new.request_id] = planner.rows
    plan = planner.step({"first": 8, "second": 9}, [(first, rows["first"]), (second, rows["second"])])
    chain = planner.keys.chain(TOKENS, SIZE)
    assert moved(plan.saves) == list(zip(chain[:2], rows["first"][0][:2], strict=True))


def test_generated_tokens_may_be_left_out() -> None:
    planner = Planner(save_decode_blocks=False)
    new = request(TOKENS[:7])
    new.output += TOKENS[7:]
    planner.admit(new)
    chain = planner.keys.chain(TOKENS, SIZE)
    assert moved(planner.run(new, 18, planner.rows).saves) == [(chain[0], planner.rows[0][0])]


def test_tokens_whose_kv_is_their_requests_own_are_neither_stored_nor_looked_up() -> None:
    """For instance tokens generated under a method with dense prompts, even after a preemption."""
    planner = Planner(lasting_tokens=lambda prompt: prompt)
    new = request(TOKENS[:7])
    new.output += TOKENS[7:]
    chain = planner.keep(TOKENS)
    assert planner.admit(new) == SIZE
    planner.store.keys.clear()
    planner = Planner(lasting_tokens=lambda prompt: prompt)
    planner.admit(new)
    assert moved(planner.run(new, 18, planner.rows).saves) == [(chain[0], planner.rows[0][0])]
    planner.side.finished(new)
    assert moved(planner.step({}).late_saves) == []


def test_a_request_without_a_lasting_block_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's hashes of its blocks do not show how those of other requests are made."""
    planner = Planner(lasting_tokens=lambda prompt: prompt)
    new = request(TOKENS[: SIZE - 1])
    planner.admit(new)
    new.output += TOKENS[SIZE - 1 :]
    named = create_autospec(planner.keys.of, return_value=[])
    monkeypatch.setattr(planner.keys, "of", named)
    planner.admit(new)
    planner.run(new, 18, planner.rows)
    named.assert_not_called()


def test_what_the_engine_had_is_saved_if_the_store_has_it_not() -> None:
    planner = Planner()
    chain = planner.keys.chain(TOKENS, SIZE)
    new = request(TOKENS)
    planner.admit(new, computed=8, had=[70, 71])
    assert moved(planner.run(new, 4, planner.rows).saves) == [(chain[2], planner.rows[0][2])]
    until = time.monotonic() + 60
    while not (saves := moved(planner.step({"r": 0}).saves)):
        assert time.monotonic() < until
    assert saves == [(chain[0], 70), (chain[1], 71), (chain[2], planner.rows[0][2])]


def test_what_the_engine_had_is_not_saved_again() -> None:
    planner = Planner()
    chain = planner.keep(TOKENS[:8])
    new = request(TOKENS)
    planner.admit(new, computed=8, had=[70, 71])
    expected = planner.keys.chain(TOKENS, SIZE)[2]
    assert expected not in chain
    assert moved(planner.run(new, 4, planner.rows).saves) == [(expected, planner.rows[0][2])]


def test_what_is_computed_again_is_saved_again() -> None:
    planner = Planner()
    new = request(TOKENS)
    planner.admit(new)
    planner.run(new, 16, planner.rows)
    new.num_computed_tokens = 4  # vLLM resets it after a failed load
    chain, blocks = planner.keys.chain(TOKENS, SIZE), planner.rows[0]
    assert moved(planner.run(new, 8).saves) == [(chain[1], blocks[1]), (chain[2], blocks[2])]


def test_a_window_saves_what_has_not_slid_out_of_it() -> None:
    planner = Planner(None, 6)
    new = request(TOKENS)
    planner.admit(new)
    planner.run(new, 3, planner.rows)
    new.num_computed_tokens = 14
    plan = planner.run(new, 2)
    assert [(moves.group, len(moves.keys)) for moves in plan.saves] == [(0, 4), (1, 2)]


# Staging


def test_what_is_promised_was_verified_and_stays_until_it_is_loaded() -> None:
    planner = Planner(None, 6, batches=2)
    chain = planner.keep(TOKENS[:16])
    planner.keep(TOKENS[:16], group=1)
    new = request(TOKENS)
    assert planner.admit(new) == 16
    plan = planner.run(new, 2, planner.rows)
    assert planner.used == 6
    assert [len(moves.places) for moves in plan.loads] == [4, 2]
    for moves in plan.loads:
        for key, place in zip(moves.keys, moves.places, strict=True):
            assert planner.staged(place) == key[:1] * 16
    assert planner.store.read == chain
    planner.run(new, 1)
    assert planner.used == 6
    planner.run(new, 1)  # the step of the load is known to have ended
    assert planner.used == 0


def test_a_damaged_block_is_not_promised() -> None:
    planner = Planner()
    chain = planner.keep(TOKENS)
    planner.store.damaged.add(chain[2])
    assert planner.matched(request(TOKENS), 0) == 8
    assert planner.used == 2
    planner.step({})
    assert planner.counted.failures == ["load.corrupt"]


def test_what_is_not_loaded_is_let_go() -> None:
    planner = Planner()
    planner.keep(TOKENS)
    new = request(TOKENS, "ends while it waits")
    assert planner.matched(new, 0) == 16
    planner.side.finished(new)
    assert planner.used == 0
    other = request(TOKENS, "is given blocks without a load")
    assert planner.matched(other, 0) == 16
    planner.give(other, 0, 0)
    assert planner.used == 0
    short = Planner(min_hit_tokens=100)
    short.keep(TOKENS)
    assert short.matched(request(TOKENS, "too short a hit"), 0) == 0
    assert short.store.read == []


# Starting anew


def test_what_was_computed_before_is_not_saved_under_new_names() -> None:
    planner = Planner(batches=2)
    running, ended, waiting = request(TOKENS, "running"), request(TOKENS[:8], "ended"), request(TOKENS, "waiting")
    planner.admit(running)
    planner.run(running, 6, planner.rows)
    planner.admit(ended)
    planner.run(ended, 7, planner.rows)
    ended.num_computed_tokens = 8
    planner.side.finished(ended)
    assert planner.matched(waiting, 0) == 0
    planner.side.start_anew()
    plan = planner.run(running, 12)
    assert plan.saves == []
    assert plan.late_saves == []
    planner.admit(waiting)
    assert len(moved(planner.run(waiting, 18, planner.rows).saves)) == 4


def test_what_was_found_before_is_not_loaded() -> None:
    planner = Planner()
    planner.keep(TOKENS)
    waiting, loading = request(TOKENS, "waiting"), request(TOKENS, "loading")
    assert planner.matched(waiting, 0) == 16
    assert planner.admit(loading) == 16
    planner.step({})
    planner.step({})
    planner.store.keys.clear()  # nothing is stored under the new keys
    planner.side.start_anew()
    assert planner.used == 0
    assert planner.matched(waiting, 0) == 0
    assert planner.run(loading, 2, planner.rows).saves == []


# Adapters


def adapted(tokens: list[int], adapter: str) -> Any:
    return request(tokens, adapter=adapter)


@pytest.mark.parametrize("batches", [1, 2])
def test_blocks_of_an_adapter_are_saved_when_the_engine_has_surely_read_what_was_hashed(batches: int) -> None:
    """The engine reads an adapter's files in the request's first step, after its keys were computed."""
    planner = Planner(batches=batches)
    new = adapted(TOKENS, "same")
    planner.admit(new)
    assert planner.run(new, 9, planner.rows).saves == []
    for _ in range(batches - 1):
        assert planner.run(new, 1).saves == []
    chain = planner.keys.chain(TOKENS, SIZE)
    saved = moved(planner.run(new, 1).saves)
    assert saved == list(zip(chain[:2], planner.rows[0], strict=False))


def test_blocks_of_an_adapter_that_changed_before_the_engine_read_it_are_never_saved() -> None:
    planner = Planner()
    new = adapted(TOKENS, "same")
    planner.admit(new)
    assert planner.run(new, 9, planner.rows).saves == []
    new.adapter = "changed"
    assert planner.run(new, 8).saves == []
    new.adapter = "same"
    assert planner.run(new, 1).saves == []
    planner.side.finished(new)
    assert planner.step({}).late_saves == []


@pytest.mark.parametrize(("adapter", "count"), [("same", 4), ("changed", 0)])
def test_blocks_of_an_adapters_request_that_ends_early(adapter: str, count: int) -> None:
    planner = Planner()
    new = adapted(TOKENS, adapter)
    planner.admit(new)
    assert planner.run(new, 18, planner.rows).saves == []
    planner.side.finished(new)
    assert len(moved(planner.step({}).late_saves)) == count


def test_what_another_connector_has_loaded_is_not_saved_nor_found_again_in_vllms_cache() -> None:
    planner = Planner(others=True)
    foreign, behind, resumed = (request(TOKENS, name) for name in ("foreign", "behind", "resumed"))
    planner.admit(foreign)
    foreign.num_computed_tokens = SIZE
    assert planner.run(foreign, 14, planner.rows).saves == []
    for later in (behind, resumed):
        planner.admit(later, SIZE)
        assert planner.run(later, 14, planner.rows).saves == []
    planner.side.finished(behind)
    planner.side.finished(resumed)
    assert planner.step({}).late_saves == []
    planner.side.forget_others()
    planner.admit(behind, SIZE)
    assert len(moved(planner.run(behind, 14, planner.rows).saves)) > 0


def test_what_is_computed_is_saved_though_another_connector_has_loaded_it_elsewhere() -> None:
    planner = Planner(others=True)
    foreign, computed = request(TOKENS, "foreign"), request(TOKENS, "computed")
    planner.admit(foreign)
    foreign.num_computed_tokens = SIZE
    planner.run(foreign, 14, planner.rows)
    planner.admit(computed)
    assert len(moved(planner.run(computed, 18, planner.rows).saves)) == 4


def test_what_we_have_loaded_is_no_other_connectors() -> None:
    planner = Planner(others=True)
    planner.keep(TOKENS[:SIZE])
    new = request(TOKENS)
    assert planner.admit(new) == SIZE
    assert len(moved(planner.run(new, 14, planner.rows).saves)) == 3


def test_after_new_names_nothing_in_vllms_cache_is_known_to_be_ours() -> None:
    planner = Planner(others=True)
    foreign, other = request(TOKENS, "foreign"), request([*range(50, 70)], "other")
    planner.admit(foreign)
    foreign.num_computed_tokens = SIZE
    planner.run(foreign, 14, planner.rows)
    planner.side.start_anew()
    planner.admit(other, SIZE)
    assert planner.run(other, 16, planner.rows).saves == []


def test_nothing_more_is_saved_or_found_for_an_adapter_that_was_replaced_in_place() -> None:
    """A running request continues with other weights, and its later blocks depend on the earlier KV."""
    planner = Planner()
    planner.keep(TOKENS)
    new, waiting = adapted(TOKENS, "same"), adapted(TOKENS, "same")
    new.lora_request, waiting.request_id = SimpleNamespace(lora_int_id=7), "waiting"
    planner.admit(new)
    loads = planner.run(new, 1, planner.rows).loads
    assert [moves.adapter for moves in loads] == [7]
    planner.store.keys.clear()
    assert planner.matched(waiting) == 16
    new.adapter = waiting.adapter = "replaced"
    assert planner.matched(waiting) == 0
    new.output += [1] * 8
    assert planner.run(new, 8).saves == []
    planner.side.finished(new)
    assert planner.step({}).late_saves == []


# Weights that were changed in place


def test_workers_look_at_all_weights_once_they_are_in_doubt() -> None:
    planner = Planner()
    assert [planner.step({}).verify for _ in range(2)] == [False, False]
    planner.side.doubt(waits=False)
    assert [planner.step({}).verify for _ in range(2)] == [True, False]


def test_promises_that_cannot_be_broken_wait_for_that() -> None:
    planner = Planner()
    planner.keep(TOKENS)
    planner.side.doubt(waits=True)
    assert planner.side.matched_tokens(request(TOKENS), 0) is None
    assert planner.step({}).verify
    assert not planner.side.reported(WeightsReport(looked=0))
    assert planner.side.matched_tokens(request(TOKENS), 0) is None
    assert not planner.side.reported(WeightsReport(looked=1))
    assert planner.matched(request(TOKENS), 0) == 16


def test_each_start_anew_is_another_epoch_and_news_of_an_old_one_starts_nothing() -> None:
    planner = Planner()
    assert planner.step({}).epoch == 0
    assert planner.side.reported(WeightsReport(changed=0))
    planner.side.start_anew()
    assert planner.step({}).epoch == 1
    assert not planner.side.reported(WeightsReport(changed=0))
    assert planner.side.reported(WeightsReport(changed=1))


def test_a_step_is_confirmed_when_all_ranks_have_looked_and_seen_nothing() -> None:
    planner = Planner(confirms=True)
    assert planner.step({}).confirmed == 0
    planner.side.reported(WeightsReport(looked=1))
    assert planner.step({}).confirmed == 1
    planner.side.reported(WeightsReport(changed=0, looked=2))
    assert planner.step({}).confirmed == 1
    assert Planner().step({}).confirmed is None


@pytest.mark.parametrize("others", [0, 3])
def test_a_save_says_which_step_was_the_last_to_compute_of_it(others: int) -> None:
    """The saves of an ended request do not wait for later steps of other requests."""
    planner = Planner(batches=2)
    new = request(TOKENS[:7])
    planner.admit(new)
    assert [moves.step for moves in planner.run(new, 7, planner.rows).saves] == [1]
    planner.run(new, 1)
    new.output.append(7)
    for _ in range(others):
        planner.step({})
    planner.side.finished(new)
    assert [moves.step for moves in planner.step({}).late_saves] == [2]
