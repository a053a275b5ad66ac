"""The scheduler side when weights or adapters change, or another connector loads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.ucm.integration.vllm.connector.scene import SIZE, TOKENS, Scene, moved, request
from ucm.integration.vllm.connector.metadata import WeightsReport

if TYPE_CHECKING:
    from tests.clock import SimulatedClock

# Starting anew


def test_what_was_computed_before_is_not_saved_under_new_names(clock: SimulatedClock) -> None:
    scene = Scene(clock, batches=2)
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


def test_what_was_found_before_is_not_loaded(clock: SimulatedClock) -> None:
    scene = Scene(clock)
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
def test_blocks_of_an_adapter_are_saved_when_the_engine_has_surely_read_what_was_hashed(
    clock: SimulatedClock, batches: int
) -> None:
    """The engine reads an adapter's files in the request's first step, after its keys were computed."""
    scene = Scene(clock, batches=batches)
    new = adapted(TOKENS, "same")
    scene.admit(new)
    assert scene.run(new, 9, scene.rows).saves == []
    for _ in range(batches - 1):
        assert scene.run(new, 1).saves == []
    chain = scene.keys.chain(TOKENS, SIZE)
    saved = moved(scene.run(new, 1).saves)
    assert saved == list(zip(chain[:2], scene.rows[0], strict=False))


def test_blocks_of_an_adapter_that_changed_before_the_engine_read_it_are_never_saved(clock: SimulatedClock) -> None:
    scene = Scene(clock)
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
def test_blocks_of_an_adapters_request_that_ends_early(clock: SimulatedClock, adapter: str, count: int) -> None:
    scene = Scene(clock)
    new = adapted(TOKENS, adapter)
    scene.admit(new)
    assert scene.run(new, 18, scene.rows).saves == []
    scene.side.finished(new)
    assert len(moved(scene.step({}).late_saves)) == count


def test_what_another_connector_has_loaded_is_not_saved_nor_found_again_in_vllms_cache(clock: SimulatedClock) -> None:
    scene = Scene(clock, others=True)
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
    scene.side.others.forget()
    scene.admit(behind, SIZE)
    assert len(moved(scene.run(behind, 14, scene.rows).saves)) > 0


def test_what_another_connector_has_loaded_is_found_in_vllms_cache_also_by_a_prompt_that_differs_later_in_the_chunk(
    clock: SimulatedClock,
) -> None:
    scene = Scene(clock, others=True, stored_tokens=2 * SIZE)
    foreign, behind = request(TOKENS, "foreign"), request([*TOKENS[:SIZE], *range(50, 64)], "behind")
    scene.admit(foreign)
    foreign.num_computed_tokens = SIZE
    assert scene.run(foreign, 14, scene.rows).saves == []
    scene.admit(behind, SIZE)
    assert scene.run(behind, 14, scene.rows).saves == []


def test_what_is_computed_is_saved_though_another_connector_has_loaded_it_elsewhere(clock: SimulatedClock) -> None:
    scene = Scene(clock, others=True)
    foreign, computed = request(TOKENS, "foreign"), request(TOKENS, "computed")
    scene.admit(foreign)
    foreign.num_computed_tokens = SIZE
    scene.run(foreign, 14, scene.rows)
    scene.admit(computed)
    assert len(moved(scene.run(computed, 18, scene.rows).saves)) == 4


def test_what_we_have_loaded_is_no_other_connectors(clock: SimulatedClock) -> None:
    scene = Scene(clock, others=True)
    scene.keep(TOKENS[:SIZE])
    new = request(TOKENS)
    assert scene.admit(new) == SIZE
    assert len(moved(scene.run(new, 14, scene.rows).saves)) == 3


def test_after_new_names_nothing_in_vllms_cache_is_known_to_be_ours(clock: SimulatedClock) -> None:
    scene = Scene(clock, others=True)
    foreign, other = request(TOKENS, "foreign"), request([*range(50, 70)], "other")
    scene.admit(foreign)
    foreign.num_computed_tokens = SIZE
    scene.run(foreign, 14, scene.rows)
    scene.side.start_anew()
    scene.admit(other, SIZE)
    assert scene.run(other, 16, scene.rows).saves == []


def test_nothing_more_is_saved_or_found_for_an_adapter_that_was_replaced_in_place(clock: SimulatedClock) -> None:
    """A running request continues with other weights, and its later blocks depend on the earlier KV."""
    scene = Scene(clock)
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


def test_workers_look_at_all_weights_once_they_are_in_doubt(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    assert [scene.step({}).verify for _ in range(2)] == [False, False]
    scene.side.doubt(waits=False)
    assert [scene.step({}).verify for _ in range(2)] == [True, False]


def test_promises_that_cannot_be_broken_wait_for_that(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    scene.keep(TOKENS)
    scene.side.doubt(waits=True)
    assert scene.side.matched_tokens(request(TOKENS), 0) is None
    assert scene.step({}).verify
    assert not scene.side.reported(WeightsReport(looked=0))
    assert scene.side.matched_tokens(request(TOKENS), 0) is None
    assert not scene.side.reported(WeightsReport(looked=1))
    assert scene.matched(request(TOKENS), 0) == 16


def test_each_start_anew_is_another_epoch_and_news_of_an_old_one_starts_nothing(clock: SimulatedClock) -> None:
    scene = Scene(clock)
    assert scene.step({}).epoch == 0
    assert scene.side.reported(WeightsReport(changed=0))
    scene.side.start_anew()
    assert scene.step({}).epoch == 1
    assert not scene.side.reported(WeightsReport(changed=0))
    assert scene.side.reported(WeightsReport(changed=1))


def test_a_step_is_confirmed_when_all_ranks_have_looked_and_seen_nothing(clock: SimulatedClock) -> None:
    scene = Scene(clock, confirms=True)
    assert scene.step({}).confirmed == 0
    scene.side.reported(WeightsReport(looked=1))
    assert scene.step({}).confirmed == 1
    scene.side.reported(WeightsReport(changed=0, looked=2))
    assert scene.step({}).confirmed == 1
    assert Scene(clock).step({}).confirmed is None


@pytest.mark.parametrize("others", [0, 3])
def test_a_save_says_which_step_was_the_last_to_compute_of_it(clock: SimulatedClock, others: int) -> None:
    """The saves of an ended request do not wait for later steps of other requests."""
    scene = Scene(clock, batches=2)
    new = request(TOKENS[:7])
    scene.admit(new)
    assert [moves.step for moves in scene.run(new, 7, scene.rows).saves] == [1]
    scene.run(new, 1)
    new.output.append(7)
    for _ in range(others):
        scene.step({})
    scene.side.finished(new)
    assert [moves.step for moves in scene.step({}).late_saves] == [2]
