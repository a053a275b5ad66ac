"""What the scheduler's side finds, and what it has loaded and dumped."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.integration.vllm.connector.planner import SIZE, Planner, request
from ucm.integration.vllm.connector import scheduler
from ucm.integration.vllm.connector.holding import BlockHolder

if TYPE_CHECKING:
    from ucm.integration.vllm.connector.metadata import BlockMoves

TOKENS = list(range(18))  # four blocks and a half


def moved(moves: list[BlockMoves]) -> list[tuple[bytes, int]]:
    return [pair for found in moves for pair in zip(found.keys, found.block_ids, strict=True)]


def finish_computing(planner: Planner, count: int) -> Any:
    """A request whose first blocks were computed in one step; returns the step's plan."""
    new = request(TOKENS)
    planner.admit(new)
    return planner.run(new, count, planner.rows)


# Lookup


def test_the_whole_blocks_that_the_store_has_are_found() -> None:
    planner = Planner()
    assert planner.side.matched_tokens(request(TOKENS, "none"), 0) == 0
    planner.keep(TOKENS[:8])
    assert planner.side.matched_tokens(request(TOKENS, "two"), 0) == 8
    assert planner.side.matched_tokens(request(TOKENS, "one more"), 4) == 4
    assert planner.side.matched_tokens(request(TOKENS, "as many"), 8) == 0
    assert planner.counted.calls == [(18, 0), (18, 8), (14, 4), (10, 0)]


def test_the_last_token_is_computed() -> None:
    planner = Planner()
    planner.keep(TOKENS)
    assert planner.side.matched_tokens(request(TOKENS[:16], "on the boundary"), 0) == 12
    assert planner.side.matched_tokens(request(TOKENS[:17], "one beyond"), 0) == 16
    assert planner.side.matched_tokens(request(TOKENS[:4], "one block"), 0) == 0
    assert planner.side.matched_tokens(request(TOKENS[:1], "one token"), 0) == 0


def test_a_gap_ends_a_hit() -> None:
    planner = Planner()
    chain = planner.keep(TOKENS)
    planner.store.keys.discard(chain[2])
    assert planner.side.matched_tokens(request(TOKENS, "from the start"), 0) == 8
    assert planner.side.matched_tokens(request(TOKENS, "behind it"), 12) == 4


def test_every_rank_must_have_a_block() -> None:
    planner = Planner()
    second = type(planner.store)()
    planner.stores[0].append(second)
    second.keys.update(planner.keep(TOKENS)[:3])
    assert planner.side.matched_tokens(request(TOKENS), 0) == 16
    second.keys.difference_update(planner.keys.chain(TOKENS, SIZE)[1:])
    assert planner.side.matched_tokens(request(TOKENS, "again"), 0) == 4


@pytest.mark.parametrize(("ratio", "hit"), [(1.0, 16), (0.9, 16), (0.5, 8), (0.1, 0)])
def test_the_share_of_a_request_that_may_come_from_caches(ratio: float, hit: int) -> None:
    planner = Planner(hit_ratio=ratio)
    planner.keep(TOKENS)
    assert planner.side.matched_tokens(request(TOKENS), 0) == hit


def test_short_hits_are_left_alone() -> None:
    planner = Planner(min_hit_tokens=8)
    planner.keep(TOKENS[:8])
    assert planner.side.matched_tokens(request(TOKENS, "long enough"), 0) == 8
    assert planner.side.matched_tokens(request(TOKENS, "too short"), 4) == 0


def test_a_draft_model_computes_the_last_block_of_a_hit() -> None:
    planner = Planner(drops_last_block=True)
    planner.keep(TOKENS[:12])
    assert planner.side.matched_tokens(request(TOKENS), 0) == 8


def test_a_window_that_reaches_back_from_there_is_looked_at_anew() -> None:
    planner = Planner(None, 6, drops_last_block=True, holder=BlockHolder)
    planner.keep(TOKENS[:16])
    planner.stores[1][0].keys.update(planner.keys.chain(TOKENS[:16], SIZE)[2:])
    new = request(TOKENS)
    assert planner.side.matched_tokens(new, 0) == 0  # 16 would do, for 12 a block of the window is missing
    assert not planner.store.leased
    planner.keep(TOKENS[:16], group=1)
    again = request(TOKENS, "again")
    assert planner.admit(again) == 12
    plan = planner.run(again, 2, planner.rows)
    assert [len(moves.keys) for moves in plan.loads] == [3, 2]
    assert set(plan.loads[1].keys) <= planner.stores[1][0].leased[plan.loads[1].leases[0]]


