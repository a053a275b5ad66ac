"""Blocks that a store has lost are saved again only from where the request still has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ucm.integration.vllm.connector.scene import SIZE, TOKENS, Scene, moved, request
from tests.ucm.integration.vllm.connector.simulation.truth import STATE

if TYPE_CHECKING:
    from tests.clock import SimulatedClock


def test_blocks_that_a_preempted_request_had_are_not_saved_when_its_load_is_aborted(clock: SimulatedClock) -> None:
    """The store lost a block that vLLM still has; other requests may have got the blocks of before."""
    scene, new = Scene(clock), request(TOKENS)
    chain = scene.keep(TOKENS)
    scene.admit(new)
    scene.run(new, 2, scene.rows)
    new.num_computed_tokens, new.num_preemptions = 0, 1
    scene.store.keys.discard(chain[1])
    assert scene.admit(new, 2 * SIZE, scene.fresh(2)) == 2 * SIZE
    assert len(moved(scene.step({}).loads)) == 2
    clock.run_until(lambda: bool(scene.stager._answers))
    scene.step({})
    scene.side.finished(new)
    assert scene.step({}).late_saves == []


def test_a_block_that_a_method_may_have_freed_is_not_saved(clock: SimulatedClock) -> None:
    """A method frees blocks of a running request, and vLLM gives them to others; no connector is told."""
    scene, new, other = Scene(clock, frees_blocks=True), request(TOKENS), request(range(100, 104), "other")
    had = scene.fresh(4)
    scene.admit(new, 4 * SIZE, had)
    scene.run(new, 2, scene.rows)
    clock.run_until(lambda: bool(scene.stager._answers))  # the store has none of the four
    scene.matched(other)
    plan = scene.step({"r": 1, "other": 4}, [(other, [[had[1]]])])
    assert [block for _, block in moved(plan.saves)] == [had[1]]
    [(key, _)] = moved(plan.saves)
    assert key == scene.keys.chain(range(100, 104), SIZE)[0]


def test_a_method_that_frees_blocks_saves_what_a_step_fills(clock: SimulatedClock) -> None:
    scene, new = Scene(clock, frees_blocks=True), request(TOKENS)
    scene.admit(new)
    assert len(moved(scene.run(new, 6, scene.rows).saves)) == 1
    assert len(moved(scene.run(new, 12).saves)) == 3


@pytest.mark.parametrize("case", ["lost", "kept", "overwritten", "within a block"])
def test_a_state_that_vllm_has_and_the_store_lost_is_saved_again(clock: SimulatedClock, case: str) -> None:
    """From the block with which the request begins, as long as vLLM has not written it."""
    scene, new = Scene(clock, None, STATE), request(TOKENS)
    computed, had = 4 * SIZE - (case == "within a block"), scene.fresh(4)
    chain = scene.keep(TOKENS, group=0)
    if case == "kept":
        scene.keep(TOKENS, group=1)
    scene.admit(new, computed, had)
    assert not [moves for moves in scene.run(new, 1, scene.rows).saves if moves.group]
    clock.run_until_idle()
    assert len(scene.stager._answers) == (case in {"lost", "overwritten"})
    if case == "overwritten":
        scene.step({}, new_block_ids_to_zero=[had[-1]])
    saves = moved([moves for moves in scene.run(new, 1).saves if moves.group])
    assert saves == ([(chain[3], had[-1])] if case == "lost" else [])
