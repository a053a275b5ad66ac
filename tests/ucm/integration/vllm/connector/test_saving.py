"""The scheduler side's saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import create_autospec

from tests.simulated import begin_span
from tests.ucm.integration.vllm.connector.scene import SIZE, TOKENS, Scene, moved, request
from tests.ucm.integration.vllm.connector.simulation.truth import STATE

if TYPE_CHECKING:
    import pytest

    from tests.clock import SimulatedClock


def test_blocks_are_saved_with_the_step_that_fills_them(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    new = request(TOKENS)
    scene.admit(new)
    chain, blocks = scene.keys.chain(TOKENS, SIZE), scene.rows[0]
    assert moved(scene.run(new, 6, scene.rows).saves) == [(chain[0], blocks[0])]
    assert moved(scene.run(new, 1).saves) == []
    assert moved(scene.run(new, 9).saves) == list(zip(chain[1:], blocks[1:], strict=False))
    assert moved(scene.run(new, 2).saves) == []


def test_a_token_that_is_not_known_yet_fills_no_block(clock: SimulatedClock) -> None:
    """Asynchronous scheduling computes tokens before the scheduler knows their values."""
    scene = Scene(clock, batches=2)
    new = scene.run_ahead()
    new.output.append(7)
    key = scene.keys.chain(TOKENS[:8], SIZE)[1]
    assert moved(scene.run(new, 1).saves) == [(key, scene.rows[0][1])]


def test_a_request_that_ends_has_its_last_blocks_saved_later(clock: SimulatedClock) -> None:
    scene = Scene(clock, batches=2)
    new = scene.run_ahead()
    new.output.append(7)
    scene.side.finished(new)
    key = scene.keys.chain(TOKENS[:8], SIZE)[1]
    assert moved(scene.step({}).late_saves) == [(key, scene.rows[0][1])]
    assert scene.step({}).late_saves == []


def test_but_not_from_a_block_that_was_given_away(clock: SimulatedClock) -> None:
    scene = Scene(clock, batches=2)
    new = scene.run_ahead()
    new.output.append(7)
    scene.side.finished(new)
    other = request([90, 91], "other")
    assert scene.step({"other": 2}, [(other, [[scene.rows[0][1]]])]).late_saves == []
    assert scene.counted.failures == ["save.other"]


def test_a_block_that_was_given_away_costs_no_other_of_its_request(clock: SimulatedClock) -> None:
    scene = Scene(clock, batches=2)
    new = request(TOKENS[:12])
    scene.admit(new)
    scene.step({}, [(new, scene.rows)])
    new.num_computed_tokens = 12
    scene.side.finished(new)
    rows, chain = scene.rows[0], scene.keys.chain(TOKENS[:12], SIZE)
    other = request([90, 91], "other")
    late = scene.step({"other": 2}, [(other, [[rows[1]]])]).late_saves
    assert moved(late) == [(chain[0], rows[0]), (chain[2], rows[2])]
    assert late[0].depths == [SIZE, 3 * SIZE]
    assert scene.counted.failures == ["save.other"]


def test_nothing_is_found_or_saved_until_it_is_known_whose_blocks_these_are(clock: SimulatedClock) -> None:
    """Blocks computed by then are saved then."""
    scene = Scene(clock, begins=False)
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


def test_a_key_is_saved_once_in_a_step(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    first, second = request(TOKENS, "first"), request(TOKENS, "second")
    rows = {}
    for new in (first, second):
        scene.admit(new)
        rows[new.request_id] = scene.rows
    plan = scene.step({"first": 8, "second": 9}, [(first, rows["first"]), (second, rows["second"])])
    chain = scene.keys.chain(TOKENS, SIZE)
    assert moved(plan.saves) == list(zip(chain[:2], rows["first"][0][:2], strict=True))


def test_generated_tokens_may_be_left_out(clock: SimulatedClock) -> None:
    scene = Scene(clock, save_decode_blocks=False)
    new = request(TOKENS[:7])
    new.output += TOKENS[7:]
    scene.admit(new)
    chain = scene.keys.chain(TOKENS, SIZE)
    assert moved(scene.run(new, 18, scene.rows).saves) == [(chain[0], scene.rows[0][0])]


def test_tokens_whose_kv_is_their_requests_own_are_neither_stored_nor_looked_up(clock: SimulatedClock) -> None:
    """For instance tokens generated under a method with dense prompts, even after a preemption."""
    scene = Scene(clock, lasting_tokens=lambda prompt: prompt)
    new = request(TOKENS[:7])
    new.output += TOKENS[7:]
    chain = scene.keep(TOKENS)
    assert scene.admit(new) == SIZE
    scene.store.keys.clear()
    scene = Scene(clock, lasting_tokens=lambda prompt: prompt)
    scene.admit(new)
    assert moved(scene.run(new, 18, scene.rows).saves) == [(chain[0], scene.rows[0][0])]
    scene.side.finished(new)
    assert moved(scene.step({}).late_saves) == []


def test_a_request_without_a_lasting_block_is_not_named(clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's hashes of its blocks do not show how those of other requests are made."""
    scene = Scene(clock, lasting_tokens=lambda prompt: prompt)
    new = request(TOKENS[: SIZE - 1])
    scene.admit(new)
    new.output += TOKENS[SIZE - 1 :]
    named = create_autospec(scene.keys.of, return_value=[])
    monkeypatch.setattr(scene.keys, "of", named)
    scene.admit(new)
    scene.run(new, 18, scene.rows)
    named.assert_not_called()