@pytest.mark.parametrize(
    "more",
    [
        {"sampling_params": SimpleNamespace(prompt_logprobs=0)},
        {"skip_reading_prefix_cache": True},
        {"pooling_params": SimpleNamespace()},  # a release that does not say what the pooler needs
        {"resumable": True},
    ],
    ids=str,
)
def test_requests_whose_every_token_must_be_computed(more: dict[str, Any]) -> None:
    planner = Planner()
    planner.keep(TOKENS)
    assert planner.side.matched_tokens(request(TOKENS, "plain"), 0) == 16
    assert planner.side.matched_tokens(request(TOKENS, "special", **more), 0) == 0


def test_roles() -> None:
    writes, reads = Planner(loads=False), Planner(saves=False)
    writes.keep(TOKENS)
    reads.keep(TOKENS[:8])
    assert writes.side.matched_tokens(request(TOKENS, "writes"), 0) == 0
    new = request(TOKENS, "reads")
    assert reads.admit(new) == 8
    assert reads.run(new, 10, reads.rows).dumps == []


def test_a_request_that_waits_is_looked_up_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    planner = Planner()
    new = request(TOKENS)
    assert planner.side.matched_tokens(new, 0) == 0
    asked = planner.store.lookups
    planner.keep(TOKENS)
    now += scheduler.LOOKUP_KEEPS / 2
    assert planner.side.matched_tokens(new, 0) == 0
    assert planner.store.lookups == asked
    now += scheduler.LOOKUP_KEEPS
    assert planner.side.matched_tokens(new, 0) == 16
    now += scheduler.LOOKUP_KEEPS / 2
    assert planner.side.matched_tokens(new, 4) == 12  # what the engine itself has is another question


# Loads


def test_what_was_found_is_loaded_into_the_blocks_behind_the_computed_ones() -> None:
    planner = Planner()
    chain = planner.keep(TOKENS[:12])
    new = request(TOKENS)
    assert planner.admit(new, computed=4, had=[70]) == 8
    plan = planner.run(new, 6, planner.rows)
    blocks = planner.rows[0]
    assert moved(plan.loads) == [(chain[1], blocks[1]), (chain[2], blocks[2])]
    assert moved(plan.dumps) == [(planner.keys.chain(TOKENS, SIZE)[3], blocks[3])]
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
    """vLLM frees the blocks and asks again; a block that always fails would keep the request waiting for ever."""
    planner = Planner()
    planner.keep(TOKENS)
    new = request(TOKENS)
    assert planner.admit(new) == 16
    planner.step({})
    new.num_computed_tokens = 0
    assert planner.side.matched_tokens(new, 0) == 0
    rows = planner.give(new, 0, 0)
    assert planner.run(new, 18, rows).loads == []
    # Once it was started, another try is another matter.
    new.num_computed_tokens = 0
    assert planner.side.matched_tokens(new, 0) == 16


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


def test_requests_that_wait_for_loads_are_left_room_for_the_rest_of_their_blocks() -> None:
    planner = Planner(room=12)
    planner.keep(TOKENS)
    first, second = request(TOKENS, "first"), request(TOKENS, "second")
    assert planner.admit(first) == 16  # its 18 tokens and the next ones need six blocks
    assert planner.side.matched_tokens(second, 0) == 16
    third = request(TOKENS, "third")
    planner.give(second, 0, 16)
    assert planner.side.matched_tokens(third, 0) is None
    assert planner.side.matched_tokens(request([99] * 18, "finds nothing"), 0) == 0
    planner.step({})
    assert planner.side.matched_tokens(third, 0) is None
    planner.run(first, 2, [[1, 2, 3, 4, 5]])
    assert planner.side.matched_tokens(third, 0) == 16
    planner.give(third, 0, 16)
    fourth = request(TOKENS, "fourth")
    assert planner.side.matched_tokens(fourth, 0) is None
    planner.side.finished(second)
    assert planner.side.matched_tokens(fourth, 0) == 16


def test_one_that_waits_alone_may_need_all_there_is() -> None:
    planner = Planner(room=1)
    planner.keep(TOKENS)
    assert planner.side.matched_tokens(request(TOKENS), 0) == 16


# Dumps


def test_blocks_are_dumped_with_the_step_that_fills_them() -> None:
    planner = Planner()
    new = request(TOKENS)
    planner.admit(new)
    chain, blocks = planner.keys.chain(TOKENS, SIZE), planner.rows[0]
    assert moved(planner.run(new, 6, planner.rows).dumps) == [(chain[0], blocks[0])]
    assert moved(planner.run(new, 1).dumps) == []
    assert moved(planner.run(new, 9).dumps) == list(zip(chain[1:], blocks[1:], strict=False))
    assert moved(planner.run(new, 2).dumps) == []


def test_a_token_that_is_not_known_yet_fills_no_block() -> None:
    """Asynchronous scheduling computes tokens before their values are known here."""
    planner = Planner(batches=2)
    new = request(TOKENS[:7])
    planner.admit(new)
    planner.run(new, 7, planner.rows)
    assert planner.run(new, 1).dumps == []
    new.output.append(7)
    key = planner.keys.chain(TOKENS[:8], SIZE)[1]
    assert moved(planner.run(new, 1).dumps) == [(key, planner.rows[0][1])]


def test_a_request_that_ends_has_its_last_blocks_dumped_later() -> None:
    planner = Planner(batches=2)
    new = request(TOKENS[:7])
    planner.admit(new)
    planner.run(new, 7, planner.rows)
    planner.run(new, 1)
    new.output.append(7)
    planner.side.finished(new)
    key = planner.keys.chain(TOKENS[:8], SIZE)[1]
    assert moved(planner.step({}).late_dumps) == [(key, planner.rows[0][1])]
    assert planner.step({}).late_dumps == []


def test_but_not_from_a_block_that_was_given_away() -> None:
    planner = Planner(batches=2)
    new = request(TOKENS[:7])
    planner.admit(new)
    planner.run(new, 7, planner.rows)
    planner.run(new, 1)
    new.output.append(7)
    planner.side.finished(new)
    other = request([90, 91], "other")
    assert planner.step({"other": 2}, [(other, [[planner.rows[0][1]]])]).late_dumps == []


def test_a_key_is_dumped_once_in_a_step() -> None:
    planner = Planner()
    first, second = request(TOKENS, "first"), request(TOKENS, "second")
    rows = {}
    for new in (first, second):
        planner.admit(new)
        rows[new.request_id] = planner.rows
    plan = planner.step({"first": 8, "second": 9}, [(first, rows["first"]), (second, rows["second"])])
    chain = planner.keys.chain(TOKENS, SIZE)
    assert moved(plan.dumps) == list(zip(chain[:2], rows["first"][0][:2], strict=True))


def test_generated_tokens_may_be_left_out() -> None:
    planner = Planner(save_decode_blocks=False)
    new = request(TOKENS[:7])
    new.output += TOKENS[7:]
    planner.admit(new)
    chain = planner.keys.chain(TOKENS, SIZE)
    assert moved(planner.run(new, 18, planner.rows).dumps) == [(chain[0], planner.rows[0][0])]


def test_what_the_engine_had_is_dumped_if_the_store_has_it_not() -> None:
    planner = Planner()
    chain = planner.keys.chain(TOKENS, SIZE)
    new = request(TOKENS)
    planner.admit(new, computed=8, had=[70, 71])
    assert moved(planner.run(new, 4, planner.rows).dumps) == [
        (chain[0], 70),
        (chain[1], 71),
        (chain[2], planner.rows[0][2]),
    ]


def test_what_the_engine_had_is_not_dumped_again() -> None:
    planner = Planner()
    chain = planner.keep(TOKENS[:8])
    new = request(TOKENS)
    planner.admit(new, computed=8, had=[70, 71])
    expected = planner.keys.chain(TOKENS, SIZE)[2]
    assert expected not in chain
    assert moved(planner.run(new, 4, planner.rows).dumps) == [(expected, planner.rows[0][2])]


def test_what_is_computed_again_is_dumped_again() -> None:
    planner = Planner()
    new = request(TOKENS)
    planner.admit(new)
    planner.run(new, 16, planner.rows)
    new.num_computed_tokens = 4  # vLLM takes it back after a failed load
    chain, blocks = planner.keys.chain(TOKENS, SIZE), planner.rows[0]
    assert moved(planner.run(new, 8).dumps) == [(chain[1], blocks[1]), (chain[2], blocks[2])]