def test_what_the_engine_had_is_saved_if_the_store_has_it_not(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    chain = scene.keys.chain(TOKENS, SIZE)
    new = request(TOKENS)
    scene.admit(new, computed=8, had=[70, 71])
    assert moved(scene.run(new, 4, scene.rows).saves) == [(chain[2], scene.rows[0][2])]
    clock.run_until_idle()
    assert moved(scene.step({"r": 0}).saves) == [(chain[0], 70), (chain[1], 71), (chain[2], scene.rows[0][2])]


def test_a_prefix_with_a_gap_is_saved_from_the_gap_on(clock: SimulatedClock) -> None:
    """Its last block alone does not show what was evicted before it."""
    scene = Scene(clock)
    chain = scene.keep(TOKENS[:12])
    scene.store.keys.discard(chain[1])
    new = request(TOKENS)
    scene.admit(new, computed=12, had=[70, 71, 72])
    scene.run(new, 4, scene.rows)
    clock.run_until_idle()
    assert moved(scene.step({"r": 0}).saves)[:2] == [(chain[1], 71), (chain[2], 72)]


def test_what_the_engine_had_and_what_it_loads_is_renewed_as_a_whole(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    chain = scene.keep(TOKENS)
    scene.admit(request(TOKENS), computed=8, had=[70, 71])
    clock.run_until_idle()
    assert scene.store.renewed == [chain]
    assert scene.store.depths == [SIZE * (block + 1) for block in range(len(chain))], "in tokens"


def test_an_engine_that_saves_nothing_renews_what_it_uses_and_asks_for_no_block_that_it_had(
    clock: SimulatedClock,
) -> None:
    """A decode engine's own cache may have what a store lost; others may save that again, so the rest stays."""
    scene = Scene(clock, saves=False)
    chain = scene.keep(TOKENS)
    scene.store.keys.discard(chain[1])
    new = request(TOKENS)
    scene.admit(new, computed=8, had=[70, 71])
    asked = scene.store.lookups
    clock.run_until_idle()
    assert scene.store.renewed == [chain]
    assert scene.store.lookups == asked
    assert moved(scene.run(new, 4, scene.rows).saves) == []


def test_a_chain_that_grows_for_long_is_renewed_in_each_span(clock: SimulatedClock) -> None:
    scene = Scene(clock, touch_seconds=60.0)
    begin_span(clock, 60.0)
    new = request(TOKENS)
    chain = scene.keep(TOKENS[:8])
    scene.admit(new, computed=8, had=[70, 71])
    scene.run(new, 4, scene.rows)
    clock.run_until_idle()
    assert scene.store.renewed == [chain[:2]]
    new.num_computed_tokens = 12
    clock.advance(60.0)
    scene.step({"r": 4})
    clock.run_until_idle()
    assert scene.store.renewed == [chain[:2], scene.keys.chain(TOKENS, SIZE)[:3]]


def test_what_the_engine_had_is_not_saved_again(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    chain = scene.keep(TOKENS[:8])
    new = request(TOKENS)
    scene.admit(new, computed=8, had=[70, 71])
    expected = scene.keys.chain(TOKENS, SIZE)[2]
    assert expected not in chain
    assert moved(scene.run(new, 4, scene.rows).saves) == [(expected, scene.rows[0][2])]


def test_what_is_computed_again_is_saved_again(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    new = request(TOKENS)
    scene.admit(new)
    scene.run(new, 16, scene.rows)
    new.num_computed_tokens = 4  # vLLM resets it after a failed load
    chain, blocks = scene.keys.chain(TOKENS, SIZE), scene.rows[0]
    assert moved(scene.run(new, 8).saves) == [(chain[1], blocks[1]), (chain[2], blocks[2])]


def test_a_window_saves_what_has_not_slid_out_of_it(clock: SimulatedClock) -> None:
    scene = Scene(clock, None, 6)
    new = request(TOKENS)
    scene.admit(new)
    scene.run(new, 3, scene.rows)
    new.num_computed_tokens = 14
    plan = scene.run(new, 2)
    assert [(moves.group, len(moves.keys)) for moves in plan.saves] == [(0, 4), (1, 2)]


# States of recurrent layers


def test_the_states_that_vllm_keeps_are_saved(clock: SimulatedClock) -> None:
    """Each from the block that vLLM names, whatever the request's list of blocks says."""
    scene = Scene(clock, None, STATE)
    new = request(TOKENS)
    scene.admit(new)
    chain = scene.keys.chain(TOKENS, SIZE)
    plan = scene.run(new, 16, scene.rows, [(1, 77, 16)])
    assert [(moves.group, len(moves.keys)) for moves in plan.saves] == [(0, 4), (1, 1)]
    state = plan.saves[1]
    assert (state.keys, state.block_ids, state.depths) == ([chain[3]], [77], [16])
    assert not scene.run(new, 1, None, [(1, 78, 17)]).saves  # within a block


def test_a_state_that_vllm_has_or_that_was_loaded_is_not_saved_again(clock: SimulatedClock) -> None:
    scene = Scene(clock, None, STATE)
    for group in (0, 1):
        scene.keep(TOKENS[:12], group)
    new = request(TOKENS)
    assert scene.admit(new, computed=4, had=[70]) == 8
    scene.step({})
    told = [(1, 77, 4), (1, 78, 12), (1, 79, 16)]
    plan = scene.run(new, 4, scene.rows, told)
    assert [(moves.group, moves.block_ids) for moves in plan.saves if moves.group] == [(1, [79])]


def test_a_state_is_saved_later_if_it_may_not_be_saved_yet(clock: SimulatedClock) -> None:
    """Its block keeps it until vLLM writes the block, which may be long after the request's next step."""
    scene = Scene(clock, None, STATE)
    new = request(TOKENS, adapter="same")  # the engine reads the adapter's files in the first step
    scene.admit(new)
    assert not scene.run(new, 8, scene.rows, [(1, 77, 8)]).saves
    saves = scene.run(new, 8, None, [(1, 78, 16)]).saves
    chain = scene.keys.chain(TOKENS, SIZE)
    assert [(moves.keys, moves.block_ids) for moves in saves if moves.group] == [([chain[1]], [77]), ([chain[3]], [78])]
    assert not [moves for moves in scene.run(new, 1).saves if moves.group]


def test_a_state_of_a_request_that_ends_before_it_may_be_saved(clock: SimulatedClock) -> None:
    scene = Scene(clock, None, STATE)
    new = request(TOKENS, adapter="same")
    scene.admit(new)
    scene.run(new, 16, scene.rows, [(1, 77, 16)])
    scene.side.finished(new)
    assert [moves.block_ids for moves in scene.step({}).late_saves if moves.group] == [[77]]


def test_a_state_whose_block_was_written_before_it_could_be_saved_is_lost(clock: SimulatedClock) -> None:
    scene = Scene(clock, None, STATE, batches=2)
    new = request(TOKENS, adapter="same")
    scene.admit(new)
    scene.run(new, 8, scene.rows, [(1, 77, 8)])
    scene.step({}, new_block_ids_to_zero=[77])
    saves = scene.run(new, 8, None, [(1, 78, 16)]).saves
    assert [moves.block_ids for moves in saves if moves.group] == [[78]]


def test_a_state_that_another_connector_may_have_overwritten_is_lost(clock: SimulatedClock) -> None:
    """Nobody says which blocks it loads into."""
    scene = Scene(clock, None, STATE, others=True)
    new = request(TOKENS, adapter="same")
    scene.admit(new)
    scene.run(new, 8, scene.rows, [(1, 77, 8)])
    saves = scene.run(new, 8, None, [(1, 78, 16)]).saves
    assert [moves.block_ids for moves in saves if moves.group] == [[78]]


def test_states_are_saved_when_the_namespace_becomes_known(clock: SimulatedClock) -> None:
    scene = Scene(clock, None, STATE, begins=False)
    new = request(TOKENS)
    scene.admit(new)
    assert not scene.run(new, 8, scene.rows, [(1, 77, 8)]).saves
    scene.side.namespace = "model"
    saves = scene.run(new, 8, None, [(1, 78, 16)]).saves
    assert [moves.block_ids for moves in saves if moves.group] == [[77], [78]]


def test_of_generated_tokens_no_state_is_saved_if_their_blocks_are_not(clock: SimulatedClock) -> None:
    scene = Scene(clock, None, STATE, save_decode_blocks=False)
    new = request(TOKENS[:8])
    scene.admit(new)
    assert [moves.group for moves in scene.run(new, 8, scene.rows, [(1, 77, 8)]).saves] == [0, 1]
    new.output.append(3)
    for token in (1, 2, 4):
        scene.run(new, 1)
        new.output.append(token)
    assert not scene.run(new, 1, None, [(1, 78, 12)]).saves


def test_a_state_is_saved_once_per_step(clock: SimulatedClock) -> None:
    scene = Scene(clock, None, STATE)
    one, two = request(TOKENS, "a"), request(TOKENS, "b")
    admitted = []
    for new in (one, two):
        scene.admit(new)
        admitted.append((new, scene.rows))
    told = SimpleNamespace(boundary_state_offloads={one.request_id: [(1, 77, 16)], two.request_id: [(1, 78, 16)]})
    plan = scene.step({one.request_id: 16, two.request_id: 16}, admitted, kv_connector_block_state=told)
    assert [moves.block_ids for moves in plan.saves if moves.group] == [[77]]


def test_blocks_that_vllm_prepares_ahead_of_a_step_are_written_by_it(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    copies = [SimpleNamespace(src_block_id=5, dst_block_id=6)]
    plan = scene.step({}, new_block_ids_to_zero=[7], kv_cache_block_copies=copies)
    assert plan.fresh_block_ids == {6, 7}