def test_a_window_dumps_what_has_not_slid_out_of_it() -> None:
    planner = Planner(None, 6)
    new = request(TOKENS)
    planner.admit(new)
    planner.run(new, 3, planner.rows)
    new.num_computed_tokens = 14
    plan = planner.run(new, 2)
    assert [(moves.group, len(moves.keys)) for moves in plan.dumps] == [(0, 4), (1, 2)]


# Failures


def test_a_failed_load_makes_the_steps_until_now_void() -> None:
    planner = Planner()
    assert finish_computing(planner, 6).void == 0
    planner.side.load_failed({planner.rows[0][0]})
    plan = planner.step({})
    assert plan.void == 1
    assert plan.settled == 1


def test_what_is_behind_a_failed_block_is_told() -> None:
    planner = Planner()
    first, second = request(TOKENS, "first"), request(TOKENS, "second")
    planner.admit(first)
    planner.run(first, 18, [[1, 2, 3, 4, 5]])
    planner.admit(second)
    planner.run(second, 18, [[1, 2, 8, 9, 10]])
    assert planner.side.load_failed({2}) == {2, 3, 4, 5, 8, 9, 10}
    assert planner.side.load_failed({9}) == {9, 10}
    assert planner.side.load_failed({77}) == {77}


# Holding


def test_what_is_promised_was_verified_and_stays_until_it_is_loaded() -> None:
    planner = Planner(None, 6, holder=BlockHolder, batches=2)
    planner.keep(TOKENS[:16])
    planner.keep(TOKENS[:16], group=1)
    new = request(TOKENS)
    assert planner.admit(new) == 16
    leases = {group: dict(stores[0].leased) for group, stores in planner.stores.items()}
    plan = planner.run(new, 2, planner.rows)
    for moves in plan.loads:
        assert set(moves.keys) == leases[moves.group][moves.leases[0]]
    planner.run(new, 1)
    assert all(stores[0].leased for stores in planner.stores.values())
    planner.run(new, 1)  # the step of the load is known to have ended
    assert not any(stores[0].leased for stores in planner.stores.values())


def test_a_damaged_block_is_not_promised() -> None:
    planner = Planner(holder=BlockHolder)
    chain = planner.keep(TOKENS)
    planner.store.damaged.add(chain[2])
    assert planner.side.matched_tokens(request(TOKENS), 0) == 8
    (held,) = planner.store.leased.values()
    assert held == set(chain[:2])


def test_what_is_not_loaded_is_let_go() -> None:
    planner = Planner(holder=BlockHolder)
    planner.keep(TOKENS)
    new = request(TOKENS, "ends while it waits")
    assert planner.side.matched_tokens(new, 0) == 16
    planner.side.finished(new)
    assert not planner.store.leased
    other = request(TOKENS, "is given blocks without a load")
    assert planner.side.matched_tokens(other, 0) == 16
    planner.give(other, 0, 0)
    assert not planner.store.leased
    short = Planner(holder=BlockHolder, min_hit_tokens=100)
    short.keep(TOKENS)
    assert short.side.matched_tokens(request(TOKENS, "too short a hit"), 0) == 0
    assert not short.store.leased


# Starting anew


def test_what_was_computed_before_is_not_dumped_under_new_names() -> None:
    planner = Planner(batches=2)
    running, ended, waiting = request(TOKENS, "running"), request(TOKENS[:8], "ended"), request(TOKENS, "waiting")
    planner.admit(running)
    planner.run(running, 6, planner.rows)
    planner.admit(ended)
    planner.run(ended, 7, planner.rows)
    ended.num_computed_tokens = 8
    planner.side.finished(ended)
    assert planner.side.matched_tokens(waiting, 0) == 0
    planner.side.start_anew()
    plan = planner.run(running, 12)
    assert plan.dumps == []
    assert plan.late_dumps == []
    planner.admit(waiting)
    assert len(moved(planner.run(waiting, 18, planner.rows).dumps)) == 4


def test_what_was_found_before_is_not_loaded() -> None:
    planner = Planner(holder=BlockHolder)
    planner.keep(TOKENS)
    waiting, loading = request(TOKENS, "waiting"), request(TOKENS, "loading")
    assert planner.side.matched_tokens(waiting, 0) == 16
    assert planner.admit(loading) == 16
    planner.step({})
    planner.step({})
    planner.store.keys.clear()  # under the new names there is nothing
    planner.side.start_anew()
    assert not planner.store.leased
    assert planner.side.matched_tokens(waiting, 0) == 0
    assert planner.run(loading, 2, planner.rows).dumps == []
